"""Who is left out, for how long, and on whose word; and how many strangers count."""

import random
import time
from types import SimpleNamespace

import pytest

from peer.sync.engine.net.messages import MOST_NAMED
from peer.sync.engine.round.company import MOST_STRANGERS, Company
from peer.sync.engine.round.rounds import Rounds
from swarm.records import PeerRecord
from tests.clock import Clock

FRIENDS = ("ann", "bob", "cleo")


class Swarm:
    """The company of a peer that has met FRIENDS; `passes` rounds and seconds."""

    def __init__(self, met=FRIENDS, trusted=()):
        self.round, self.clock = 0, Clock()
        self.company = Company(frozenset(met), lambda: self.round, self.clock, "us", lambda: frozenset(trusted))

    def passes(self, rounds: int = 0, seconds: float = 0.0) -> None:
        self.round += rounds
        self.clock.now += seconds

    def rounds_out(self, peer: str) -> int:
        """After how many rounds more, of no time, it is with us again."""
        began = self.round
        while self.company.left_out(peer):
            self.passes(rounds=1)
        return self.round - began


def record_of(peer: str) -> PeerRecord:
    return PeerRecord(peer_id=peer, config="c", schema="s", round=1, samples=8, digest="d", waiting_samples=8, time=time.time())


def counted(company: Company, *peers: str) -> list[str]:
    return [record.peer_id for record in company.counted([record_of(peer) for peer in peers])]


@pytest.mark.parametrize(("peer", "rounds"), [("ann", [1, 4, 16, 64, 256, 256]), ("stranger", [16, 64, 256, 256])])
def test_a_culprit_is_left_out_for_longer_after_every_offence_and_never_for_good(peer, rounds):
    swarm = Swarm()
    found = []
    for _ in rounds:
        swarm.company.blame([peer])
        found.append(swarm.rounds_out(peer))
    assert found == rounds and not swarm.company.left_out("bob")


def test_strangers_without_a_record_do_not_hide_from_others_whom_we_leave_out():
    """A ticket names eight. Eight fresh keys that joined wrongly had the one that spoils rounds left out of it."""
    swarm = Swarm()
    swarm.company.blame(["bob", *(f"stranger {index}" for index in range(20)), "ann"])
    rounds = SimpleNamespace(company=swarm.company, _neighbours=SimpleNamespace(knows=FRIENDS.__contains__))
    named = Rounds._without(rounds)
    assert named[-2:] == ("bob", "ann") and len(named) == MOST_NAMED and "stranger 19" in named


@pytest.mark.parametrize("peer", ["ann", "stranger"])
def test_who_is_only_slow_is_tried_again_within_64_rounds(peer):
    """A newcomer that was late five times was out for 256 rounds: minutes, in which it made nothing that counted."""
    swarm = Swarm()
    found = []
    for _ in range(6):
        swarm.company.blame([peer], slow=[peer])
        found.append(swarm.rounds_out(peer))
    assert found == [1, 4, 16, 64, 64, 64]


def test_long_rounds_end_an_exclusion_sooner():
    swarm = Swarm()
    swarm.company.blame(["stranger"])
    swarm.passes(rounds=1, seconds=31.0)
    assert swarm.company.left_out("stranger")
    swarm.passes(seconds=1.0)
    assert not swarm.company.left_out("stranger")


def test_good_rounds_take_offences_back_but_not_one_each():
    swarm = Swarm()
    for _ in range(3):
        swarm.company.blame(["ann"])
        swarm.rounds_out("ann")
        swarm.company.averaged(["ann"])
    swarm.company.blame(["ann"])
    assert swarm.rounds_out("ann") == 64  # a good round between two offences changes nothing
    for _ in range(4 * 16):
        swarm.company.averaged(["ann"])
    swarm.company.blame(["ann"])
    assert swarm.rounds_out("ann") == 1


def test_a_peer_that_was_slow_or_went_away_without_a_word_is_soon_back_though_a_stranger():
    swarm = Swarm()
    swarm.company.blame(["stranger", "us"], slow={"stranger"})
    assert swarm.company.all_left_out() == ["stranger"]
    assert swarm.rounds_out("stranger") == 1


def test_the_word_of_a_peer_that_we_met_about_a_stranger_is_believed_and_not_the_other_way_round():
    swarm = Swarm()
    assert swarm.company.told("ann", ["stranger"])
    assert swarm.company.left_out("stranger") and not swarm.company.left_out("ann")
    assert swarm.company.told("newcomer", ["bob"])
    assert swarm.company.left_out("newcomer") and not swarm.company.left_out("bob")
    assert swarm.rounds_out("newcomer") == 1  # it may have seen the truth


def test_of_two_that_we_have_met_neither_is_left_out_on_the_others_word_and_both_when_it_is_said_again():
    swarm = Swarm()
    assert swarm.company.told("ann", ["bob"])  # ann keeps away from bob now: the next attempt can begin
    assert not swarm.company.all_left_out()
    assert swarm.company.told("ann", ["bob"])
    assert set(swarm.company.all_left_out()) == {"ann", "bob"}
    swarm.passes(seconds=1000.0)
    swarm.company.told("ann", ["bob"])
    assert not swarm.company.all_left_out()  # that was long ago


def test_what_a_peer_was_told_itself_is_no_accusation():
    swarm = Swarm()
    for _ in range(5):
        assert not swarm.company.told("ann", ["bob"], hearsay=True)
        swarm.passes(seconds=601.0)
    assert not swarm.company.all_left_out()


def test_who_again_and_again_only_heard_that_others_are_to_blame_is_left_out():
    """One that answers every member so, fails all rounds, and had cost nobody anything."""
    swarm = Swarm()
    assert not swarm.company.told("ann", ["bob"], hearsay=True)
    assert swarm.company.told("ann", ["cleo"], hearsay=True) and swarm.company.all_left_out() == ["ann"]
    assert swarm.rounds_out("ann") == 1
    assert swarm.company.told("ann", ["bob"], hearsay=True) and swarm.rounds_out("ann") == 4


def test_who_fails_a_round_by_hearsay_and_names_nobody_is_left_out():
    swarm = Swarm()
    assert swarm.company.told("ann", [], hearsay=True) and swarm.rounds_out("ann") == 1


def test_who_accuses_one_of_its_like_after_the_other_is_left_out_itself():
    swarm = Swarm((*FRIENDS, "dan", "eve"))
    for peer in ("bob", "cleo", "dan"):
        swarm.company.told("ann", [peer])
    assert not swarm.company.all_left_out()
    swarm.company.told("ann", ["eve"])
    assert swarm.company.all_left_out() == ["ann"]


def test_who_accuses_us_again_and_again_is_left_out_and_we_are_no_strangers_to_ourselves():
    swarm = Swarm()
    swarm.company.told("ann", ["us"])
    assert not swarm.company.all_left_out()
    swarm.company.told("ann", ["us"])
    assert swarm.company.all_left_out() == ["ann"]


def test_a_stranger_that_fails_rounds_and_names_nobody_is_left_out():
    swarm = Swarm()
    assert swarm.company.told("stranger", [], hearsay=True) and swarm.company.left_out("stranger")


def test_at_most_four_strangers_count_and_those_seen_longest_come_first():
    company = Swarm().company
    names = [f"stranger {number}" for number in range(400)]
    for name in names:
        company.answered(name)
    assert counted(company, "ann", *names) == ["ann", *names[:MOST_STRANGERS]]


def test_a_stranger_counts_from_its_first_answer_until_it_gives_none():
    company = Swarm().company
    assert counted(company, "ann", "stranger") == ["ann"]
    company.answered("stranger")
    assert counted(company, "ann", "stranger") == ["ann", "stranger"]
    company.did_not_answer("stranger")
    assert counted(company, "ann", "stranger") == ["ann"]
    company.averaged(["stranger"])
    assert counted(company, "ann", "stranger") == ["ann", "stranger"]


def test_without_anybody_that_we_have_met_strangers_count_until_they_do_not_answer():
    company = Swarm().company
    assert counted(company, "x", "y") == ["x", "y"]
    company.did_not_answer("x")
    assert counted(company, "x", "y") == ["y"]


def test_founders_who_have_met_nobody_count_everybody():
    company = Swarm(met=()).company
    names = [f"founder {number}" for number in range(20)]
    assert counted(company, *names) == names and not company.is_stranger(names[0])


def test_a_few_new_strangers_are_tried_at_a_time_and_none_twice():
    company = Swarm().company
    records = [record_of(f"stranger {number}") for number in range(10)]
    first = [record.peer_id for record in company.untried(records)]
    assert first == [record.peer_id for record in records[:MOST_STRANGERS]]
    for peer in first:
        company.did_not_answer(peer)
    assert not {record.peer_id for record in company.untried(records)} & set(first)


def test_no_group_holds_two_of_whom_one_leaves_the_other_out(seed):
    rng, company = random.Random(seed), Swarm().company
    names = [*FRIENDS, "x", "y", "z", "us"]
    for number in range(200):
        without = {name: rng.sample(names, rng.choice([0, 0, 1, 3])) for name in names}
        without["us"] = []
        out = company.at_odds(str(number), {name: set(whom) - {"us"} for name, whom in without.items()}, "us")
        left = set(names) - out
        assert "us" in left and not any(other in without[one] for one in left for other in left - {one, "us"})


@pytest.mark.parametrize("parent", "abcdefgh")
def test_of_two_at_odds_one_whom_the_host_trusts_stays(parent):
    company = Swarm(trusted=["ann", "cleo"]).company
    assert company.at_odds(parent, {"ann": {"bob"}, "bob": {"cleo", "ann"}, "cleo": ()}, "us") == {"bob"}
    assert company.at_odds(parent, {"ann": {"cleo"}, "bob": (), "cleo": ()}, "us") < {"ann", "cleo"}


def test_the_word_of_one_whom_the_host_trusts_is_believed_of_one_whom_it_does_not():
    """Else who stalls twice within ten minutes would take a reducer out with it."""
    swarm = Swarm(trusted=["ann", "cleo"])
    assert swarm.company.told("ann", ["bob"]) and swarm.company.left_out("bob") and not swarm.company.left_out("ann")
    swarm = Swarm(trusted=["ann", "cleo"])
    swarm.company.told("bob", ["ann"])
    assert not swarm.company.left_out("ann")


def test_whom_the_host_trusts_is_no_stranger():
    company = Swarm(trusted=["dora"]).company
    assert not company.is_stranger("dora") and company.is_stranger("eve")


def test_of_two_at_odds_a_stranger_goes_then_whoever_has_most_quarrels_then_each_in_turn():
    company = Swarm().company
    nobody: dict[str, list[str]] = {"ann": [], "bob": [], "cleo": [], "us": []}
    assert company.at_odds("p", nobody | {"stranger": ["ann", "bob", "cleo"]}, "us") == {"stranger"}
    assert company.at_odds("p", nobody | {"ann": ["stranger"], "stranger": []}, "us") == {"stranger"}
    assert company.at_odds("p", nobody | {"ann": ["bob", "cleo"]}, "us") == {"ann"}
    assert company.at_odds("p", nobody | {"ann": ["cleo"], "bob": ["cleo"]}, "us") == {"cleo"}
    outs = [frozenset(company.at_odds(f"parent {number}", nobody | {"ann": ["bob"]}, "us")) for number in range(100)]
    assert set(outs) == {frozenset({"ann"}), frozenset({"bob"})} and 30 < outs.count(frozenset({"ann"})) < 70


def test_who_was_in_a_round_that_worked_is_no_stranger_also_if_it_brought_nothing():
    company = Swarm().company
    assert company.is_stranger("assistant")
    company.averaged(["assistant"])
    assert not company.is_stranger("assistant")
