"""Say to every parser what strangers might: recorded messages, mutated by their structure and by their bytes.

    ./scripts/fuzz [--cases 50000] [--seed 1] [--only NAME] [--list]

The examples are all that peers and their dataset server say to each other in some rounds of a simulated world. A parser reads a case or refuses
it with its own error. Faults are any other exception, a case that takes over a second of CPU time, and memory that grows by over 256 MiB. Each
fault is printed with its bytes, so that it can become a test. A table to read, then one line of JSON; the exit status is 1 on a fault.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if sys.path and sys.path[0] != str(ROOT):
    sys.path[0] = str(ROOT)

from scripts.fuzzing.parsers import Parser, parsers  # noqa: E402
from scripts.fuzzing.recording import Recording  # noqa: E402
from swarm.errors import UserError, run_program  # noqa: E402

_ROUNDS = 25
_MOST_SECONDS = 1.0
_MOST_GROWTH_MIB = 256
_MOST_FAULTS = 3
"""Of one parser; then the next one is tried."""


@dataclass
class Tried:
    """read, refused: cases; slowest_ms: of CPU time; grown_mib: how much more memory the process had at its most than before."""

    name: str
    cases: int = 0
    read: int = 0
    refused: int = 0
    slowest_ms: float = 0.0
    grown_mib: float = 0.0
    faults: list[str] = field(default_factory=list)


def tried(parser: Parser, cases: int, seed: int) -> Tried:
    rng, outcome = random.Random(f"{seed} {parser.name}"), Tried(parser.name)
    _forget_most()
    before = _most_mib()
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
    outcome.grown_mib = round(_most_mib() - before, 1)
    if outcome.grown_mib > _MOST_GROWTH_MIB:
        outcome.faults.append(f"memory grew by {outcome.grown_mib:.0f} MiB")
    return outcome


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """What the server refuses it also logs."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _forget_most() -> None:
    """Else a parser could take what something before it had taken, and nobody would see. See proc_pid_clear_refs(5)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _most_mib() -> float:
    """That the process had since `_forget_most`."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _shown(data: bytes) -> str:
    return f"{len(data)} bytes {data[:2000].hex()}" + ("..." if len(data) > 2000 else "")


def table(outcomes: Iterable[Tried]) -> Iterator[str]:
    yield f"{'parser':44} {'cases':>7} {'read':>7} {'refused':>7} {'slowest':>9} {'memory':>9}  faults"
    for one in outcomes:
        yield (
            f"{one.name:44} {one.cases:7} {one.read:7} {one.refused:7} {one.slowest_ms:6.1f} ms {one.grown_mib:+5.0f} MiB  "
            f"{len(one.faults) or '-'}"
        )
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
