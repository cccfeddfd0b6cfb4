"""Where samples come from: a folder of captioned pictures, WebDataset tars within it, or a dataset of the Hub. Nothing is decoded here."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from datasetserver.pictures import Piece
from swarm.digest import digest_bytes
from swarm.errors import UserError
from swarm.tars import members

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
CAPTION_SUFFIXES = (".txt", ".caption")
PACKED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
METADATA = "metadata.jsonl"
CAPTION_FIELDS = ("text", "caption", "prompt")
_MAX_LINE_BYTES = 1 << 20

Faults = list[tuple[str, str]]
"""(name, reason) of what is no sample."""


@dataclass(frozen=True)
class Pair:
    """A picture and its caption, not yet looked at; `name` is its path within the dataset.

    caption: itself, or where it is; None where there is none. empty_ok: it may be empty or missing.
    """

    name: str
    image: Path | Piece | bytes
    caption: Path | Piece | str | None
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
    """Pictures and captions below a folder."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def list(self) -> Listing:
        faults: Faults = []
        pairs = find_pairs(self.path, faults)
        tars = sorted({pair.image.path for pair in pairs if isinstance(pair.image, Piece)})
        identity = [[_fingerprint(pair) for pair in pairs], [_version(tar) for tar in tars]]
        return Listing(identity, in_random_order(pairs), faults, len(pairs))


def in_random_order(pairs: Sequence[Pair]) -> list[Pair]:
    """Shuffled by name: the order depends on nothing but the dataset's content."""
    return sorted(pairs, key=lambda pair: blake3(os.fsencode(pair.name)).digest())


def find_pairs(folder: Path, faults: Faults | None = None) -> list[Pair]:
    """The pictures below `folder`, also those in its tars, by name; hidden files and linked folders left out.

    faults: gets (name, reason) of links that lead out of the folder, of lines of a `metadata.jsonl` that cannot be read or name no
    picture, and of what is wrong with tars. Raises UserError when the folder is missing or has no picture.
    """
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.", fix="Check --dataset.")
    faults = [] if faults is None else faults
    pairs: list[Pair] = []
    told: dict[str, tuple[str, str]] = {}
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = [name for name in sorted(files) if _is_ours(folder, Path(root, name), faults)]
        captions = {Path(name).stem: name for suffix in CAPTION_SUFFIXES[::-1] for name in files if name.lower().endswith(suffix)}
        if METADATA in files:
            told.update(_read_metadata(folder, Path(root, METADATA), faults))
        for name in files:
            path = Path(root, name)
            if name.lower().endswith(IMAGE_SUFFIXES):
                caption = captions.get(path.stem)
                pairs.append(Pair(_name(folder, path), path, Path(root, caption) if caption else None))
            elif name.lower().endswith(".tar"):
                pairs += find_in_tar(path, _name(folder, path), faults)
    if not pairs:
        first = f" (the first fault: {faults[0][0]}: {faults[0][1]})" if faults else ""
        raise UserError(
            f"{folder} holds no picture{first}.", fix=f"Put pictures ({', '.join(IMAGE_SUFFIXES)}) with captions (.txt) into it."
        )
    pairs = [replace(pair, caption=told.get(pair.name, (None, ""))[0]) if pair.caption is None else pair for pair in pairs]
    names = {pair.name for pair in pairs}
    faults += [(where, f"there is no picture {name}") for name, (_, where) in told.items() if name not in names]
    return sorted(pairs, key=lambda pair: pair.name)


def _is_ours(folder: Path, path: Path, faults: Faults) -> bool:
    """Whether it is a file that we read; with a fault for one that we should but do not."""
    name = path.name.lower()
    if name.startswith("."):
        return False
    if name.endswith(PACKED_SUFFIXES):
        faults.append((_name(folder, path), "a compressed tar: unpack it to a plain one"))
        return False
    if not name.endswith((*IMAGE_SUFFIXES, *CAPTION_SUFFIXES, ".tar")) and name != METADATA:
        return False
    if path.is_symlink() and not _leads_inside(folder, path):
        faults.append((_name(folder, path), "a link that leads out of the folder"))
        return False
    return True


def _leads_inside(folder: Path, link: Path) -> bool:
    try:
        return link.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a link to itself: loading it says so
        return True


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _read_metadata(folder: Path, path: Path, faults: Faults) -> dict[str, tuple[str, str]]:
    """(caption, where it is said) by picture, of lines such as {"file_name": "0001.png", "text": "a red square"}."""
    found = {}
    if not path.is_file():  # a pipe
        return found
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(_MAX_LINE_BYTES):
            number += 1
            where = f"{_name(folder, path)}, line {number}"
            try:
                values = json.loads(line) if line.strip() else None
                if values is not None:
                    text = next(values[name] for name in CAPTION_FIELDS if isinstance(values.get(name), str))
                    picture = Path(os.path.normpath(path.parent / values["file_name"]))
                    found[_name(folder, picture)] = text, where
            except StopIteration:
                faults.append((where, f"no caption: none of {', '.join(CAPTION_FIELDS)} is a text"))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                faults.append((where, "not a JSON object with the file_name of a picture in this folder"))
    return found


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
    return [os.fsencode(pair.name).hex(), _print_of(pair.image), _print_of(pair.caption)]


def _print_of(what: Path | Piece | bytes | str | None) -> Any:
    if isinstance(what, Path):
        return _version(what)
    if isinstance(what, Piece):
        return [what.offset, what.size]
    if isinstance(what, str):
        return digest_bytes(what.encode(errors="surrogatepass"))
    return what and digest_bytes(what)


def _version(path: Path) -> list | None:
    try:
        status = path.stat()
    except OSError:  # a link that leads nowhere: loading it says so
        return None
    return [os.fsencode(path.name).hex(), status.st_size, status.st_mtime_ns]
