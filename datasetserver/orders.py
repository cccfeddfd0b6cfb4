"""What the host orders of the run that it serves: pause, resume, end. One word in a file of the work folder, which nobody else can write.

A running server looks at it once a second, one that is started later at once. No order is lost with the server.
"""

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from datasetserver.config import ServerConfig
from swarm import files
from swarm.errors import ExitCode, UserError
from swarm.protocol import RunState

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
_FILE = "run_state"
_STATES: dict[str, RunState] = {"pause": "paused", "resume": "running", "end": "ended"}
VERBS = tuple(_STATES)
_MEANING = {
    "paused": "peers get no more samples, and wait; what they trained is still counted",
    "running": "peers get samples",
    "ended": "peers get no more samples, and leave; what they trained is still counted",
}


class Orders:
    """The order in `work_dir`, as it was within the last second. clock: in seconds."""

    def __init__(self, work_dir: Path, clock: Callable[[], float] = time.monotonic):
        self._path, self._clock = work_dir / _FILE, clock
        self._looked, self._state = float("-inf"), "running"

    def __call__(self) -> RunState:
        now = self._clock()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look()
        return self._state

    def _look(self) -> None:
        try:
            state = self._path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            state = "running"
        except (OSError, UnicodeDecodeError) as error:
            state = repr(error)
        if state == self._state:
            return
        if state in _MEANING:
            log.info("the host's order: %s: %s", state, _MEANING[state])
            self._state = state
        else:
            log.error("%s says neither running, paused nor ended; the run stays %s", self._path, self._state)


def give(work_dir: Path, state: RunState) -> None:
    """Write the order, for good. Raises UserError when it cannot be written."""
    try:
        files.replace(work_dir / _FILE, f"{state}\n".encode("ascii"))
    except OSError as error:
        raise UserError(f"Cannot write in {work_dir}: {error.strerror}.", fix="Check --work_dir.", code=ExitCode.DISK) from None


def main(argv: Sequence[str]) -> None:
    """`dd-datasetserver pause|resume|end`, the server running or not. Raises UserError."""
    verb = argv[0]
    state = _STATES[verb]
    parser = argparse.ArgumentParser(f"dd-datasetserver {verb}", description=f"The run is {state}: {_MEANING[state]}.")
    parser.add_argument("--dataset", default="", metavar="DIR", help="the folder that is served")
    parser.add_argument("--work_dir", default="", metavar="DIR", help="the server's work folder, where it was given one")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv[1:])
    if not (args.dataset or args.work_dir):
        raise UserError("Which run is not said.", fix="Give --dataset or --work_dir as to the server.")
    work_dir = ServerConfig(dataset=args.dataset, work_dir=args.work_dir).work_folder()
    if not work_dir.is_dir():
        raise UserError(f"Nothing was ever served from {work_dir}.", fix="Give --dataset or --work_dir as to the server.")
    give(work_dir, state)
    print(f"the run in {work_dir} is {state}: {_MEANING[state]}")
