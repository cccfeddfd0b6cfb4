"""`scripts/soak`: its checks find what is wrong, and five kills leave nothing to find."""

import json
import sqlite3
import subprocess

import pytest

from datasetserver.store import SCHEMA
from scripts.churn import checks
from tests.conftest import ROOT

STATES = [("a", "", 1, 5, [("p", 1, 2), ("q", 1, 3)]), ("b", "a", 2, 9, [("p", 2, 4)])]
CONTRIBUTIONS = {("p", 1): [0, 1], ("q", 1): [2, 3, 4], ("p", 2): [5, 6, 7, 8]}


def rounds(states=STATES):
    names = ("digest", "parent", "round", "samples", "members")
    return [{**dict(zip(names, state, strict=True)), "members": [list(member) for member in state[4]]} for state in states]


@pytest.fixture
def ledger(tmp_path):
    """`ledger(contributions)` is what `checks.read_ledger` reads from a file with STATES and those contributions' samples of shard 0."""

    def make(contributions):
        path = tmp_path / "ledger.sqlite"
        path.unlink(missing_ok=True)
        db = sqlite3.connect(path)
        db.executescript(SCHEMA)
        for digest, parent, number, samples, members in STATES:
            db.execute("INSERT INTO state VALUES (?, ?, ?, ?, ?, '[]')", (digest, parent, number, samples, json.dumps(members)))
        for (peer, number), indices in contributions.items():
            mask = sum(1 << index for index in indices)
            db.execute("INSERT INTO contribution_unit VALUES (?, ?, 0, 0, ?)", (peer, number, mask.to_bytes(8, "little")))
        db.commit()
        db.close()
        return checks.read_ledger(path)

    return make


def test_a_ledger_that_agrees_has_no_faults(ledger):
    chain, keys = ledger(CONTRIBUTIONS)
    assert [state["digest"] for state in chain] == ["a", "b"]
    assert keys["q", 1] == {(0, 0, 2), (0, 0, 3), (0, 0, 4)}
    assert checks.ledger_faults(chain, keys, rounds()) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({("p", 2): [5, 6, 7]}, "4 samples, 3 are registered"),
        ({("p", 2): [4, 5, 6, 7]}, "1 samples of p's 2 are counted already"),
        ({("q", 1): []}, "3 samples, 0 are registered"),
    ],
)
def test_a_ledger_that_differs_by_one_sample_is_found(ledger, changed, fault):
    chain, keys = ledger({**CONTRIBUTIONS, **changed})
    (found,) = checks.ledger_faults(chain, keys, rounds())
    assert fault in found


def test_a_settled_state_that_nobody_held_or_that_was_reported_otherwise_is_found(ledger):
    chain, keys = ledger(CONTRIBUTIONS)
    assert any("no peer held" in fault for fault in checks.ledger_faults(chain, keys, rounds(STATES[:1])))
    other = [STATES[0], ("b", "a", 2, 9, [("q", 2, 4)])]
    assert any("other members" in fault for fault in checks.ledger_faults(chain, keys, rounds(other)))
    assert checks.ledger_faults([], {}, []) == ["no state was settled"]


def test_two_states_after_one_group_are_found_and_so_is_a_false_sum():
    assert checks.unequal_states(rounds() * 2) == checks.false_sums(rounds() * 2) == []
    assert len(checks.unequal_states(rounds([*STATES, ("c", *STATES[1][1:])]))) == 1
    assert len(checks.false_sums(rounds([STATES[0], ("b", "a", 2, 10, STATES[1][4])]))) == 1


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2, "sam\n{"round": 3}\n')
    assert [line["round"] for line in checks.read_rounds(tmp_path)] == [1, 3]
    assert checks.read_rounds(tmp_path / "nobody") == []


@pytest.mark.swarm
@pytest.mark.timeout(900)
def test_five_kills_lose_nothing(tmp_path):
    record = tmp_path / "record.json"
    command = [ROOT / "scripts" / "soak", "--kills", "5", "--seed", "1", "--peers", "3", "--record", record]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    verdict = json.loads(record.read_text())
    assert verdict["holds"] and len(verdict["records"]) == 5
    assert verdict["keys_counted"] == verdict["samples"] > 0
    assert all(seconds is not None for kill in verdict["records"] for seconds in kill["survivors"].values())
