"""`dd-peer --check URL [flags of the peer that would join]`."""

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from peer.launch.command_line import parse
from peer.volunteer.check.items import Machine
from peer.volunteer.check.report import run
from swarm.errors import UserError, run_program

FLAG = "--check"


def main(argv: Sequence[str]) -> int:
    """The exit code is that of the first thing that fails, 130 after Ctrl-C. Raises UserError for options that are wrong."""
    peer, given = parse(_with_place(argv))
    if not peer.swarming or peer.found:
        raise UserError(
            "--check needs a run that exists already.", fix="Give its server's URL, or a peer's multiaddr: dd-peer --check URL."
        )
    if peer.hub_token:
        os.environ["HF_TOKEN"] = peer.hub_token
    logging.getLogger("peer").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="dd-check-") as scratch:
        machine = Machine(peer.unmeasured, given, Path(scratch))
        code = run_program(lambda: run(machine.items(), sys.stdout))  # Ctrl-C, too, may leave a step behind
    if machine.step_left_behind:  # torch would wait for it, or crash at the interpreter's end
        sys.stdout.flush()
        os._exit(code)
    return code


def _with_place(argv: Sequence[str]) -> list[str]:
    """`--check PLACE` says where the run is, as --datasetserver or --peers would."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith(f"{FLAG}=") else [word])]
    at = words.index(FLAG)
    place = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else ""
    rest = words[:at] + words[at + (2 if place else 1) :]
    if not place:
        return rest
    return [*rest, *(["--peers", place] if place.startswith("/") else ["--datasetserver", place])]
