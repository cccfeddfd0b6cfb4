"""One stranger's process: `python -m scripts.attacks.stranger ROW FOLDER [--address ADDRESS] [--url URL --token T] [--host_key FILE] [--seed N]
[--seconds S]`.

Keeps its keys in FOLDER. With --host_key it is a member. Prints a line of JSON when it has arrived, and others of what it did. Ends when its
time is over, or by SIGTERM.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import sys
from pathlib import Path

from scripts.attacks.band import Band
from scripts.attacks.rows import ROWS
from scripts.attacks.wire import say
from swarm.lifeline import die_with_parent


async def live(args: argparse.Namespace) -> None:
    """Attack until the time is over or somebody ends us."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # hivemind's tasks that p2pd's end leaves behind
    attack = ROWS[args.row].find()
    async with contextlib.AsyncExitStack() as stack:
        band = Band(args.address, args.folder, random.Random(args.seed), stack, args.url, args.token, args.host_key)
        attacking = asyncio.create_task(attack(band))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, attacking.cancel)
        await asyncio.wait({attacking}, timeout=args.seconds)
        attacking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attacking


def main() -> int:
    parser = argparse.ArgumentParser(prog="stranger", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=sorted(row.id for row in ROWS.values() if not row.trains))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--url", default="")
    parser.add_argument("--token", default="")
    parser.add_argument("--host_key", type=Path)
    args = parser.parse_args()
    die_with_parent()
    say(event="seed", row=args.row, seed=args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(live(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
