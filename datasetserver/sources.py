"""Where samples come from: a folder of captioned pictures with the tars in it, or a dataset of the Hub. Nothing is decoded here."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from swarm.captions import CAPTION_COLUMNS, Captions, Faults
from swarm.dataset_rows import HubDataset
from swarm.digest import canonical_json, digest_bytes
from swarm.picture_file import BadSample
from swarm.picture_folder import Pair, Piece
from swarm.subsets import list_dataset

WINDOW_ROWS = 1024
WINDOW_BYTES = 256 << 20
_AGAIN = re.compile(r"#\d+$")


@dataclass(frozen=True)
class Listing:
    """The pairs of a source, in the order in which they become samples.

    identity: gives canonical JSON that changes when the source does, in pieces: of ten million pictures it has about 2 GB.
    faults: grows while the pairs are gone through. count: how many pairs there are, where that is known.
    """

    identity: Callable[[], Iterable[bytes]]
    pairs: Iterable[Pair]
    faults: Faults
    count: int | None = None

    @property
    def streamed(self) -> bool:
        """Rows of the Hub: they can be read only once, and have neither a weight nor a held-out share of their own."""
        return not isinstance(self.pairs, Sequence)


class Source(Protocol):
    def list(self) -> Listing:
        """Raises UserError when there is nothing."""
        ...


@dataclass(frozen=True)
class Folder:
    """Pictures and captions below a folder, or below those that a TOML file names.

    column: of metadata files, with the captions. masks, without: see `list_dataset`.
    """

    path: Path
    column: str = CAPTION_COLUMNS[0]
    masks: bool = False
    without: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return str(self.path)

    def list(self) -> Listing:
        faults: Faults = []
        listed = list_dataset(self.path, faults, self.column, self.masks, self.without)
        pairs = [*listed, *(replace(pair, name=name) for pair in listed for name in _repeated(pair))]
        pairs.sort(key=lambda pair: pair.name)
        tars = sorted({pair.image.path for pair in pairs if isinstance(pair.image, Piece)})
        return Listing(partial(_identity, pairs, tars), _in_random_order(pairs), faults, len(pairs))


class Hub(HubDataset):
    """A dataset of the Hub. Rows are named by their number, and shuffled within windows that fit into memory."""

    def list(self) -> Listing:
        """Nothing is fetched before the first pair is asked for. Going through the pairs raises UserError as soon as a row cannot be had."""
        faults: Faults = []
        return Listing(lambda: [canonical_json({"hub": asdict(self)})], self._pairs(faults), faults, self.max_samples or None)

    def _pairs(self, faults: Faults) -> Iterator[Pair]:
        window: list[Pair] = []
        size = 0
        with self.told():
            rows = self.open()
            for number, row in enumerate(rows.take(self.max_samples) if self.max_samples else rows):
                name = f"{self.split}/{number:09d}"
                try:
                    window.append(self.pair(name, row))
                except BadSample as reason:
                    faults.append((name, str(reason)))
                    continue
                size += len(window[-1].image)
                if len(window) == WINDOW_ROWS or size > WINDOW_BYTES:
                    yield from _in_random_order(window)
                    window, size = [], 0
        yield from _in_random_order(window)


def picture_of(name: str) -> str:
    """The name of the picture, of one of the names that it has where it comes several times an epoch."""
    return _AGAIN.sub("", name)


def _repeated(pair: Pair) -> Iterator[str]:
    """A name for each further time that a picture comes in an epoch: `name#2`, `name#3`, ..."""
    return (f"{pair.name}#{number}" for number in range(2, pair.repeats + 1))


def _in_random_order(pairs: Sequence[Pair]) -> list[Pair]:
    """Shuffled by name: the order depends on nothing but the dataset's content."""
    return sorted(pairs, key=lambda pair: blake3(os.fsencode(pair.name)).digest())


# -- has it changed?


def _identity(pairs: Iterable[Pair], tars: Iterable[Path]) -> Iterator[bytes]:
    yield b"[["
    for place, pair in enumerate(pairs):
        yield b"," * bool(place) + canonical_json(_fingerprint(pair))
    yield b"]," + canonical_json([_version(tar) for tar in tars]) + b"]"


def _fingerprint(pair: Pair) -> list:
    """Changes with the pair's files; names as bytes, since a file's name may be no text."""
    said = [os.fsencode(pair.name).hex(), _print_of(pair.image), _print_of(pair.caption), pair.spare]
    said += [_print_of(pair.mask)] if pair.mask else []
    said += (list(pair.around) if any(pair.around) else []) + ([pair.weight] if pair.weight != 1 else [])
    return said + ([] if pair.validation_split is None else [{"validation_split": pair.validation_split}])


def _print_of(what: Path | Piece | bytes | Captions | None) -> Any:
    if isinstance(what, Path):
        return _version(what)
    if isinstance(what, Piece):
        return [what.offset, what.size]
    if isinstance(what, tuple):
        return digest_bytes("\n".join(what).encode(errors="surrogatepass"))
    return what and digest_bytes(what)


def _version(path: Path) -> list | None:
    # What a path says of itself it keeps, 130 bytes from Python 3.12 on: 2.6 GB for ten million pairs. So a copy is asked.
    copy = Path(path)
    try:
        status = copy.stat()
    except OSError:  # a link that leads nowhere: loading it says so
        return None
    return [os.fsencode(copy.name).hex(), status.st_size, status.st_mtime_ns]
