"""`scripts/fuzz`: every parser keeps its head, and one that does not is found."""

import asyncio
import contextlib
import json
import logging
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.fuzzing import fuzz
from scripts.fuzzing.parsers import Parser, parsers
from scripts.fuzzing.recording import Recording
from swarm.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

CASES = 150
"""For each of some 37 parsers, together 5 s; `scripts/fuzz` itself tries 50,000."""


@pytest.fixture(scope="module")
def there():
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        yield list(parsers(Recording(seed=4, rounds=12), loop))


def test_no_parser_takes_more_or_raises_else_than_it_says(there, seed):
    for parser in there:
        outcome = fuzz.tried(parser, CASES, seed)
        assert not outcome.faults, (parser.name, outcome.faults)
        assert outcome.read + outcome.refused == CASES and outcome.refused, parser.name


def test_what_peers_and_servers_say_is_all_there(there):
    names = {parser.name for parser in there}
    assert {"frames", "headers", "tickets", "announcements", "peer records", "run records", "payload int8", "POST /v1/rounds"} <= names
    assert {f"message {kind}" for kind in ("Answer", "Call", "Join", "Fetch", "StateOffer", "MeanPart", "Share", "Certified", "answer to join", "head", "kind of state")} <= names


def test_a_hosts_bans_are_among_what_is_said(there):
    examples = {parser.name: parser.make for parser in there}
    said = [examples[name](random.Random(n)) for name in ("peer records", "answer to POST /v1/leases/{lease}/renew") for n in range(200)]
    assert sum(b"says so" in data for data in said) > 50


def test_honest_examples_are_read(there, monkeypatch):
    """Else a parser that refuses everything would pass."""
    monkeypatch.setattr("scripts.fuzzing.parsers.mutated", lambda values, rng, **_: values)
    monkeypatch.setattr("scripts.fuzzing.parsers.torn", lambda data, rng: data)
    monkeypatch.setattr("scripts.fuzzing.parsers.spliced", lambda values, other, rng: values)
    for parser in there:
        if not parser.name.startswith("POST"):  # a request that came before may be refused: its lease is over
            assert fuzz.tried(parser, 20, 1).read, parser.name


def broken(data: bytes) -> None:
    if data == b"\x07":
        raise KeyError("seven")
    if data > b"\xf0":
        raise ValueError("too large")


def test_another_error_is_a_fault_with_its_bytes(capsys, monkeypatch):
    parser = Parser("broken", lambda rng: bytes([rng.randrange(256)]), broken, (ValueError,))
    outcome = fuzz.tried(parser, 5000, 1)
    assert len(outcome.faults) == 3 and all("KeyError('seven')" in fault and fault.endswith("1 bytes 07") for fault in outcome.faults)
    monkeypatch.setattr(fuzz, "Recording", lambda seed, rounds: None)
    monkeypatch.setattr(fuzz, "parsers", lambda recording, loop: [parser])
    assert fuzz.main(["--cases", "5000"]) == 1
    *rows, last = capsys.readouterr().out.splitlines()
    assert rows[1].split()[0] == "broken" and rows[1].endswith("3") and "KeyError" in rows[2]
    assert json.loads(last)["faults"] == 3 and json.loads(last)["parsers"] == 1
    assert logging.getLogger().isEnabledFor(logging.ERROR), "whoever runs it in his process goes on logging"


def test_a_case_that_takes_long_is_a_fault(monkeypatch):
    monkeypatch.setattr(fuzz, "_MOST_SECONDS", -1.0)
    parser = Parser("slow", lambda rng: b"", lambda data: None, ())
    assert "took 0.0 s of CPU time" in fuzz.tried(parser, 1, 1).faults[0]


GREEDY = """
import resource
from scripts.fuzzing import fuzz
from scripts.fuzzing.parsers import Parser

def take(data):
    bytearray(512 << 20)

before = resource.getrlimit(resource.RLIMIT_DATA)
take(b"")
print(*fuzz.tried(Parser("greedy", lambda rng: b"7", take, ()), 1, 1).faults)
print(fuzz.tried(Parser("modest", lambda rng: b"", lambda data: bytearray(64 << 20), ()), 1, 1).faults)
print(resource.getrlimit(resource.RLIMIT_DATA) == before)
"""


def test_a_greedy_parser_is_found_after_something_that_was_as_greedy():
    """In a process of its own: a test that trains here has told malloc to keep what is freed, and that grows nothing when it is taken again."""
    said = subprocess.run([sys.executable, "-c", GREEDY], capture_output=True, text=True, cwd=ROOT, check=True, timeout=300)
    assert said.stdout.splitlines() == ["case 1 of seed 1: MemoryError() on 1 bytes 37", "[]", "True"]


def test_wrong_options_are_refused(monkeypatch):
    monkeypatch.setattr(fuzz, "Recording", lambda seed, rounds: None)
    monkeypatch.setattr(fuzz, "parsers", lambda recording, loop: [Parser("one", lambda rng: b"", len, ())])
    with pytest.raises(UserError, match="tries nothing"):
        fuzz.main(["--cases", "0"])
    with pytest.raises(UserError, match="No parser has soap"):
        fuzz.main(["--only", "soap"])
    assert fuzz.main(["--list"]) == 0
