"""Say to every parser what strangers might: recorded messages, mutated by their structure and by their bytes.

    ./scripts/fuzz [--cases 50000] [--seed 1] [--only NAME] [--list]

The examples are all that peers and their dataset server say to each other in some rounds of a simulated world. A parser reads a case or refuses
it with its own error. Faults are any other exception, a case that takes over a second of CPU time, and a MemoryError: each parser has 256 MiB more
than what the process took before. Each fault is printed with its bytes, so that it can become a test. A table to read, then one line of JSON; the exit status is 1 on a fault.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.fuzzing.parsers import Parser, parsers
from scripts.fuzzing.recording import Recording
from swarm.errors import UserError, run_program

_ROUNDS = 25
_MOST_SECONDS = 1.0
_MOST_MIB = 256
_MOST_FAULTS = 3
"""Of one parser; then the next one is tried."""


@dataclass
class Tried:
    """read, refused: cases; slowest_ms: of CPU time."""

    name: str
    cases: int = 0
    read: int = 0
    refused: int = 0
    slowest_ms: float = 0.0
    faults: list[str] = field(default_factory=list)


def tried(parser: Parser, cases: int, seed: int) -> Tried:
    rng, outcome = random.Random(f"{seed} {parser.name}"), Tried(parser.name)
    with _within(_MOST_MIB):
        while outcome.cases < cases and len(outcome.faults) < _MOST_FAULTS:
            data = parser.make(rng)
            outcome.cases += 1
            began = time.process_time()
            try:
                parser.parse(data)
                outcome.read += 1
            except parser.refusals:
                outcome.refused += 1
            except Exception as error:
                outcome.faults.append(f"case {outcome.cases} of seed {seed}: {error!r}"[:400] + f" on {_shown(data)}")
            seconds = time.process_time() - began
            outcome.slowest_ms = max(outcome.slowest_ms, round(1000 * seconds, 1))
            if seconds > _MOST_SECONDS:
                outcome.faults.append(f"case {outcome.cases} of seed {seed} took {seconds:.1f} s of CPU time on {_shown(data)}")
    return outcome


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """What the server refuses it also logs."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _within(mib: int) -> Iterator[None]:
    """The kernel gives the process no more than `mib` above what it has now (setrlimit(2), RLIMIT_DATA)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    has = int(status.partition("VmData:")[2].split()[0]) << 10
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (has + (mib << 20), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _shown(data: bytes) -> str:
    return f"{len(data)} bytes {data[:2000].hex()}" + ("..." if len(data) > 2000 else "")


def table(outcomes: Iterable[Tried]) -> Iterator[str]:
    yield f"{'parser':44} {'cases':>7} {'read':>7} {'refused':>7} {'slowest':>9}  faults"
    for one in outcomes:
        yield f"{one.name:44} {one.cases:7} {one.read:7} {one.refused:7} {one.slowest_ms:6.1f} ms  {len(one.faults) or '-'}"
        yield from (f"    {fault}" for fault in one.faults)


def main(argv: Sequence[str]) -> int:
    options = argparse.ArgumentParser(prog="fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=50_000, help="for each parser (default: 50000)")
    options.add_argument("--seed", type=int, default=1, help="of the world that is recorded and of the mutations (default: 1)")
    options.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="parsers with this in their name; may be given several times"
    )
    options.add_argument("--list", action="store_true", help="only say which parsers there are")
    asked = options.parse_args(argv)
    if asked.cases < 1:
        raise UserError(f"--cases {asked.cases}: that tries nothing.", fix="Give 1 or more.")
    with _unlogged(), contextlib.closing(asyncio.new_event_loop()) as loop:
        there = list(parsers(Recording(asked.seed, _ROUNDS), loop))
        chosen = [parser for parser in there if not asked.only or any(name in parser.name for name in asked.only)]
        if not chosen:
            raise UserError(f"No parser has {' or '.join(asked.only)} in its name.", fix="--list says which there are.")
        if asked.list:
            print("\n".join(parser.name for parser in chosen))
            return 0
        outcomes = []
        for parser in chosen:
            outcomes.append(tried(parser, asked.cases, asked.seed))
            print("\n".join(list(table(outcomes[-1:]))[len(outcomes) > 1 :]), flush=True)
    faults = sum(len(one.faults) for one in outcomes)
    print(json.dumps({"faults": faults, "parsers": len(outcomes), "cases": sum(one.cases for one in outcomes), "seed": asked.seed,
                      "tried": [asdict(one) for one in outcomes]}))  # fmt: skip
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
