"""Who is reported: members whose work makes the model worse, unlike the others'; and nobody who is honest."""

import random

import pytest

from benchmarks.false_reports import HONEST, LIES, audited, honest, lied
from peer.audit.tally import LEAST_OTHERS, LEAST_ROUNDS, WINDOW, Tally


def reported(tally):
    return [found.peer for found in tally.findings() if found.reported]


@pytest.mark.parametrize("kind", HONEST)
def test_no_honest_member_is_reported_in_twenty_runs_of_a_hundred_rounds(kind):
    for seed in range(20):
        print(f"seed={seed}")
        assert not honest(kind, seed, rounds=100)


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_among_five_is_reported_alone_within_fifty_rounds_of_one_audit(lie):
    found = []
    for seed in range(10):
        print(f"seed={seed}")
        found.append(list(lied(lie, seed, rounds=50)))
    assert found.count(["liar"]) >= 9 and found.count([]) == 10 - found.count(["liar"])


def test_two_liars_of_five_are_both_reported_and_nobody_else():
    rng = random.Random(1)
    members = {f"Qm{n}": lambda n=n: HONEST["far from the end"](rng, n) for n in range(3)}
    members |= {name: lambda: LIES["turned round"](rng, 0) for name in ("one", "other")}
    assert set(audited(rng, members, 60, each_round=2)) == {"one", "other"}


def test_nothing_is_said_before_enough_was_measured_of_a_member_and_of_two_others():
    tally = Tally()
    for other in range(LEAST_OTHERS):
        for _ in range(LEAST_ROUNDS - (other == 1)):
            tally.add(f"Qm{other}", -0.01)
    for number in range(LEAST_ROUNDS + 1):
        assert not reported(tally), number
        tally.add("liar", 1.0 + 0.001 * number)
    assert not reported(tally), "one of the others was measured too seldom"
    tally.add("Qm1", -0.01)
    assert reported(tally) == ["liar"]


def test_who_learns_less_or_nothing_is_not_reported():
    tally = Tally()
    for number in range(10):
        for other in range(4):
            tally.add(f"Qm{other}", -0.01 - 0.0001 * (number % 3))
        tally.add("slow", -0.001)
        tally.add("idle", 0.0)
    assert not reported(tally)


def test_a_member_that_begins_to_lie_is_reported_and_one_that_stops_is_not_any_more():
    rng, tally = random.Random(3), Tally()

    def go_on(rounds, turncoat):
        for _ in range(rounds):
            for other in range(4):
                tally.add(f"Qm{other}", rng.gauss(-0.01, 0.003))
            tally.add("turncoat", rng.gauss(turncoat, 0.003))

    go_on(100, -0.01)
    assert not reported(tally)
    go_on(WINDOW, 0.02)
    assert reported(tally) == ["turncoat"]
    go_on(WINDOW, -0.01)
    assert not reported(tally)


def test_one_measurement_of_a_round_in_which_the_model_leapt_hides_no_liar():
    """On the toy the first changes are 18 times the later ones: beside one of them, thirty more were needed."""
    rng, tally = random.Random(4), Tally()
    for peer, first in (("liar", 0.073), ("Qm0", -0.073), ("Qm1", -0.032), ("Qm2", -0.01), ("Qm3", -0.003)):
        tally.add(peer, first)
    for _ in range(9):
        for other in range(4):
            tally.add(f"Qm{other}", rng.gauss(-0.003, 0.001))
        tally.add("liar", rng.gauss(0.003, 0.001))
    assert reported(tally) == ["liar"] and tally.findings()[0].change == pytest.approx(0.01, abs=0.001), "shown as it was measured"


def test_those_reported_come_first_and_then_whose_work_does_most_harm():
    tally = Tally()
    for number in range(LEAST_ROUNDS):
        for peer, change in (("good", -0.02), ("better", -0.03), ("usual", -0.02), ("liar", 0.5 + 0.001 * number)):
            tally.add(peer, change)
    tally.add("new", 9.0)
    found = tally.findings()
    assert [each.peer for each in found] == ["liar", "new", "good", "usual", "better"] and found[0].reported and not found[1].reported
    assert (found[0].rounds, found[1].rounds) == (LEAST_ROUNDS, 1) and found[0].change == pytest.approx(0.5025)


def test_the_numbers_of_as_many_members_are_kept_and_the_longest_ago_measured_goes(monkeypatch):
    monkeypatch.setattr("peer.audit.tally._MOST_MEMBERS", 3)
    tally = Tally()
    for peer in ("a", "b", "c", "a", "d"):
        tally.add(peer, 0.0)
    assert {found.peer for found in tally.findings()} == {"a", "c", "d"} and tally.rounds("a") == 2 and tally.rounds("b") == 0
