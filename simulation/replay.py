"""Logs of a real run as a scenario: peers that join, die and come back when those did, and steps of such a length that rounds take as long.

Read are, in one folder, each peer's log lines in `NAME.log` (text, or one JSON object a line) and its `NAME/rounds.jsonl`, as `scripts/soak
--keep FOLDER` leaves them. Not in the logs, and so not in the scenario: the links, what a disk lost, a process that was stopped for less than
20 s, and what became of the dataset server.
"""

import calendar
import itertools
import json
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulation.faults import Strike
from simulation.world import Scenario
from swarm.errors import UserError

_TEXT = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)Z (?:\S+ )?[DIWEC] (?P<logger>[\w.]+): (?P<event>.*)")
_TRAINER_BEGINS = "averaging sends and receives up to"
_SIDECAR_DIED = "the swarm process died"
_BACK = re.compile(r"back after (\d+) s")
_TARGET_PER_PEER = 4


@dataclass
class Life:
    """One peer: seconds since 1970. lives: of its trainer, each from its first line to its last."""

    name: str
    lives: list[list[float]] = field(default_factory=list)
    sidecars_lost: list[float] = field(default_factory=list)
    stopped: list[tuple[float, float]] = field(default_factory=list)
    """When, and for how long."""
    rounds: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Recording:
    """What the logs tell. peers: in the order in which they came."""

    peers: tuple[Life, ...]
    began: float
    ended: float

    @property
    def rounds(self) -> int:
        return len({line["digest"] for peer in self.peers for line in peer.rounds if line["round"]})

    @property
    def round_seconds(self) -> float:
        """Median seconds from one round of the swarm to the next; 0 where fewer than two are told."""
        first = {}
        for line in sorted((line for peer in self.peers for line in peer.rounds), key=lambda line: line["time"]):
            first.setdefault(line["round"], line["time"])
        times = sorted(first.items())
        spans = [(late - early) / (after - before) for (before, early), (after, late) in itertools.pairwise(times) if late > early]
        return statistics.median(spans) if spans else 0.0

    def share(self, peer: Life) -> float:
        """Of the samples of a round, the peer's: the mean over the rounds that it was in."""
        own = next((line["peer"] for line in peer.rounds), "")
        shares = [
            mine / sum(samples for _, _, samples in line["members"])
            for line in {line["digest"]: line for other in self.peers for line in other.rounds}.values()
            for who, _, mine in line["members"]
            if who == own
        ]
        return statistics.fmean(shares) if shares else 0.0


def read(folder: Path) -> Recording:
    """Raises UserError when there is nothing to be played."""
    peers = [life for path in sorted(folder.glob("*.log")) if (life := _life(path)).lives]
    if not peers:
        raise UserError(f"No log of a peer is in {folder}.", fix="Give a folder with NAME.log and NAME/rounds.jsonl, as scripts/soak --keep leaves it.")
    peers.sort(key=lambda life: (life.lives[0][0], life.name))
    began = peers[0].lives[0][0]
    return Recording(tuple(peers), began, max(life.lives[-1][1] for life in peers))


def _life(path: Path) -> Life:
    life = Life(path.stem)
    for when, event in _events(path):
        if event.startswith(_TRAINER_BEGINS):
            life.lives.append([when, when])
        if not life.lives:
            continue  # the server's log, or what dd-peer says before there is a trainer
        life.lives[-1][1] = max(life.lives[-1][1], when)
        if event.startswith(_SIDECAR_DIED):
            life.sidecars_lost.append(when)
        if back := _BACK.match(event):
            life.stopped.append((when - float(back[1]), float(back[1])))
    rounds = path.with_suffix("") / "rounds.jsonl"
    if life.lives and rounds.exists():
        life.rounds = [line for text in rounds.read_text(encoding="utf-8").splitlines() if (line := _json(text))]
        # A log line is dated by the whole second before it.
        for line in life.rounds:
            ours = [span for span in life.lives if span[0] - 1 <= line["time"]]
            if ours:
                ours[-1][1] = max(ours[-1][1], line["time"])
    return life


def _events(path: Path) -> Iterator[tuple[float, str]]:
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := _TEXT.match(text):
            yield float(calendar.timegm(time.strptime(found["time"], "%Y-%m-%d %H:%M:%S"))), found["event"]
        elif (line := _json(text)) and isinstance(line.get("time"), int | float):
            yield float(line["time"]), str(line.get("event", ""))


def _json(text: str) -> dict[str, Any]:
    """{} for what is no object of JSON, as the last line of a life that a kill cut short."""
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def scenario(recording: Recording, like: Scenario) -> Scenario:
    """The recording in a world that is otherwise as `like`: its seed, strategy and wire."""
    strikes = [strike for number, peer in enumerate(recording.peers, 1) for strike in _strikes(recording, number, peer)]
    return Scenario(
        like.seed,
        peers=len(recording.peers),
        hours=round((recording.ended - recording.began) / 3600, 4),
        sync=like.sync,
        wire=like.wire,
        overlap=like.overlap,
        target_per_peer=_TARGET_PER_PEER,
        strikes=tuple(sorted(strikes, key=lambda strike: strike.at)),
        step_seconds=_steps(recording),
    )


def _strikes(recording: Recording, number: int, peer: Life) -> Iterator[Strike]:
    def at(when: float) -> float:
        return round(max(when - recording.began, 0.0), 3)

    if late := at(peer.lives[0][0]):
        yield Strike(0.0, "kill", number, {"seconds": late, "back": True})
    for (_, ended), (again, _) in itertools.pairwise(peer.lives):
        yield Strike(at(ended), "kill", number, {"seconds": round(max(again - ended, 0.1), 3), "back": True})
    for when in peer.sidecars_lost:
        yield Strike(at(when), "sidecar", number)
    for when, seconds in peer.stopped:
        yield Strike(at(when), "stop", number, {"what": "both", "seconds": seconds})


def _steps(recording: Recording) -> tuple[float, ...]:
    """Seconds of a step of one sample at each peer, so that all together fill a round in the time that it took."""
    if not recording.round_seconds:
        return ()
    shares: Sequence[float] = [recording.share(peer) for peer in recording.peers]
    target, fair = _TARGET_PER_PEER * len(shares), 1 / len(shares)
    return tuple(round(recording.round_seconds / (target * (share or fair)), 3) for share in shares)
