"""Many worlds, each of its own kind: what a seed plays is drawn from it, and what came of it is one line of a record."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer.sync.engine.failpoints import FAILPOINTS
from simulation.faults import FAULTS
from simulation.shrink import promise
from simulation.world import STRANGERS, Scenario, play
from swarm.lifeline import die_with_parent

RARE = ("rot", "discard", "relief", "guests", "crowd")
"""In worlds of their own: everywhere, they would leave the other faults too few rounds to strike."""
KINDS = (*(name for name in FAULTS if name not in ("extend", *RARE)), "nat")
WITH_STRANGERS = ("reset", "slow", "clock", "answers", "ledger")
"""Faults that leave those alive whom one has met: among strangers alone nobody knows whom to believe (docs/internals.md, R5)."""
WITH_AN_END = ("extend", "reset", "slow", "clock", "pause")
"""Faults that leave the peers, and what they have to say, to the end of a run. Who is away for longer than the others linger misses it."""
WITH_RELIEF = ("relief", "clock", "slow")
"""Beside more faults too few rounds are made in its time."""
WITH_CHUNKS = ("guests", "kill", "sidecar", "failpoint", "partition", "slow", "reset", "nat")
"""Where a state is of several chunks: who comes, who falls, and links that make a download long."""
WITH_LEASES = ("partition", "stop", "sleep", "answers", "server", "ledger")
"""What parts the peers from each other and from the server: leases end whose holders go on, and reports come late."""
_WITH_AN_END, _WITH_RELIEF, _WITH_RARE, _WITH_STRANGERS = 0.08, 0.15, 0.15, 0.08
_WITH_CHUNKS, _WITH_LEASES, _WITH_FAILPOINTS = 0.05, 0.08, 0.04
_WITH_TRANSFERS = 0.04
"""More worlds with chunks: without them `fetch_half_way` struck 72 times in 100,000 rounds."""
_WITH_HELPERS = 0.1
"""Of all worlds: those with few who train and two or three who assist. Where somebody means harm, three train, and they stay as they are."""
_WITH_A_LIAR = 0.3
"""Of the worlds for members, those in which one signs two means; and as many in which some make states up."""
SYNCS, WIRES = ("parameters", "diloco", "gradients"), ("fp32", "fp16", "int8", "int4")
_WORLDS_OF_A_PROCESS = 100
"""Then it is replaced: what a world leaves behind in memory does not add up."""


def mixed(seed: int) -> Scenario:
    """The scenario of that seed: 1 to 8 peers, any strategy and wire, all faults or a few of them, often or seldom."""
    rng = random.Random(f"{seed} mixed")
    sync = rng.choice(SYNCS)
    faults = KINDS if rng.random() < 0.6 else tuple(sorted(rng.sample(KINDS, rng.randint(2, 5))))
    scenario = Scenario(
        seed,
        peers=rng.choice([1, 1, 1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8]),  # small worlds show as much, and cost a tenth of large ones
        hours=rng.choice([0.03, 0.06, 0.12]),
        faults=faults,
        fault_seconds=rng.choice([15.0, 30.0, 60.0]),
        sync=sync,
        wire=rng.choice(WIRES),
        overlap=sync != "gradients" and rng.random() < 0.3,
        assistants=int(rng.random() < 0.3),
        lease_seconds=rng.choice([60.0, 60.0, 8.0]),
        min_peers=rng.choice([1, 1, 1, 2]),
        members=random.Random(f"{seed} members").random() < 0.3,
    )
    if scenario.members and random.Random(f"{seed} trusted").random() < 0.3:
        scenario = replace(scenario, trusted=min(scenario.peers, 3))
    if scenario.members and random.Random(f"{seed} two-faced").random() < _WITH_A_LIAR:
        scenario = replace(scenario, two_faced=True, peers=max(scenario.peers, 3))
    if scenario.members and random.Random(f"{seed} lying").random() < _WITH_A_LIAR:
        scenario = replace(scenario, liars=random.Random(f"{seed} liars").randint(1, 4), peers=max(scenario.peers, 3))
    if random.Random(f"{seed} averaging").random() < 0.3:
        scenario = replace(scenario, averaging="centered")
    if scenario.members and random.Random(f"{seed} wrong mean").random() < _WITH_A_LIAR:
        scenario = replace(scenario, wrong_mean=True, peers=max(scenario.peers, 3))
    helpers = random.Random(f"{seed} helpers")
    if helpers.random() < _WITH_HELPERS and not scenario.is_beset:
        scenario = replace(scenario, assistants=helpers.randint(2, 3), peers=min(scenario.peers, 2), trusted=min(scenario.trusted, 2, scenario.peers))
    if scenario.peers == 1:
        scenario = replace(scenario, min_peers=1)
    # Dice of its own, as "trusted" above and "reducer" below: all other seeds play what they did before.
    # The 0.03: when worlds with chunks became 5 in a hundred from 2, those came from the other end of the dice.
    special = (random.Random(f"{seed} special").random() + 0.03) % 1
    if special < _WITH_CHUNKS or random.Random(f"{seed} transfers").random() < _WITH_TRANSFERS:
        short = {"peers": min(scenario.peers, 4), "hours": 0.03, "fault_seconds": 15.0, "wire": rng.choice(("int8", "int4"))}
        return replace(scenario, chunks=2, faults=WITH_CHUNKS, min_peers=1, **short)
    if special < _WITH_CHUNKS + _WITH_LEASES:
        few = {"peers": min(max(scenario.peers, 2), 4), "hours": 0.06, "fault_seconds": 15.0, "lease_seconds": 8.0}
        return replace(scenario, faults=WITH_LEASES, min_peers=1, **few)
    if special < _WITH_CHUNKS + _WITH_LEASES + _WITH_FAILPOINTS:  # else six of the failpoints struck less than 100 times in 100,000 rounds
        return replace(scenario, faults=("failpoint",), fault_seconds=15.0, peers=max(scenario.peers, 2))
    if (kind := rng.random()) < _WITH_AN_END:
        rounds = rng.choice([4, 8, 16])
        return replace(scenario, faults=WITH_AN_END, liars=0, total_samples=rounds * scenario.target_per_peer * scenario.peers)
    if kind < _WITH_AN_END + _WITH_RELIEF:
        return replace(scenario, faults=WITH_RELIEF, fault_seconds=15.0, hours=0.06, peers=min(scenario.peers, 3), min_peers=1)
    if kind < _WITH_AN_END + _WITH_RELIEF + _WITH_RARE:
        return replace(scenario, faults=(*scenario.faults, *RARE))
    if kind > 1 - _WITH_STRANGERS:
        strangers = tuple(sorted(rng.sample([row for row in STRANGERS if row != "huge-norm"], rng.choice([1, 2, 4]))))
        if random.Random(f"{seed} reducer").random() < 0.3:
            strangers = (*strangers, "huge-norm")
        return replace(scenario, faults=WITH_STRANGERS, strangers=strangers, peers=max(scenario.peers, 3))
    return scenario


def played(seed: int) -> dict[str, Any]:
    """What came of that seed's world, as a line of the record."""
    scenario = mixed(seed)
    outcome = play(scenario)
    return {
        "seed": seed,
        "peers": scenario.peers,
        "assistants": scenario.assistants,
        "members": scenario.members,
        "trusted": scenario.trusted,
        "liars": scenario.liars,
        "two_faced": scenario.two_faced,
        "wrong_mean": scenario.wrong_mean,
        "strangers": scenario.strangers,
        "averaging": scenario.averaging,
        "lease_seconds": scenario.lease_seconds,
        "sync": scenario.sync,
        "wire": scenario.wire,
        "overlap": scenario.overlap,
        "rounds": outcome.rounds,
        "virtual_seconds": outcome.virtual_seconds,
        "committed": outcome.committed,
        "faults": outcome.faults,
        "failpoints": outcome.failpoints,
        "trace": outcome.trace,
        "misled": outcome.misled,
        "breach": outcome.breach,
    }


def campaign(path: Path, first: int, seeds: int, rounds: int, processes: int, *, beset: bool = False) -> Iterator[dict[str, Any]]:
    """Play seeds from `first` on until the record has `seeds` of them and `rounds` rounds; yields each line as it is added.

    beset: only those in whose world somebody means harm. What the record has already is not played again, so that a campaign goes on where it was interrupted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    known = read(path)
    if not known:
        _append(path, {"commit": commit(), "kinds": list(KINDS)})
    done, made = {line["seed"] for line in known}, sum(line["rounds"] for line in known)
    numbers = (seed for seed in range(first, first + (1 << 40)) if seed not in done and (not beset or mixed(seed).is_beset))
    while len(done) < seeds or made < rounds:
        mortal = {"initializer": die_with_parent, "initargs": (signal.SIGKILL, os.getpid())}
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), **mortal) as pool:
            running: set[Future] = {pool.submit(played, next(numbers)) for _ in range(processes)}
            left = _WORLDS_OF_A_PROCESS * processes
            while running:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for future in sorted(ended, key=lambda future: future.result()["seed"]):
                    line = future.result()
                    _append(path, line)
                    done.add(line["seed"])
                    made, left = made + line["rounds"], left - 1
                    yield line
                    if left > 0 and (len(done) + len(running) < seeds or made < rounds):
                        running.add(pool.submit(played, next(numbers)))


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The seeds' lines; one that an interruption cut short is passed over, and its seed played again."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "seed" in line:
            lines.append(line)
    return lines


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all of them come to. `seldom`: faults and failpoints that struck less than a hundred times."""
    struck: Counter[str] = Counter()
    failpoints: Counter[str] = Counter()
    for line in lines:
        struck.update(line["faults"])
        failpoints.update(line["failpoints"])
    everything = {name: struck[name] for name in FAULTS} | {name: failpoints[name] for name in FAILPOINTS}
    broken = [line for line in lines if line["breach"]]
    return {
        "seeds": len(lines),
        "rounds": sum(line["rounds"] for line in lines),
        "hours": round(sum(line["virtual_seconds"] for line in lines) / 3600, 1),
        "misled": sum(bool(line.get("misled")) for line in lines),
        "breaches": len(broken),
        "broken_seeds": [line["seed"] for line in broken],
        "promises": Counter(promise(line["breach"]) for line in broken),
        "faults": dict(struck),
        "failpoints": dict(failpoints),
        "seldom": sorted(name for name, count in everything.items() if count < 100),
    }


def commit() -> str:
    """Of the tree that is played; '' outside a checkout, '+' behind it where something is not committed."""
    try:
        name = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name + ("+" if changed else "")
