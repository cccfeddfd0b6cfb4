"""The final states that a peer without a trainer keeps for those who train."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from peer.contracts import CommittedRound
from peer.sync.engine.transfer.disk import StateStore
from swarm import files
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)


class Archive:
    """The final states, as links to the files of `store`: round-00000012-samples-0000024576-3f2a91c0d4e5.state; 0: no limit.

    Raises UserError (disk) when the folder cannot be made.
    """

    def __init__(self, folder: Path, store: StateStore, limit: int):
        """What was discarded since goes: it would be taken for the newest."""
        self.folder, self._store, self._limit = folder, store, limit
        with self._or_say_why():
            folder.mkdir(parents=True, exist_ok=True)
            for path in self._files():
                if store.is_discarded(path):
                    log.warning("removed %s: it is discarded", path.name)
                    path.unlink()

    def newest(self) -> Path | None:
        return max(self._files(), default=None)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.state"))

    def keep(self, final_rounds: Sequence[CommittedRound]) -> None:
        """Keep those of these that are on disk: one that came and went while the one before was written never is. Raises UserError (disk)."""
        with self._or_say_why():
            for final in final_rounds:
                source = next(self._store.folder.glob(f"samples-*-{final.digest[:12]}.state"), None)
                target = self.folder / f"round-{final.round:08d}-samples-{final.samples:010d}-{final.digest[:12]}.state"
                if source is not None and not target.exists():
                    files.link(source, target)
                    log.info("kept round=%d samples=%d file=%s", final.round, final.samples, target)
            for old in self._files()[: -self._limit if self._limit else 0]:
                old.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _or_say_why(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"Cannot keep final states in {self.folder}: {error.strerror}.",
                fix="They are hard links: choose an --output_dir on a file system that has them.",
                code=ExitCode.DISK,
            ) from None
