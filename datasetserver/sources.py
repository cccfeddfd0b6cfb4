"""Where samples come from: a folder of captioned pictures, WebDataset tars within it, or a dataset of the Hub. Nothing is decoded here."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from datasetserver.pictures import Piece
from swarm.digest import digest_bytes
from swarm.errors import UserError
from swarm.picture_folder import CAPTION_COLUMNS, CAPTION_SUFFIXES, IMAGE_SUFFIXES, METADATA, Captions, FolderPicture, list_folder, name_of
from swarm.tars import members

PACKED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
OTHER_PICTURES = (".gif", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jxl")
_AGAIN = re.compile(r"#\d+$")

Faults = list[tuple[str, str]]
"""(name, reason) of what is no sample."""


@dataclass(frozen=True)
class Pair:
    """A picture and its captions, not yet looked at; `name` is its path within the dataset.

    caption: itself, or several, of which chance takes one, or where it is; None where there is none. spare: instead of one that is missing or
    empty; '' for none. empty_ok: it may be empty or missing in the end.
    """

    name: str
    image: Path | Piece | bytes
    caption: Path | Piece | Captions | None
    spare: str = ""
    empty_ok: bool = False


@dataclass(frozen=True)
class Listing:
    """The pairs of a source, in the order in which they become samples. identity: JSON that changes when the source does.

    faults: grows while the pairs are gone through. count: how many pairs there are, where that is known.
    """

    identity: Any
    pairs: Iterable[Pair]
    faults: Faults
    count: int | None = None


class Source(Protocol):
    def list(self) -> Listing:
        """Raises UserError when there is nothing."""
        ...


@dataclass(frozen=True)
class Folder:
    """Pictures and captions below a folder. column: of metadata files, with the captions."""

    path: Path
    column: str = CAPTION_COLUMNS[0]

    def __str__(self) -> str:
        return str(self.path)

    def list(self) -> Listing:
        faults: Faults = []
        pairs = find_pairs(self.path, faults, self.column)
        tars = sorted({pair.image.path for pair in pairs if isinstance(pair.image, Piece)})
        identity = [[_fingerprint(pair) for pair in pairs], [_version(tar) for tar in tars]]
        return Listing(identity, in_random_order(pairs), faults, len(pairs))


def in_random_order(pairs: Sequence[Pair]) -> list[Pair]:
    """Shuffled by name: the order depends on nothing but the dataset's content."""
    return sorted(pairs, key=lambda pair: blake3(os.fsencode(pair.name)).digest())


def repeated(name: str, repeats: int) -> list[str]:
    """A name for each time that a picture comes in an epoch: `name`, `name#2`, `name#3`, ..."""
    return [name, *(f"{name}#{number}" for number in range(2, repeats + 1))]


def picture_of(name: str) -> str:
    """The name of the picture, of one of the names of `repeated`."""
    return _AGAIN.sub("", name)


def find_pairs(folder: Path, faults: Faults | None = None, column: str = CAPTION_COLUMNS[0]) -> list[Pair]:
    """The pictures below `folder`, also those in its tars, by name; one that comes several times an epoch is there as often.

    faults: gets (name, reason) of what is none: links that lead out of the folder, lines of metadata files that cannot be read or name no
    picture, captions without a picture, pictures of other formats, and what is wrong with tars.
    Raises UserError when the folder is missing or has no picture.
    """
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", fix="Check --dataset.")
    faults = [] if faults is None else faults
    listing = list_folder(folder, column, lambda path: _stays_inside(folder, path, faults))
    pairs = [pair for picture in listing.pictures for pair in _pairs_of_picture(picture)]
    for path in listing.others:
        pairs += _pairs_of_other(folder, path, faults)
    rows = listing.nowhere
    pairs = [replace(pair, caption=rows.pop(pair.name).captions or pair.caption) if pair.name in rows else pair for pair in pairs]
    faults += [(row.where, f"there is no picture {name}") for name, row in rows.items()]
    faults += [(fault.where, fault.reason) for fault in listing.faults]
    faults += [(name_of(folder, path), "a caption, but no picture of that name") for path in listing.lonely]
    if not pairs:
        first = f" (the first fault: {faults[0][0]}: {faults[0][1]})" if faults else ""
        raise UserError(
            f"{folder} holds no picture{first}.", fix=f"Put pictures ({', '.join(IMAGE_SUFFIXES)}) with captions (.txt) into it."
        )
    return sorted(pairs, key=lambda pair: pair.name)


def _stays_inside(folder: Path, path: Path, faults: Faults) -> bool:
    """Whether it is no link that leads out of the folder; with a fault for one that is. Of pipes and the like, only metadata is read here."""
    if path.is_symlink() and not _leads_inside(folder, path):
        faults.append((name_of(folder, path), "a link that leads out of the folder"))
        return False
    return path.name not in METADATA or path.is_file()


def _leads_inside(folder: Path, link: Path) -> bool:
    try:
        return link.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a link to itself: loading it says so
        return True


def _pairs_of_picture(picture: FolderPicture) -> list[Pair]:
    return [
        Pair(name, picture.path, picture.told or picture.beside, picture.spare) for name in repeated(picture.name, picture.repeats)
    ]


def _pairs_of_other(folder: Path, path: Path, faults: Faults) -> list[Pair]:
    """The pictures of a tar; none, and a fault, of a file that we should read but do not."""
    name, suffix = name_of(folder, path), path.suffix.lower()
    if suffix == ".tar" and _stays_inside(folder, path, faults):
        return find_in_tar(path, name, faults)
    if path.name.lower().endswith(PACKED_SUFFIXES):
        faults.append((name, "a compressed tar: unpack it to a plain one"))
    elif suffix in OTHER_PICTURES:
        faults.append((name, f"a {suffix[1:].upper()}: convert it to PNG or JPEG"))
    return []


# -- WebDataset tars


def find_in_tar(path: Path, name: str, faults: Faults) -> list[Pair]:
    """The pictures of a WebDataset tar as pieces of that file: members of one path up to its first dot are a sample.

    A tar that is damaged gives what it has before the damage.
    """
    groups: dict[str, dict[str, Piece]] = {}
    try:
        for member, piece in _pieces(path, name, faults):
            folder, _, file = member.rpartition("/")
            key, _, suffix = file.partition(".")
            group = groups.setdefault(f"{folder}/{key}" if folder else key, {})
            if group.setdefault(f".{suffix.lower()}", piece) is not piece:
                faults.append((f"{name}/{member}", "is there twice in the tar; the first was taken"))
    except Exception as error:  # tarfile raises ReadError, OSError, ValueError, UnicodeError, RecursionError, ... on hostile bytes
        faults.append((name, f"the tar is damaged, what comes after was not read: {error or type(error).__name__}"))
    return [pair for key, group in groups.items() for pair in _pairs_of(f"{name}/{key}", group)]


def _pairs_of(key: str, group: dict[str, Piece]) -> Iterator[Pair]:
    caption = next((group[suffix] for suffix in CAPTION_SUFFIXES if suffix in group), None)
    for suffix in IMAGE_SUFFIXES:
        if suffix in group:
            yield Pair(key + suffix, group[suffix], caption)


def _pieces(path: Path, name: str, faults: Faults) -> Iterator[tuple[str, Piece]]:
    """Names and places of the pictures and captions in a tar. Raises what tarfile raises."""
    for member in members(path):
        if not member.name.lower().endswith((*IMAGE_SUFFIXES, *CAPTION_SUFFIXES)):
            continue
        if member.plain:
            yield member.name, Piece(path, member.offset, member.size)
        else:
            faults.append((f"{name}/{member.name}", "no plain file within the tar"))


# -- has it changed?


def _fingerprint(pair: Pair) -> list:
    """Changes with the pair's files; names as bytes, since a file's name may be no text."""
    return [os.fsencode(pair.name).hex(), _print_of(pair.image), _print_of(pair.caption), pair.spare]


def _print_of(what: Path | Piece | bytes | Captions | None) -> Any:
    if isinstance(what, Path):
        return _version(what)
    if isinstance(what, Piece):
        return [what.offset, what.size]
    if isinstance(what, tuple):
        return digest_bytes("\n".join(what).encode(errors="surrogatepass"))
    return what and digest_bytes(what)


def _version(path: Path) -> list | None:
    try:
        status = path.stat()
    except OSError:  # a link that leads nowhere: loading it says so
        return None
    return [os.fsencode(path.name).hex(), status.st_size, status.st_mtime_ns]
