"""What a run that grows has of the pictures that it knows: it stays, and the host is told which captions and repeats are others now.

Deleted pictures and other pixels are not looked for: a known picture is never decoded again.
"""

import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from datasetserver.sources import picture_of
from swarm.errors import ExitCode, UserError
from swarm.picture_file import BadSample
from swarm.picture_folder import Pair

CAPTION = "another caption than in the run, which keeps its own"
REPEATS = "another number of repeats than in the run, which keeps its own"
_DIGEST_BYTES = 8
"""Of each caption: a million captions themselves would take another 100 MB."""


class Kept:
    """The pictures that a run knows. `notes`: (name, CAPTION or REPEATS), complete once all of `new` was gone through."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []
        self._captions: dict[str, bytes | None] = {}
        self._repeats: Counter[str] = Counter()

    def __contains__(self, picture: str) -> bool:
        return picture in self._captions

    def __len__(self) -> int:
        return len(self._captions)

    def add(self, name: str, captions: bytes | None, *, trained: bool) -> None:
        """A sample of the run. captions: as its shard has them; None: unknown, so that they are not compared. trained: not held out."""
        self._captions[picture_of(name)] = None if captions is None else _digest(captions)
        self._repeats[picture_of(name)] += trained

    def new(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """The pairs of pictures that the run does not know."""
        found: Counter[str] = Counter()
        for pair in pairs:
            picture = picture_of(pair.name)
            if picture not in self:
                yield pair
                continue
            found[picture] += 1
            before = self._captions[picture]
            if pair.name == picture and before is not None and _captions(pair) != before:
                self.notes.append((picture, CAPTION))
        # What is held out comes once, however often it would be trained.
        self.notes += [(picture, REPEATS) for picture, count in found.items() if self._repeats[picture] not in (0, count)]


def captions_in(path: Path, samples: int) -> list[bytes]:
    """The captions of each sample of a shard of ours, lines in UTF-8. Raises UserError when the file is damaged."""
    try:
        with tarfile.open(path) as tar:
            found = [tar.extractfile(member).read() for member in tar if member.name.endswith(".txt")]
        if len(found) != samples:
            raise tarfile.ReadError(f"{len(found)} of {samples} captions")
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"The shard {path} is damaged: {error}.", fix="Restore that file from a copy.", code=ExitCode.DISK) from None
    return found


def _captions(pair: Pair) -> bytes | None:
    try:
        return _digest("\n".join(pair.captions()).encode())
    except BadSample:  # it has none any more
        return None


def _digest(captions: bytes) -> bytes:
    return blake3(captions).digest(_DIGEST_BYTES)
