"""A peer that sees strangers only: when these lead it to what they sign, and when it waits for those whom it knows."""

import pytest

from peer.contracts import CommittedRound, Member
from peer.sync.engine.certificate import NOTHING, Certificate, Shown, Signer, judged, line_of
from peer.sync.engine.round.heads import ALONE_SECONDS, DESERTED_SECONDS, Heads
from peer.sync.engine.state import Head, State
from swarm.records import JOINING, Membership
from tests.peer.sync.test_heads import View, lineage, record


def certificate(state: State, *signers: str) -> Certificate:
    made = CommittedRound(state.digest, "e" * 64, state.header.round, state.header.samples, tuple(Member(peer, 1, 8) for peer in signers))
    return Certificate(made, tuple(Signer(peer, "", "", Membership(until=0, signature="")) for peer in signers))


class Evidence:
    """What strangers show, and ours."""

    countersigned = ""

    def __init__(self, ours: Shown, shown: dict[str, Shown]):
        self.ours, self.shown = ours, shown

    @property
    def signers(self):
        return self.ours.certificate.peers - {"me"} if self.ours.certificate else ()

    def judge(self, strangers):
        return judged({peer: self.shown.get(peer, NOTHING) for peer in strangers}, self.ours)

    def holds_us(self, judgement):
        return True


@pytest.fixture
def alone(tmp_path):
    def make(ours: State, own: Certificate | None, leads: bool = True, **shown: Shown) -> View:
        view = View(tmp_path, ours, ["bob"])
        evidence = Evidence(Shown(own, line_of(ours)), shown)
        view.heads = Heads(view.met, lambda: view.records, ours, clock=view.clock, leads=leads, evidence=evidence)
        return view

    return make


def forged_after(ours: State) -> Head:
    return Head("f" * 64, ours.header.samples + 1, (ours.digest, *ours.header.parents[:7]))


def test_for_five_minutes_after_its_company_has_gone_strangers_lead_it_nowhere(alone):
    """They claim to stand after all that is certified, and show a copy of our own certificate."""
    *_, ours = lineage(3)
    forged, own = forged_after(ours), certificate(ours, "ann", "bob", "cy")
    liars = [record(f"liar{number}", forged) for number in range(4)]
    shows = Shown(own, forged.digest[:12] + line_of(ours))
    view = alone(ours, own, **{liar.peer_id: shows for liar in liars})
    view.clock.now += 1000  # since it began
    assert view.sees(record("bob", ours), *liars).right() is None
    view.clock.now += 1
    assert view.sees(*liars).right() is None
    view.clock.now += ALONE_SECONDS - 2
    assert view.sees(*liars).right() is None
    assert view.sees(record("bob", ours, phase=JOINING), *liars).right() is None, "it has just come back"
    view.clock.now += ALONE_SECONDS - 1
    assert view.sees(*liars).right() is None
    view.clock.now += 1
    assert view.sees(*liars).right() == forged.digest, "nobody else is left, as far as it can know"


def test_who_has_just_started_waits_as_long_for_its_company(alone):
    *_, ours = lineage(3)
    forged = forged_after(ours)
    view = alone(ours, certificate(ours, "ann", "bob"), liar=Shown(None, forged.digest[:12] + line_of(ours)))
    view.clock.now += ALONE_SECONDS - 1
    assert view.sees(record("liar", forged)).right() is None
    view.clock.now += 1
    assert view.sees(record("liar", forged)).right() == forged.digest


def test_a_signer_of_its_certificate_is_company_also_where_others_show_a_newer_one(alone):
    *_, ours, one, two = lineage(5)
    own, newer = certificate(ours, "cy", "dan"), certificate(one, "gone", "away")
    liars = [record(f"liar{number}", two) for number in range(4)]
    view = alone(ours, own, **{liar.peer_id: Shown(newer, line_of(two)) for liar in liars})
    view.clock.now += 2 * ALONE_SECONDS
    assert view.sees(*liars, record("cy", ours)).right() is None
    assert view.sees(*liars).right() is None
    view.clock.now += ALONE_SECONDS
    assert view.sees(*liars).right() == two.digest


def test_live_signers_of_what_came_after_lead_it_at_once(alone):
    *_, ours, child = lineage(4)
    view = alone(ours, certificate(ours, "ann", "bob"), cy=Shown(certificate(child, "cy", "dan"), line_of(child)))
    assert view.sees(record("cy", child)).right() == child.digest


def test_who_holds_no_certificate_has_nothing_to_wait_for(alone):
    *_, ours, child = lineage(4)
    assert alone(ours, None).sees(record("cy", child)).right() == child.digest


def test_behind_nat_nobody_waits_for_company_that_cannot_lead(alone):
    *_, ours, child = lineage(4)
    view = alone(ours, certificate(ours, "ann", "eve"), leads=False, cy=Shown(None, line_of(child)))
    assert view.sees(record("bob", ours, client_mode=True), record("cy", child)).right() is None
    view.clock.now += DESERTED_SECONDS
    assert view.right() == child.digest


def test_what_strangers_led_it_to_is_left_when_one_whom_it_has_met_is_back_meanwhile(alone):
    """It would stand on what a stranger made up, and lead those back who trust it."""
    *_, ours, child = lineage(4)
    view = alone(ours, None)
    assert view.sees(record("stranger", child)).right() == child.digest
    assert not view.heads.keeps(Head.of(child))
    view.sees(record("stranger", child), record("bob", ours))
    assert view.right() is None and view.heads.keeps(Head.of(child))
    view.sees(record("stranger", child), record("bob", child))
    assert view.right() == child.digest and not view.heads.keeps(Head.of(child)), "bob says so, too"
    assert not view.sees(record("stranger", ours)).heads.keeps(Head.of(child)), "and what bob gave counts once it has gone"


def test_who_alone_has_sealed_its_state_waits_for_nobody(alone):
    """As one whose rounds nobody else came to."""
    *_, ours, child = lineage(4)
    view = alone(ours, certificate(ours, "me"), cy=Shown(None, line_of(child)))
    assert view.sees(record("cy", child)).right() == child.digest


def test_signers_of_its_certificate_that_went_elsewhere_lead_it_there(alone):
    """Three that each went on alone would else wait for each other for ever (found in the simulator)."""
    *_, ours = lineage(3)
    theirs = lineage(2, after=lineage(2)[-1], change=3.0)[-1]
    newer = certificate(theirs, "gone", "away")
    view = alone(ours, certificate(ours, "cy", "dan"), eve=Shown(newer, line_of(theirs)), cy=Shown(None, line_of(theirs)))
    assert view.sees(record("cy", theirs), record("eve", theirs)).right() == theirs.digest


def test_a_signer_that_has_just_come_back_counts_before_liars_that_were_there_all_the_time(alone):
    """After a power cut, all who know better are joining (found in the simulator)."""
    *_, base, ours = lineage(3)
    liars = [record(f"liar{number}", forged_after(ours)) for number in range(3)]
    view = alone(base, None, cy=Shown(certificate(ours, "cy", "dan"), line_of(ours)))
    assert view.sees(*liars, record("cy", ours, phase=JOINING)).right() == ours.digest


def test_behind_nat_who_waited_for_its_company_still_knows_that_a_stranger_is_ahead(alone):
    """Found by the simulator, seed 20000191: after five minutes the stranger's record named ours no longer, and what came was never taken."""
    *_, ours = lineage(3)
    ahead = lineage(20, after=ours, by=("cy",))
    own, here = certificate(ours, "ann", "eve"), record("dan", ours, client_mode=True)
    shows = {"cy": Shown(own, line_of(ahead[-1])), "dan": Shown(own, line_of(ours))}
    view = alone(ours, own, leads=False, **shows)
    for state in ahead[1:-1]:
        assert view.sees(record("cy", state), here).right() is None
        view.clock.now += ALONE_SECONDS / 18
    newest = ahead[-1]
    assert ours.digest not in newest.header.parents[:8]
    assert view.sees(record("cy", newest), here).right() is None
    view.clock.now += DESERTED_SECONDS
    assert view.right() == newest.digest
    assert not view.heads.keeps(Head.of(newest)), "it is taken when it is here"
    view.sees(record("cy", newest), here, record("eve", ours, client_mode=False))
    assert view.heads.keeps(Head.of(newest)), "one who sealed our certificate is back meanwhile"
