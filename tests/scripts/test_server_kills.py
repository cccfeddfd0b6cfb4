"""`scripts/server-kills`, with two kills in place of fifty, and its verdict."""

import sqlite3
import subprocess
import sys
from pathlib import Path

from datasetserver.book import Book
from datasetserver.store import SCHEMA
from datasetserver.tree import State
from scripts.churn.server_kills import Told, run, verdict
from scripts.demo import processes
from tests.warm import Warm


class Forked:
    """What a server's `Program` asks of `subprocess`: it is forked, three times here, which takes a fifth of a start."""

    DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired

    @staticmethod
    def Popen(command, *, cwd, env, stdin, stdout, stderr, start_new_session, preexec_fn):
        python, *words = command
        assert python == sys.executable and start_new_session
        return Warm(words, cwd, Path(stdout.name), env=env, sidecars=0)


def test_a_server_that_is_killed_under_load_loses_nothing_that_it_acknowledged(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "subprocess", Forked)
    result = run(tmp_path, kills=2, clients=4, seed=1)  # a round has four members
    assert result["faults"] == []
    assert result["rounds"] > 0 and result["counted"] > 0


def test_the_verdict_finds_what_was_acknowledged_and_is_not_in_the_ledger(tmp_path):
    db = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    db.executescript(SCHEMA)
    book = Book(db, shards=[4, 4], seed=0, clock=lambda: 0.0)
    kept, lost = book.lease("alice", 1), book.lease("bob", 1)
    keys = {grant.lease_id: {f"{e}:{s}:{i}" for (e, s), _ in grant.shard_epochs for i in range(4)} for grant in (kept, lost)}
    told = Told(leases={kept.lease_id: ("alice", set()), lost.lease_id: ("bob", keys[lost.lease_id])})
    told.contributions["alice", 1] = frozenset(keys[kept.lease_id])
    round_ = {"digest": "1" * 64, "parent": "0" * 64, "round": 1, "samples": 4, "members": [{"peer": "alice", "number": 1, "samples": 4}]}
    told.rounds.append(round_)
    book.contribute("alice", 1, sorted(keys[kept.lease_id]))
    book.add_final(State("1" * 64, "0" * 64, 1, 4, (("alice", 1, 4),)), "alice")
    book.save()
    assert verdict(told, tmp_path / "ledger.sqlite", [4, 4])["counted"] == 4
    assert told.faults == []
    db.execute("DELETE FROM lease WHERE peer = 'bob'")
    db.execute("DELETE FROM contribution")
    db.execute("DELETE FROM contribution_unit")
    told.rounds.append({**round_, "digest": "2" * 64, "round": 2, "members": []})
    verdict(told, tmp_path / "ledger.sqlite", [4, 4])
    db.close()
    assert [fault for fault in told.faults if "is lost" in fault] == [
        "contribution ('alice', 1) was acknowledged and is lost",
        "round 2 was acknowledged and is lost",
        "a lease of bob was acknowledged and is lost",
    ]
    assert "0 samples are counted, 4 in the head, of 4 that became final" in told.faults
