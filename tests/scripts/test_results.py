"""What result.json says of a run, from the files that peers wrote: forged inequalities must show."""

import copy
import json

import pytest

from scripts.demo import results

GOOD = {
    "digit_accuracy": 0.97,
    "digests_equal": True,
    "unequal_rounds": [],
    "models_equal": True,
    "samples": 65_536,
    "share_of_rounds_by_all_peers": 1.0,
    "caught_up": True,
    "killed_at_round": 5,
    "rounds_after_kill": 20,
    "processes_left": [],
}


def a_line(number: int, *, peer: str = "A", members=None, live_peers: int = 2, **values) -> dict:
    members = [["A", number, 1024], ["B", number, 1024]] if members is None else members
    known = {"round": number, "samples": 2048 * number, "digest": f"state-{number}", "parent": f"state-{number - 1}", "how": "averaged"}
    return {**known, "members": members, "live_peers": live_peers, "peer": peer, "time": 100.0 + number, **values}


@pytest.fixture
def held():
    """Two peers that held the same four rounds."""
    return {"peer-1": [a_line(n, peer="A") for n in range(1, 5)], "peer-2": [a_line(n, peer="B") for n in range(1, 5)]}


def test_a_run_of_equals_is_summed_up(held):
    found = results.summarize(held)
    assert found["digests_equal"] and found["unequal_rounds"] == []
    assert (found["peers"], found["rounds"], found["samples"]) == (2, 4, 8192)
    assert found["rounds_by_group_size"] == {"2": 4} and found["share_of_rounds_by_all_peers"] == 1.0
    assert found["samples_by_peer"] == {"peer-1": 4096, "peer-2": 4096}


@pytest.mark.parametrize("number", [1, 2, 4])
def test_one_forged_digest_is_found(held, number):
    held["peer-2"][number - 1]["digest"] = "forged"
    found = results.summarize(held)
    assert not found["digests_equal"] and number in found["unequal_rounds"]


def test_a_forged_parent_is_found(held):
    held["peer-2"][2]["parent"] = "elsewhere"
    assert results.summarize(held)["unequal_rounds"] == [3]


def test_a_state_that_does_not_follow_from_the_round_before_is_found(held):
    for lines in held.values():
        lines[2]["parent"] = "elsewhere"
    assert results.summarize(held)["unequal_rounds"] == [3]


def test_a_killed_peers_rounds_are_compared_too(held):
    held["peer-3"] = [a_line(2, peer="C", digest="its own")]
    assert 2 in results.summarize(held)["unequal_rounds"]


def test_peers_that_never_held_the_same_round_show_no_equality():
    held = {"peer-1": [a_line(1)], "peer-2": []}
    found = results.summarize(held)
    assert not found["digests_equal"] and found["unequal_rounds"] == []
    assert results.summarize({})["rounds"] == 0


def test_a_round_of_one_while_two_lived_is_not_by_all_peers(held):
    for lines in held.values():
        lines[0]["members"] = [["A", 1, 2048]]
    found = results.summarize(held)
    assert found["rounds_by_group_size"] == {"1": 1, "2": 3} and found["share_of_rounds_by_all_peers"] == 0.75


def test_a_round_of_one_counts_when_nobody_else_lived():
    assert results.by_all_peers(a_line(1, members=[["A", 1, 2048]], live_peers=1))


def test_of_two_views_of_a_round_the_one_that_saw_more_peers_counts():
    alone = [["A", 1, 2048]]
    held = {"peer-1": [a_line(1, members=alone, live_peers=1)], "peer-2": [a_line(1, peer="B", members=alone, live_peers=2)]}
    assert results.summarize(held)["share_of_rounds_by_all_peers"] == 0.0


@pytest.mark.parametrize(("smaller", "fair"), [(409, False), (410, True)])
def test_a_fair_share_of_two_peers_is_a_fifth_of_the_samples(smaller, fair):
    assert results.by_all_peers(a_line(1, members=[["A", 1, 2048 - smaller], ["B", 1, smaller]])) is fair


def test_the_last_line_of_a_killed_peer_may_be_torn(tmp_path):
    file = tmp_path / "rounds.jsonl"
    whole = json.dumps(a_line(1)) + "\n"
    file.write_text(whole + json.dumps(a_line(2))[:25])
    assert [line["round"] for line in results.read_lines(file)] == [1]
    file.write_text(whole + whole)
    assert len(results.read_lines(file)) == 2
    assert results.read_lines(tmp_path / "missing.jsonl") == []


def test_a_torn_line_in_the_middle_is_damage_and_not_passed_over(tmp_path):
    file = tmp_path / "rounds.jsonl"
    file.write_text('{"round": 1, "di\n' + json.dumps(a_line(2)) + "\n")
    with pytest.raises(ValueError):
        results.read_lines(file)


def test_the_first_round_with_a_late_peer_is_found(held):
    held["peer-3"] = [a_line(2, peer="C", how="fetched"), a_line(3, peer="C", members=[["A", 3, 700], ["C", 1, 700]], live_peers=3)]
    held["peer-1"][2] = held["peer-2"][2] = held["peer-3"][1]
    assert results.first_round_with("peer-3", held) == 3
    assert results.first_round_with("peer-4", held) is None


def test_a_state_that_died_with_its_only_holder_is_nobodys_inequality(held):
    lost = a_line(5, members=[["A", 5, 1024], ["B", 5, 1024], ["C", 5, 10]], digest="lost", live_peers=3)
    again = a_line(5, peer="B", members=[["B", 5, 1024], ["C", 5, 1024]], live_peers=2)
    held = {"peer-1": [*held["peer-1"], lost], "peer-2": [*held["peer-2"], again]}
    assert results.summarize(held)["unequal_rounds"] == [5]
    found = results.summarize(results.survived(held, "peer-1"))
    assert found["unequal_rounds"] == [] and found["samples_by_peer"] == {"C": 1024, "peer-1": 4096, "peer-2": 5120}
    assert results.survived(held, None) == held and results.survived({"peer-1": []}, "peer-1") == {"peer-1": []}


@pytest.mark.parametrize("number", [2, 4])
def test_what_a_killed_peer_held_before_is_compared_all_the_same(held, number):
    held["peer-1"] = [*held["peer-1"], a_line(5)]
    held["peer-1"][number - 1]["digest"] = "forged"
    assert number in results.summarize(results.survived(held, "peer-1"))["unequal_rounds"]


def test_a_killed_peers_last_state_that_others_hold_is_compared(held):
    assert results.survived(held, "peer-1") == held


def test_a_killed_peers_last_state_that_others_made_otherwise_of_the_same_contributions_is_compared(held):
    held["peer-1"][-1]["digest"] = "forged"
    assert results.survived(held, "peer-1") == held
    assert results.summarize(held)["unequal_rounds"] == [held["peer-1"][-1]["round"]]


def test_peers_are_in_step_when_they_hold_one_state_of_that_round_or_a_later_one(held):
    names = ["peer-1", "peer-2"]
    assert results.in_step(names, held, 4) and not results.in_step(names, held, 5)
    held["peer-1"] = [*held["peer-1"], a_line(5)]
    assert not results.in_step(names, held, 4), "one has committed what the other has not"
    assert not results.in_step([*names, "peer-3"], held, 1), "one holds nothing yet"


def test_a_good_run_has_no_shortcomings():
    assert results.shortcomings(GOOD, churn=False, total_samples=65_536) == []
    assert results.shortcomings(GOOD, churn=True, total_samples=65_536) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"digit_accuracy": 0.89}, "89% of the digits"),
        ({"digests_equal": False, "unequal_rounds": [7]}, "different states after round 7"),
        ({"digests_equal": False}, "nothing shows that they agree"),
        ({"models_equal": False}, "final models differ"),
        ({"samples": 65_535}, "65,535 of 65,536"),
        ({"share_of_rounds_by_all_peers": 0.89}, "89% of the rounds"),
        ({"processes_left": ["p2pd (12)"]}, "p2pd (12)"),
    ],
)
def test_each_shortcoming_of_the_plain_run_is_said_in_words(change, words):
    (failure,) = results.shortcomings(GOOD | change, churn=False, total_samples=65_536)
    assert words in failure


def test_a_run_that_was_made_short_is_said_to_be_why_few_digits_are_read_right():
    (failure,) = results.shortcomings(GOOD | {"digit_accuracy": 0.06}, churn=False, total_samples=8192)
    assert failure.endswith("8,192 samples are few: 32,768, the default, are enough.")
    (failure,) = results.shortcomings(GOOD | {"digit_accuracy": 0.06}, churn=False, total_samples=32_768)
    assert "few" not in failure


@pytest.mark.parametrize(
    ("change", "words"),
    [({"caught_up": False}, "late peer"), ({"killed_at_round": None}, "not killed"), ({"rounds_after_kill": 0}, "No round")],
)
def test_each_shortcoming_of_the_churn_run_is_said_in_words(change, words):
    (failure,) = results.shortcomings(GOOD | change, churn=True, total_samples=65_536)
    assert words in failure


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strangers": [], "rounds_with_strangers": []}, "never came"),
        ({"strangers": ["QmEve"], "rounds_with_strangers": [5, 6]}, "part in round 5"),
        ({"strangers": ["QmEve"], "rounds_with_strangers": [], "digit_accuracy": 0.89}, "89% of the digits"),
    ],
)
def test_each_shortcoming_of_the_run_with_strangers_is_said_in_words(change, words):
    (failure,) = results.shortcomings(GOOD | change, churn=False, strangers=True, total_samples=65_536)
    assert words in failure


def test_churn_may_average_without_everybody(held):
    few = copy.deepcopy(GOOD) | {"share_of_rounds_by_all_peers": 0.5}
    assert results.shortcomings(few, churn=True, total_samples=65_536) == []
