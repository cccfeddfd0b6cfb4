"""Committed states on disk: each written whole before the one before it goes, verified when read."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from peer.sync.engine.buffers import IN_MEMORY, Buffers
from peer.sync.engine.net.messages import read_header
from peer.sync.engine.state import BadState, State
from peer.sync.engine.transfer import chunk_file
from peer.sync.engine.transfer.chunk_file import ChunkFile
from peer.sync.engine.transfer.discarded import Discarded
from swarm import files
from swarm.bans import Bans
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)

OLDER_SECONDS = 1800.0
"""The host needs time to see that a state is wrong. With rounds of 2 s the best two are 4 s old, and all that descends from it is discarded with it."""
_OLDER_NEED_FREE = 4
"""Older states stay while the disk has room for this many more: a checkpoint takes 1.5 of a state with momentum, and both matter more."""


class StateStore:
    """The best `keep` states under `folder`, a chunk file each: its line is the header and the digest, its bytes are the tensors'.

    older: keep two older ones as well, where there is room, to go back to: one between one and two times OLDER_SECONDS old, and the next such.
    recent: how many behind the best to keep as well, where there is room: for a round that the dataset server discards (docs/decisions/0031).
    bans: the host's words, which may discard states; wall: as files are dated; buffers: make the memory that states are read into. Raises
    UserError (disk) when the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        bans: Bans | None = None,
        *,
        older: bool = True,
        recent: int = 0,
        wall: Callable[[], float] = time.time,
        buffers: Buffers = IN_MEMORY,
    ):
        self.folder, self.keep, self._keeps_older, self._wall, self.buffers = folder, keep, older, wall, buffers
        self._recent = recent
        self.forsaken = False
        """Whether a state was passed over because it is discarded."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for torn in folder.glob("*.tmp"):
                torn.unlink()
            files.flush(folder)  # a process that was killed may have named a state, and not made the name durable
        except OSError as error:
            raise UserError(
                f"Cannot keep states in {folder}: {error.strerror}.", fix="Choose another --output_dir.", code=ExitCode.DISK
            ) from None
        self.discarded = Discarded(folder, bans)

    def save(self, state: State) -> Path:
        """Write `state` durably, then delete what need not be kept any more. Raises UserError (disk) and leaves what was there."""
        path = self.folder / f"samples-{state.header.samples:016d}-round-{state.header.round:08d}-{state.digest[:12]}.state"
        first = {"digest": state.digest, "header": state.header.json}
        try:
            try:
                chunk_file.write(path, first, state.buffer.bytes(), durable=True)
            except OSError:  # perhaps for want of room, which older states take
                if not (older := self._files()[self.keep :]):
                    raise
                for old in older:
                    old.unlink(missing_ok=True)
                chunk_file.write(path, first, state.buffer.bytes(), durable=True)
        except OSError as error:
            free = 0.0
            with contextlib.suppress(OSError):
                free = files.free_bytes(self.folder) / 2**30
            raise UserError(
                f"Cannot save the state of round {state.header.round} in {self.folder}: {error.strerror} ({free:.1f} GiB free).",
                fix="Free some space; the states saved before are intact.",
                code=ExitCode.DISK,
            ) from None
        # What has more samples than the newest is of a branch that lost: read again, it would lead us back there.
        there = self._files()
        ours = [file for file in there if _samples(file) <= _samples(path)]
        kept = {path, *ours[: self.keep], *self._older(ours[self.keep :])}
        for old in there:
            if old not in kept:
                old.unlink(missing_ok=True)
        if len(ours) < len(there):  # a power cut would bring their names back, and `load` takes the most samples
            files.flush(self.folder)
        return path

    def _older(self, behind: Sequence[Path]) -> list[Path]:
        """Of the states behind the best: the next ones; of the rest the youngest that is old enough to go back to, and the oldest of the others,
        which will be."""
        try:
            if not (behind and self._keeps_older) or files.free_bytes(self.folder) < _OLDER_NEED_FREE * behind[0].stat().st_size:
                return []
            ages = sorted((self._wall() - path.stat().st_mtime, path) for path in behind[self._recent :])
        except OSError:  # the next save looks again
            return []
        old = [path for age, path in ages if age >= OLDER_SECONDS]
        return [*behind[: self._recent], *old[:1], *[path for age, path in ages if age < OLDER_SECONDS][-1:]]

    def open(self, digest: str) -> ChunkFile | None:
        """The file of that state; None when it is not here."""
        for path in self.folder.glob(f"samples-*-{digest[:12]}.state"):
            try:
                file = ChunkFile(path)
            except (OSError, ValueError) as error:
                log.warning("ignored %s: %s", path.name, error)
                continue
            if file.first.get("digest") == digest:
                return file
            file.close()
        return None

    def is_discarded(self, path: Path) -> bool:
        """Of a state's file, here or elsewhere; of one that cannot be read nothing is known."""
        try:
            with contextlib.closing(ChunkFile(path)) as file:
                return self.discarded.holds(file.first["digest"], read_header(file.first["header"]))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def load(self, run: str, schema: str, num_bytes: int, target: int, paths: Sequence[Path] = ()) -> State | None:
        """The best state of this run that is whole; a damaged, foreign or forged one is passed over with a warning. target: samples of a
        round. paths: of files elsewhere, the best first, in place of those here."""
        for path in paths or self._files():
            try:
                state = read_state(path, num_bytes, self.buffers)
                state.header.check_bounds(target)
            except (OSError, BadState) as error:
                log.warning("ignored %s: %s", path.name, error)
                continue
            if self.discarded.holds(state.digest, state.header):
                self.forsaken = True
                log.warning("ignored %s: it is discarded", path.name)
                continue
            if (state.header.run, state.header.schema) == (run, schema):
                return state
            log.warning("ignored %s: it belongs to another run or another set of tensors", path.name)
        return None

    def _files(self) -> list[Path]:
        """The best first. A branch that lost may have had more rounds; by rounds, its files would push out the better ones."""
        by_digest = sorted(self.folder.glob("samples-*.state"), key=lambda path: path.stem[-12:])
        return sorted(by_digest, key=lambda path: path.stem[: len("samples-") + 16], reverse=True)  # of as many samples: the smaller digest


def read_state(path: Path, num_bytes: int, buffers: Buffers = IN_MEMORY) -> State:
    """The state in a file that `StateStore` wrote; num_bytes: of its tensors. Raises BadState, OSError, UserError (disk)."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(ChunkFile(path))
            promised, header = file.first["digest"], read_header(file.first["header"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadState(f"its first line is damaged ({error})") from None
        if file.num_bytes != num_bytes:
            raise BadState("its length is wrong")
        buffer = buffers.shared(num_bytes)
        file.read_into(buffer.bytes())
    state = State(header, buffer)
    if state.digest != promised:
        raise BadState("its digest is wrong: a bit has flipped")
    return state


def _samples(path: Path) -> str:
    """The number of samples in a state's file name, 16 digits."""
    return path.stem[len("samples-") : len("samples-") + 16]
