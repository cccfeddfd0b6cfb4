"""`scripts/soak`: its checks find what is wrong, and kills leave nothing to find."""

import json
import re
import sqlite3
from types import MappingProxyType

import pytest

from datasetserver.store import SCHEMA
from scripts.churn import checks
from swarm.errors import ExitCode
from tests.conftest import ROOT
from tests.warm import Warm

STATES = [("a", "", 1, 5, [("p", 1, 2), ("q", 1, 3)]), ("b", "a", 2, 9, [("p", 2, 4)])]
CONTRIBUTIONS = {("p", 1): [0, 1], ("q", 1): [2, 3, 4], ("p", 2): [5, 6, 7, 8]}


def rounds(states=STATES):
    names = ("digest", "parent", "round", "samples", "members")
    return [{**dict(zip(names, state, strict=True)), "members": [list(member) for member in state[4]]} for state in states]


@pytest.fixture
def ledger(tmp_path):
    """`ledger(contributions)` is what `checks.read_ledger` reads from a file with STATES and those contributions' samples of shard 0."""

    def make(contributions, repeated=MappingProxyType({})):
        path = tmp_path / "ledger.sqlite"
        path.unlink(missing_ok=True)
        db = sqlite3.connect(path)
        db.executescript(SCHEMA)
        for digest, parent, number, samples, members in STATES:
            db.execute("INSERT INTO state VALUES (?, ?, ?, ?, ?, '[]')", (digest, parent, number, samples, json.dumps(members)))
        for (peer, number), indices in contributions.items():
            db.execute("INSERT INTO contribution VALUES (?, ?, 1, ?)", (peer, number, repeated.get((peer, number), 0)))
            mask = sum(1 << index for index in indices)
            db.execute("INSERT INTO contribution_unit VALUES (?, ?, 0, 0, ?)", (peer, number, mask.to_bytes(8, "little")))
        db.commit()
        db.close()
        return checks.read_ledger(path)

    return make


def test_a_ledger_that_agrees_has_no_faults(ledger):
    chain, *held = ledger(CONTRIBUTIONS)
    assert [state["digest"] for state in chain] == ["a", "b"]
    assert held[0]["q", 1] == {(0, 0, 2), (0, 0, 3), (0, 0, 4)}
    assert checks.ledger_faults(chain, *held, rounds()) == []


def test_what_was_trained_twice_in_an_outage_is_no_fault(ledger):
    contributions = {**CONTRIBUTIONS, ("p", 2): [7, 8]}
    assert checks.ledger_faults(*ledger(contributions, {("p", 2): 2}), rounds()) == []
    (found,) = checks.ledger_faults(*ledger(contributions, {("p", 2): 1}), rounds())
    assert "4 samples, 3 are registered" in found


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({("p", 2): [5, 6, 7]}, "4 samples, 3 are registered"),
        ({("p", 2): [4, 5, 6, 7]}, "1 samples of p's 2 are counted already"),
        ({("q", 1): []}, "3 samples, 0 are registered"),
    ],
)
def test_a_ledger_that_differs_by_one_sample_is_found(ledger, changed, fault):
    (found,) = checks.ledger_faults(*ledger({**CONTRIBUTIONS, **changed}), rounds())
    assert fault in found


def test_a_final_state_that_nobody_held_or_that_was_reported_otherwise_is_found(ledger):
    chain, *held = ledger(CONTRIBUTIONS)
    assert any("no peer held" in fault for fault in checks.ledger_faults(chain, *held, rounds(STATES[:1])))
    other = [STATES[0], ("b", "a", 2, 9, [("q", 2, 4)])]
    assert any("other members" in fault for fault in checks.ledger_faults(chain, *held, rounds(other)))
    assert checks.ledger_faults([], {}, {}, []) == ["no state became final"]


def test_two_states_after_one_group_are_found_and_so_is_a_false_sum():
    assert checks.unequal_states(rounds() * 2) == checks.false_sums(rounds() * 2) == []
    assert len(checks.unequal_states(rounds([*STATES, ("c", *STATES[1][1:])]))) == 1
    assert len(checks.false_sums(rounds([STATES[0], ("b", "a", 2, 10, STATES[1][4])]))) == 1


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2, "sam\n{"round": 3}\n')
    assert [line["round"] for line in checks.read_rounds(tmp_path)] == [1, 3]
    assert checks.read_rounds(tmp_path / "nobody") == []


@pytest.mark.swarm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_of_whole_peers_lose_nothing(tmp_path):
    """Both peers in turn: in the end nobody lives who saw the beginning. Sidecars and p2pd's: test_swarm_of_processes.py; the server: below."""
    record = tmp_path / "record.json"
    words, log = ["-m", "scripts.churn.soak", "--kills", 2, "--seed", 5, "--peers", 2, "--record", record], tmp_path / "log"
    assert Warm(words, ROOT, log, forks=True).wait(840) == 0, log.read_text()[-8000:]
    verdict = json.loads(record.read_text())
    assert verdict["holds"] and [kill["kind"] for kill in verdict["records"]] == ["first peer", "peer"]
    assert verdict["keys_counted"] + verdict["repeated"] == verdict["samples"] > 0
    assert all(seconds is not None for kill in verdict["records"] for seconds in kill["survivors"].values())


@pytest.mark.swarm
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_is_killed_comes_back_by_supervision_alone_and_the_page_stays_true(tiny_model, tmp_path):
    """A trainer and the server. Real trainers under dd-peer; the page is read from its stream of events."""
    record, log = tmp_path / "record.json", tmp_path / "log"
    words = ["-m", "scripts.churn.soak", "--minutes", 20, "--every", 1, "--kills", 2, "--no_browser", "--model", tiny_model, "--record", record]
    assert Warm(words, ROOT, log, forks=True).wait(1440) == 0, log.read_text()[-8000:]
    verdict = json.loads(record.read_text())
    assert verdict["holds"] and [kill["kind"] for kill in verdict["records"]] == ["trainer", "server"]
    for kill in verdict["records"]:
        assert kill["page"]["peers"] == ["peer-1", "peer-2"] and kill["page"]["samples"] > 0 and not kill["faults"]


@pytest.mark.swarm
def test_a_soak_whose_peers_cannot_start_ends_with_the_reason(tiny_model, tmp_path):
    """In a process of its own, since a soak ends whatever its process has left."""
    flags = ["--minutes", 1, "--every", 1, "--peers", 1, "--no_browser", "--keep", tmp_path / "soak", "--model", tiny_model]
    soak = Warm(["-m", "tests.scripts.hungry_soak", *flags], ROOT, tmp_path / "log", forks=True)
    status, said = soak.wait(300), (tmp_path / "log").read_text()
    assert status == ExitCode.FAILED, said[-4000:]
    assert re.search(r"error: peer-1 gave up with status 2:.*One step of this peer takes 1000000 samples", said), said[-4000:]
    assert "kills," not in said and "FAULT" not in said and "Traceback" not in said
