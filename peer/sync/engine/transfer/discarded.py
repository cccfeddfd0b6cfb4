"""States that this machine's owner or the run's host has named as forged: they, and all that descend from them, are neither loaded nor taken over."""

import logging
import re
from collections.abc import Collection
from pathlib import Path

from peer.sync.engine.state import Header
from swarm import files
from swarm.bans import Bans
from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)

_FILE = "discarded"
_SHORTEST = 8
"""Hex digits of a digest that name it; as many as the log lines show."""
_NAME = re.compile(f"[0-9a-f]{{{_SHORTEST},64}}")


def discard(folder: Path, digests: Collection[str]) -> None:
    """Add `digests`, or beginnings of some, to those that are discarded in a folder of states. Raises UserError."""
    for digest in digests:
        if not _NAME.fullmatch(digest):
            raise UserError(
                f"'{digest}' names no state.",
                fix=f"Give its digest, or the first {_SHORTEST} digits or more: see rounds.jsonl or dd-status.",
            )
    known = Discarded(folder).names
    if new := sorted(set(digests) - known):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files.replace(folder / _FILE, "".join(f"{digest}\n" for digest in sorted({*known, *new})).encode())
        except OSError as error:
            raise UserError(f"Cannot write {folder / _FILE}: {error.strerror}.", fix="Free some space.", code=ExitCode.DISK) from None
        log.info("discarded from now on: %s, and what descends from it", ", ".join(new))


class Discarded:
    """What `discard` named in this folder of states, and what the host says."""

    def __init__(self, folder: Path, bans: Bans | None = None):
        self._bans = bans
        try:
            self.names = set((folder / _FILE).read_text(encoding="ascii").split())
            if not all(map(_NAME.fullmatch, self.names)):  # one digit, left of a name, would discard every sixteenth state
                raise ValueError("it is damaged")
        except FileNotFoundError:
            self.names = set()
        except (OSError, ValueError) as error:
            raise UserError(f"Cannot read {folder / _FILE}: {error}.", fix="Restore or delete it.", code=ExitCode.DISK) from None

    def name_of(self, digest: str, header: Header | None = None) -> str:
        """The name by which this state, or an ancestor that its header names, is discarded; '': it is not.

        Of ancestors that are long ago a header has the first ELDER_CHARACTERS of the digest, so no more is compared.
        """
        names = (*self.names, *(self._bans.discarded if self._bans else ()))
        past = (digest, *(header.past() if header else ())) if names else ()
        return next((name for state in past for name in names if state.startswith(name[: len(state)])), "")

    def holds(self, digest: str, header: Header | None = None) -> bool:
        return bool(self.name_of(digest, header))
