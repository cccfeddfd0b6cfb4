"""What is promised to a peer among members that lie, as the simulator checks it."""

import json
from types import SimpleNamespace

import pytest

from peer.sync.engine.round.heads import ALONE_SECONDS
from simulation.checks import Breach, Checks
from simulation.misled import MOST_LED_SECONDS, Company, Misled
from simulation.records import Seen
from simulation.world import Scenario, World

STATE = "d" * 64


class Peer:
    """As much of a machine as is looked at. met: whom it has met; signers: of the certificate on its disk."""

    def __init__(self, folder, name, met=(), signers=(), behind_nat=False):
        self.peer, self.short, self.sidecar, self._met = name, name, object(), met
        self.node, self.link = SimpleNamespace(seen={}), SimpleNamespace(behind_nat=behind_nat)
        self.world = SimpleNamespace(network=SimpleNamespace(hosts={}), faults_done={})
        self.disk = SimpleNamespace(root=lambda: folder / name)
        if signers:
            members = [{"peer": peer, "number": 1, "samples": 8} for peer in sorted(signers)]
            made = {"digest": STATE, "parent": "e" * 64, "round": 3, "samples": 100, "members": members}
            sealed = [{"peer": peer, "key": "ssh-rsa A", "seal": "A" * 342 + "==", "membership": {"until": 1, "signature": "a" * 128}} for peer in sorted(signers)]
            (folder / name / "state").mkdir(parents=True)
            (folder / name / "state" / "certificate.json").write_text(json.dumps({"made": made, "signers": sealed}))

    def met(self):
        return self._met

    def sees(self, *others, read=1000.0, since=0.0):
        self.node.seen = {other.peer: Seen(1.0, read, since) for other in others}
        self.world.network.hosts = {other.peer: SimpleNamespace(link=other.link) for other in others}


@pytest.fixture
def peer(tmp_path):
    return lambda name, **values: Peer(tmp_path, name, **values)


def test_while_somebody_is_live_whom_it_has_met_or_who_sealed_its_state_liars_must_not_lead_it(peer):
    ours, liar, friend, signer = peer("ours", met=["friend"], signers=["signer", "ours"]), peer("liar"), peer("friend"), peer("signer")
    company = Company({"liar"})
    company.look([ours], 400.0)
    for live in (friend, signer):
        ours.sees(liar, live)
        assert f"though {live.peer} is live" in company.breaks(ours, [ours, live], [STATE], 1001.0)
    ours.sees(liar, friend, read=980.0)
    assert "live" not in company.breaks(ours, [ours, friend], [], 1001.0), "its record is 21 s old"


def test_a_certificate_of_what_the_host_has_discarded_says_nothing(peer):
    """Seed 91000635: a newcomer's only certificate was of a discarded state, and who had sealed it was asleep."""
    ours, liar, signer, friend = peer("ours", signers=["signer"]), peer("liar"), peer("signer", signers=["signer"]), peer("friend")
    ours.sees(liar, signer)
    for discarded in ("", STATE):
        company = Company({"liar"}, lambda digest, discarded=discarded: digest == discarded)
        company.look([ours], 1000.0)
        assert ("though signer is live" in company.breaks(ours, [ours, signer], [STATE], 1001.0)) == (not discarded)
    ours._met = ["friend"]
    ours.sees(liar, friend)
    assert "though friend is live" in company.breaks(ours, [ours, friend], [], 1001.0), "whom it has met it has met"


def test_with_a_certificate_of_its_line_nobody_must_lead_it_for_some_minutes_after_its_company_was_live(peer):
    ours, liar, friend = peer("ours", met=["friend"], signers=["gone", "ours"]), peer("liar"), peer("friend")
    company = Company({"liar"})
    ours.sees(liar)
    company.look([ours], 400.0)
    ours.sees(liar, friend, read=1000.0)
    company.look([ours], 1000.0)
    ours.sees(liar, read=1000 + ALONE_SECONDS)
    company.look([ours], 1100.0)
    assert "100 s after somebody was live" in company.breaks(ours, [ours], [STATE], 1100.0)
    assert not company.breaks(ours, [ours], ["e" * 64], 1100.0), "of another line"
    assert not company.breaks(ours, [ours], [STATE], 1000 + ALONE_SECONDS)
    ours.sidecar = object()
    company.look([ours], 1200.0)
    assert company.breaks(ours, [ours], [STATE], 1100 + ALONE_SECONDS), "it was started again"


def test_a_newcomer_must_go_by_the_live_signers_of_what_it_is_shown(peer):
    ours, liar, one, other = peer("ours"), peer("liar"), peer("one", signers=["one", "gone"]), peer("other")
    company = Company({"liar"})
    ours.sees(liar, one, other)
    assert "though one is live" in company.breaks(ours, [ours, one, other], [], 1001.0)
    ours.sees(liar, one, other, since=1000.0)
    assert "though one is live" in company.breaks(ours, [ours, one, other], [], 1001.0), "no liar's vote counts before all who were there were asked"
    ours.node.seen["liar"] = Seen(1.0, 1000.0, 990.0)
    assert not company.breaks(ours, [ours, one, other], [], 1001.0), "it has hardly had time to ask"
    ours.sees(liar, other)
    assert not company.breaks(ours, [ours, one, other], [], 1001.0), "nobody is there who could show it"
    ours.sees(liar, one, other)
    ours.world.faults_done["stop"] = 1
    assert not company.breaks(ours, [ours, one, other], [], 1001.0), "who was stopped when it was asked has shown nothing"


def test_behind_nat_company_that_cannot_be_dialled_leads_nobody(peer):
    ours, friend = peer("ours", met=["friend"], behind_nat=True), peer("friend", behind_nat=True)
    ours.sees(friend)
    assert not Company(set()).breaks(ours, [ours, friend], [], 1001.0)
    friend.link.behind_nat = False
    assert Company(set()).breaks(ours, [ours, friend], [], 1001.0)


@pytest.mark.parametrize(("by_members", "met", "end"), [(False, (), Breach), (True, ("friend",), Breach), (True, (), Misled)])
def test_where_nothing_is_promised_the_world_ends_and_no_promise_is_broken(peer, by_members, met, end):
    ours, friend = peer("ours", met=met), peer("friend")
    ours.sees(friend)
    world = SimpleNamespace(loop=SimpleNamespace(time=lambda: 1001.0), strangers={"liar"}, stop=lambda: None, live=[ours, friend])
    checks = Checks(world)
    checks.forged["f" * 64] = by_members
    checks._follows_liars(ours, "f" * 64)
    with pytest.raises(end, match="which a stranger made up"):
        checks.raise_if_broken()


@pytest.mark.parametrize("members", [True, False])
def test_one_that_all_have_met_signs_made_up_children_and_reduces_honestly(members):
    """It led three of four within a minute, and two signers then led the rest."""
    world = World(Scenario(seed=3, peers=4, hours=0.015, faults=(), members=members, met_child=True))
    outcome = world.play()
    (liar,) = world.strangers
    assert world.checks.forged_by_met and sum({*machine.met()} >= {liar} for machine in world.machines) >= 3
    assert not outcome.breach, outcome.breach + "\n" + "\n".join(outcome.lines[-60:])
    assert not world.checks.lies.proven and outcome.adopted["averaged"] > 10


@pytest.fixture
def led(peer):
    """Four peers that have met each other and a liar, and a state that the liar made up. Who follows it then."""
    names = {"ann", "bob", "cy", "dee"}
    peers = {name: peer(name, met=names - {name}) for name in names}
    clock = SimpleNamespace(now=1000.0)
    live = [*peers.values()]
    world = SimpleNamespace(loop=SimpleNamespace(time=lambda: clock.now), strangers={"liar"}, stop=lambda: None, live=live, machines=live)
    checks = Checks(world)
    checks.forged_by_met.add("made up")
    checks._commit_forged("made up", "one", 2, 24, (("liar", 1, 8),))

    def look(*follow, at=1000.0, seen=names):
        clock.now = at
        for name, machine in peers.items():
            machine.sees(*(peers[other] for other in seen - {name}), read=at)
            checks._stands[name] = 1, "made up" if name in follow else "two"
        checks.led()
        try:
            checks.raise_if_broken()
        except Breach as breach:
            return str(breach)
        return ""

    return look


def test_one_whom_they_have_met_leads_most_honest_peers_to_no_state_that_it_made_up(led):
    assert not led("ann", "bob")
    assert "3 of 4 honest peers follow" in led("ann", "bob", "cy")


def test_and_nobody_for_two_minutes_while_two_others_are_live_elsewhere(led):
    assert not led("ann") and not led("ann", at=1000.0 + MOST_LED_SECONDS)
    assert not led(at=1130.0) and not led("ann", at=1140.0), "it was back"
    assert not led("ann", at=1200.0, seen={"ann", "bob"}) and not led("ann", at=1270.0), "it saw only one of them"
    assert "follows for 121 s" in led("ann", at=1391.0)
