"""What the host orders of the run that it serves: pause, resume, end, extend; and what it says of peers and states: ban, trust, discard.

An order is a word, a number or a list of signed words in a file of the work folder, which nobody else can write. A running server reads the file once a second,
and every server reads it when it starts, so that no order is lost with a server.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from datasetserver import work_folder
from swarm import files
from swarm.arguments import ArgumentParser
from swarm.bans import is_state, read_words
from swarm.end import refuse_extension
from swarm.errors import UserError
from swarm.protocol import RunState
from swarm.records import HostWord

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
BANS = "run_bans.json"
_FILE, _EXTENSION = "run_state", "run_extension"
_STATES: dict[str, RunState] = {"pause": "paused", "resume": "running", "end": "ended"}
VERBS = (*_STATES, "extend")
_MEANING = {
    "paused": "peers get no more samples, and wait; what they trained is still counted",
    "running": "peers get samples",
    "ended": "peers get no more samples, and leave; what they trained is still counted",
}


class Orders:
    """The order in `work_dir`, as it was within the last second; any thread may ask. clock: in seconds."""

    def __init__(self, work_dir: Path, clock: Callable[[], float] = time.monotonic):
        self._path, self._clock = work_dir / _FILE, clock
        self._extension = work_dir / _EXTENSION
        self._looked, self._state, self._extended = float("-inf"), "running", 0
        self._bans, self._bans_read = work_dir / BANS, None
        self._banned: tuple[HostWord, ...] = ()
        self._discarded: frozenset[str] = frozenset()
        self._complaints: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self) -> RunState:
        self._look_seldom()
        return self._state

    def extended(self) -> int:
        """To how many samples the run shall go on; 0: to its own total."""
        self._look_seldom()
        return self._extended

    def discarded(self) -> frozenset[str]:
        """Digests of the states that are not to be taken, whoever reports them."""
        self._look_seldom()
        return self._discarded

    def banned(self) -> tuple[HostWord, ...]:
        """The host's words about peers and states; the same tuple while the file does not change."""
        self._look_seldom()
        return self._banned

    def _look_seldom(self) -> None:
        with self._lock:
            now = self._clock()
            if now - self._looked >= LOOK_SECONDS:
                self._looked = now
                self._look()
                self._look_for_extension()
                self._look_for_banned()

    def _look_for_banned(self) -> None:
        if (version := files.version(self._bans)) != self._bans_read:
            self._bans_read, self._banned = version, read_words(self._bans)
            self._discarded = frozenset(word.about for word in self._banned if word.banned and is_state(word))

    def _look_for_extension(self) -> None:
        try:
            extended = extension_in(self._extension.parent)
        except UserError as error:
            self._complain(f"{error} The run's end stays as it was.")
            return
        if extended != self._extended:
            log.info("the host's order: the run goes on to %d samples", extended)
            self._extended = extended

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
            self._complain(f"{self._path} says neither running, paused nor ended; the run stays {self._state}")

    def _complain(self, what: str) -> None:
        """Once of each file that is as it was."""
        if what not in self._complaints:
            self._complaints.add(what)
            log.error("%s", what)


def extension_in(work_dir: Path) -> int:
    """To how many samples the host has extended the run there; 0: not. Raises UserError for a file that says something else."""
    path = work_dir / _EXTENSION
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return 0
    except (OSError, UnicodeDecodeError) as error:
        text = repr(error)
    if not text.isdecimal() or len(text) > 16:
        raise UserError(f"{path} holds no number of samples.", fix="Give the order again: dd-datasetserver extend.")
    return int(text)


def extend(work_dir: Path, total_samples: int) -> None:
    """Order that the run there goes on to `total_samples`. Raises UserError when it cannot."""
    from datasetserver.ledger import stored_run  # SQLite and the ledger's rules: the other orders need none of it

    run = stored_run(work_dir / work_folder.LEDGER)
    if run is None:
        raise UserError(f"No run has begun in {work_dir}.", fix="Give its length at its start: --total_samples.")
    refuse_extension(run, total_samples, max(run.total_samples, extension_in(work_dir)))
    _write(work_dir, _EXTENSION, str(total_samples))


def give(work_dir: Path, state: RunState) -> None:
    """Write the order, for good. Raises UserError when it cannot be written."""
    _write(work_dir, _FILE, state)


def _write(work_dir: Path, name: str, order: str) -> None:
    try:
        files.replace(work_dir / name, f"{order}\n".encode("ascii"))
    except OSError as error:
        raise work_folder.unwritable(work_dir, error, "Check --work_dir.") from None


def main(argv: Sequence[str]) -> None:
    """`dd-datasetserver pause|resume|end|extend`, the server running or not. Raises UserError."""
    verb = argv[0]
    state = _STATES.get(verb)
    about = f"The run is {state}: {_MEANING[state]}." if state else "The run goes on beyond its total_samples; see docs/host.md."
    length = "" if state else " --total_samples 300000"
    parser = ArgumentParser(f"dd-datasetserver {verb}", description=about, examples=[f"dd-datasetserver {verb}{length} --dataset pictures"])
    if not state:
        parser.add_argument("--total_samples", type=int, required=True, metavar="N", help="the new end, counted from the run's beginning")
    work_folder.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    work_dir = work_folder.given(args)
    if not any((work_dir / name).exists() for name in (work_folder.LEDGER, work_folder.LOCK)):  # an order in another folder is lost
        raise UserError(f"No server was ever started on {work_dir}.", fix="Give the server's --dataset or --work_dir.")
    if not state:
        extend(work_dir, args.total_samples)
        print(f"the run in {work_dir} goes on to {args.total_samples} samples; peers hear of it within a minute")
        return
    give(work_dir, state)
    print(f"the run in {work_dir} is {state}: {_MEANING[state]}")
