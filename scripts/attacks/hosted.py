"""The rows that are tried on a dataset server or on one program: each has an outcome rather than a rate."""

import json
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasetserver import tokens
from scripts.attacks.rows import Row
from scripts.attacks.swarm import last_word
from scripts.churn.swarm import ROOT, Peer, Server, peer_command
from scripts.demo.processes import Program, said
from swarm.errors import ExitCode, UserError

_START_SECONDS, _ROW_SECONDS = 240.0, 120.0
_ENDS = ("unknown-parent",)
"""What may end the run comes last."""


class Outcome:
    """Of one row: why it ended or corrupted something, and its figures."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.figures: dict[str, float] = {}
        self.how = ""
        self.broken = ""
        """Why the attempt itself came to nothing: then the row says nothing."""


def try_all(rows: Sequence[Row], folder: Path, seed: int, say: Callable[[str, Outcome], None]) -> dict[str, Outcome]:
    """One row after the other; `say` is told of each."""
    outcomes: dict[str, Outcome] = {}

    def done(row: Row, outcome: Outcome) -> None:
        outcomes[row.id] = outcome
        say(row.id, outcome)

    members = sorted((row for row in rows if row.kind == "ledger"), key=lambda row: row.id in _ENDS)
    if members:
        _with_members(members, folder / "members", seed, done)
    for row in rows:
        if row.kind == "open server":
            _with_open_server(row, folder / row.id, seed, done)
        if row.kind == "shard":
            done(row, _with_shard(row, folder / row.id, seed))
    return outcomes


class _Guarded(Server):
    """A server that asks for tokens: ours is the first of `tokens`."""

    token = ""

    def ask(self, path: str) -> dict[str, Any] | None:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.token}"})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None


def _with_members(rows: Sequence[Row], folder: Path, seed: int, done: Callable[[Row, Outcome], None]) -> None:
    """A server with tokens and two real peers that hold one; the stranger holds another."""
    folder.mkdir(parents=True)
    file = folder / "tokens.txt"
    ours, theirs = (tokens.add(file, name) for name in ("members", "stranger"))
    server = _Guarded(folder, target=200, sync="parameters", flags=["--tokens", str(file), "--total_samples", str(10**9)])
    server.token, peers = ours, []
    try:
        server.wait()
        for number in (1, 2):
            place = folder / f"peer-{number}"
            peers.append(Peer(place.name, place, [*peer_command(server, place), "--token", ours]))
        _until(lambda: all(len(peer.rounds()) >= 2 for peer in peers), "the first rounds")
        for row in rows:
            before = server.ask("/v1/progress") or {}
            outcome = _outcome(row, folder, seed, ["--url", server.url, "--token", theirs])
            after = server.ask("/v1/progress") or {}
            if after.get("state") != "running":
                outcome.reasons.append(f"the run is {after.get('state', 'not served any more')}")
            outcome.how += f"; epoch {before.get('epoch')} -> {after.get('epoch')}"
            done(row, outcome)
    finally:
        for peer in peers:
            peer.kill()
        server.kill()


def _with_open_server(row: Row, folder: Path, seed: int, done: Callable[[Row, Outcome], None]) -> None:
    """A server on loopback without tokens, as a host has it who tries it out."""
    folder.mkdir(parents=True)
    server = Server(folder, target=200, sync="parameters", flags=["--no_dht", "--total_samples", str(10**9)])
    try:
        server.wait()
        done(row, _outcome(row, folder, seed, ["--url", server.url]))
    finally:
        server.kill()


def _with_shard(row: Row, folder: Path, seed: int) -> Outcome:
    """A peer's own reading of the shard that the host wrote."""
    outcome, host = Outcome(), _stranger(row, folder, seed, [])
    try:
        _until(lambda: _arrived(host), "the shard", host)
        wrote = next(line for line in said(host) if line["event"] == "arrived")
        command = [sys.executable, "-m", "scripts.attacks.victims", "read", wrote["shard"], wrote["harmless"]]
        victim = Program("victim", command, folder / "victim.log", {}, ROOT)
        status = victim.wait(_ROW_SECONDS)
        victim.kill_tree()
        lines = [line for line in said(victim) if line["event"] == "read"]
        if not lines:
            outcome.reasons.append(f"the peer ended with status {status}: {last_word(victim)}")
        else:
            outcome.figures["grown_mib"] = round(lines[0]["grown_mib"])
            outcome.how = f"{wrote['packed_bytes']} bytes that unpack to {wrote['mib']} MiB; refused: {lines[0]['refused'] or 'no'}"
    finally:
        host.kill_tree()
    return outcome


def _outcome(row: Row, folder: Path, seed: int, where: Sequence[str]) -> Outcome:
    """What the stranger says became of its attempt."""
    outcome, stranger = Outcome(), _stranger(row, folder, seed, where)
    status = stranger.wait(_ROW_SECONDS)
    stranger.kill_tree()
    figures = next((line for line in said(stranger) if line.get("event") == "figures"), None)
    if figures is None:
        outcome.broken = f"the stranger ended with status {status}: {last_word(stranger)}"
        return outcome
    outcome.how = figures["how"]
    if figures["succeeded"]:
        outcome.reasons.append(figures["how"])
    if row.figure in figures:
        outcome.figures[row.figure] = round(figures[row.figure], 1)
    return outcome


def _stranger(row: Row, folder: Path, seed: int, where: Sequence[str]) -> Program:
    command = [
        sys.executable,
        "-m",
        "scripts.attacks.stranger",
        row.id,
        str(folder / f"{row.id}-stranger"),
        "--seed",
        str(seed),
        "--seconds",
        str(_ROW_SECONDS),
        *where,
    ]
    return Program("stranger", command, folder / f"{row.id}.log", {}, ROOT)


def _arrived(program: Program) -> bool:
    return any(line.get("event") == "arrived" for line in said(program))


def _until(true: Callable[[], bool], what: str, *programs: Program) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not true():
        if time.monotonic() > deadline or any(program.ended() is not None for program in programs):
            raise UserError(f"There was no sign of {what}.", fix="Run it again with --keep and see the logs there.", code=ExitCode.FAILED)
        time.sleep(0.2)
