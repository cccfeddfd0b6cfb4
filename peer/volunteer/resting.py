"""When a volunteer's machine is its owner's own: `dd-peer pause` and `resume`, and `--hours`.

The order is one word in the output folder, which a running peer looks at once a second and one that is started later at once; so no order
is lost with the peer. Hours are compared with the clock on the wall at each look, and nothing is counted from them: when summer
time begins or ends, or the clock is set, the next look is right.
"""

import datetime
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm import files
from swarm.arguments import ArgumentParser
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
FILE = "peer_state"
_OF_A_PEER = ("supervised", "in_use.lock", "identity.key", "run.json")
"""One of these is in the folder of a peer that was ever started."""
_STATES = {"pause": "paused", "resume": "running"}
VERBS = tuple(_STATES)
_HOURS = re.compile(r"(\d{1,2})(?::(\d{2}))?-(\d{1,2})(?::(\d{2}))?")


@dataclass(frozen=True)
class Hours:
    """The part of the day in which to train, by this machine's local time; it may go over midnight. begin == end: all day."""

    begin: datetime.time
    end: datetime.time

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """Of '22-7' or '22:30-7:15'. Raises UserError."""
        match = _HOURS.fullmatch(text.strip())
        try:
            if match is None:
                raise ValueError
            begin, end = ((int(match[i]) % 24 if int(match[i]) <= 24 else 99, int(match[i + 1] or 0)) for i in (1, 3))
            return cls(datetime.time(*begin), datetime.time(*end))
        except ValueError:
            raise UserError(f"hours is '{text}'.", fix="Give local time as 22-7 or 22:30-7:15; it may go over midnight.") from None

    def now(self, wall: datetime.time) -> bool:
        """Whether it is time to train."""
        if self.begin < self.end:
            return self.begin <= wall < self.end
        return self.begin == self.end or wall >= self.begin or wall < self.end


class Resting:
    """Whether this peer's owner wants it to rest now. clock: in seconds; wall: the local time of day."""

    def __init__(
        self,
        folder: Path,
        hours: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime.time] = lambda: datetime.datetime.now().time(),
    ):
        self._path, self._hours = folder / FILE, Hours.parse(hours) if hours else None
        self._clock, self._wall = clock, wall
        self._looked, self._ordered, self.why, self._complained = float("-inf"), False, "", ""

    def __call__(self) -> bool:
        if self._clock() - self._looked >= LOOK_SECONDS:
            self._looked = self._clock()
            self._look()
        return bool(self.why)

    def _look(self) -> None:
        try:
            word = self._path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            word = "running"
        except (OSError, UnicodeDecodeError) as error:
            word = repr(error)
        if word in _STATES.values():
            self._ordered = word == "paused"
        elif word != self._complained:
            log.error("%s says neither running nor paused; nothing changes", self._path)
        self._complained = "" if word in _STATES.values() else word
        late = self._hours is not None and not self._hours.now(self._wall())
        why = (
            "paused by dd-peer pause"
            if self._ordered
            else f"it trains from {self._hours.begin:%H:%M} to {self._hours.end:%H:%M}"
            if late
            else ""
        )
        if why != self.why:
            self.why = why
            if why:
                log.info("resting: %s; offering the work done, returning samples, still holding states for others", why)
            else:
                log.info("training goes on")


def main(argv: Sequence[str]) -> int:
    """`dd-peer pause|resume --output_dir out`, the peer running or not. Raises UserError."""
    verb = argv[0]
    parser = ArgumentParser(
        f"dd-peer {verb}",
        description="Let the peer with this output folder rest, or train again. It looks once a second.",
        examples=[f"dd-peer {verb} --output_dir out"],
    )
    parser.add_argument("--output_dir", default="output", metavar="DIR", help="the peer's [output]")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    folder = Path(parser.parse_args(argv[1:]).output_dir)
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", fix="Give the peer's --output_dir.")
    if not any((folder / name).exists() for name in _OF_A_PEER):  # an order in another folder is lost
        raise UserError(f"No peer has run in {folder}.", fix="Give the peer's --output_dir.")
    if (folder / "settled").is_dir() and not (folder / "contribution_number").exists():
        raise UserError(f"The peer in {folder} assists, and does not rest.", fix="Stop it with Ctrl-C; the same command goes on.")
    try:
        files.replace(folder / FILE, f"{_STATES[verb]}\n".encode("ascii"))
    except OSError as error:
        raise UserError(f"Cannot write in {folder}: {error.strerror}.", fix="Check --output_dir.", code=ExitCode.DISK) from None
    print(f"the peer in {folder} is {_STATES[verb]}" + (": it finishes its step, and offers what it has" if verb == "pause" else ""))
    return ExitCode.OK
