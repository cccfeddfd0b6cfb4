"""Which pictures a folder has, and which captions: one rule for the host that makes shards of it and for the peer that trains on it.

A picture's caption is the first that there is and that is not empty: its row in a metadata.jsonl or metadata.csv, the .txt or .caption of the
same stem beside it, and the name of its folder where that is like kohya's `10_sks dog`, whose pictures come ten times an epoch. Pictures are
not opened here, and caption files are not read: both may be many.
"""

import csv
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
CAPTION_SUFFIXES = (".txt", ".caption")
CAPTION_COLUMNS = ("text", "caption", "prompt")
METADATA = ("metadata.csv", "metadata.jsonl")  # the later one wins
_MAX_LINE_BYTES = 1 << 20
# Kohya's folders repeat what is in them; four digits begin a year more often than they count repeats.
_REPEATED = re.compile(r"(\d{1,3})_(.+)")

Captions = tuple[str, ...]


@dataclass(frozen=True)
class FolderPicture:
    """name: its path below the folder. told: its captions in a metadata file; beside: the file with its caption.

    spare: its caption where neither has one; '' outside of kohya's folders. repeats: how often it comes in an epoch.
    """

    name: str
    path: Path
    told: Captions
    beside: Path | None
    spare: str
    repeats: int


class Row(NamedTuple):
    """What a metadata file says of a picture. where: the file, below the folder, and its line."""

    captions: Captions
    where: str


class Fault(NamedTuple):
    """A line of a metadata file that cannot be used, and what to do about it."""

    where: str
    reason: str
    fix: str


@dataclass
class Listing:
    """pictures: by name. nowhere: rows of metadata files, by the name of a picture that is not there.

    lonely: caption files without a picture of their stem beside them. others: all further files.
    """

    pictures: list[FolderPicture] = field(default_factory=list)
    nowhere: dict[str, Row] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    lonely: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)


def list_folder(folder: Path, column: str = CAPTION_COLUMNS[0], takes: Callable[[Path], bool] = Path.is_file) -> Listing:
    """What is in `folder` and the folders in it; hidden files, and folders that are hidden or links, are left out.

    column: of metadata files, with the captions; 'text' stands for the first there is of text, caption and prompt. takes: whether a picture, caption or metadata
    file may be used; where not, it is as if it were not there.
    """
    listing = Listing()
    columns = CAPTION_COLUMNS if column == CAPTION_COLUMNS[0] else (column,)
    for place, names in _walk(folder):
        taken = [name for name in names if not _is_ours(name) or takes(place / name)]
        for name in METADATA:
            if name in taken:
                listing.nowhere.update(_read_metadata(folder, place / name, columns, listing.faults))
        captions = {Path(name).stem: name for suffix in CAPTION_SUFFIXES[::-1] for name in taken if name.lower().endswith(suffix)}
        for name in taken:
            if name.lower().endswith(IMAGE_SUFFIXES):
                beside = captions.get(Path(name).stem)
                listing.pictures.append(_picture(folder, place / name, place / beside if beside else None))
            elif not _is_ours(name):
                listing.others.append(place / name)
        stems = {Path(name).stem for name in names if not name.lower().endswith(CAPTION_SUFFIXES)}
        listing.lonely += [place / name for stem, name in captions.items() if stem not in stems]
    listing.pictures = [_told(picture, listing.nowhere) for picture in sorted(listing.pictures, key=lambda picture: picture.name)]
    return listing


def one_line(text: str) -> str:
    """A caption as one line of composed characters (NFC) without control characters."""
    text = unicodedata.normalize("NFC", text)
    return "".join(char if char.isprintable() else " " for char in text).strip()


def several(value: Any) -> Captions:
    """The captions in a cell of a table: a text, or a list of texts, of which chance takes one; none where it is empty. Raises TypeError."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError("neither a text nor a list of texts")
    return tuple(filter(None, map(one_line, texts)))


def name_of(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder with its files, those above before those in them."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(root), sorted(name for name in files if not name.startswith("."))


def _is_ours(name: str) -> bool:
    return name in METADATA or name.lower().endswith((*IMAGE_SUFFIXES, *CAPTION_SUFFIXES))


def _picture(folder: Path, path: Path, beside: Path | None) -> FolderPicture:
    name = name_of(folder, path)
    repeated = [match for part in name.split("/")[:-1] if (match := _REPEATED.fullmatch(part))]
    spare, repeats = (one_line(repeated[-1][2]), int(repeated[-1][1])) if repeated else ("", 1)
    return FolderPicture(name, path, (), beside, spare, repeats)


def _told(picture: FolderPicture, rows: dict[str, Row]) -> FolderPicture:
    row = rows.pop(picture.name, None)
    return replace(picture, told=row.captions) if row else picture


# -- metadata files, as the imagefolder of `datasets` has them


class _BadRow(Exception):
    """Its arguments: why it cannot be used, and what to do."""


def _read_metadata(folder: Path, path: Path, columns: Sequence[str], faults: list[Fault]) -> dict[str, Row]:
    """Rows by the name of their picture, of lines such as {"file_name": "0001.png", "text": "a red square"}."""
    rows: dict[str, Row] = {}
    try:
        for line, values in _lines_of_csv(path) if path.suffix == ".csv" else _lines_of_jsonl(path):
            where = f"{name_of(folder, path)}, line {line}"
            try:
                picture, captions = _picture_and_captions(values, columns)
                rows[os.path.relpath(os.path.normpath(path.parent / picture), folder)] = Row(captions, where)
            except _BadRow as bad:
                faults.append(Fault(where, *bad.args))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        faults.append(Fault(name_of(folder, path), f"cannot be read: {error}", "Save it as UTF-8."))
    return rows


def _picture_and_captions(values: Any, columns: Sequence[str]) -> tuple[str, Captions]:
    """Raises _BadRow."""
    if values is None:
        raise _BadRow("no JSON", "Correct that line.")
    if not isinstance(values, Mapping) or not isinstance(values.get("file_name"), str):
        raise _BadRow("no file_name", 'Each row is like {"file_name": "0001.png", "text": "a cat"}.')
    column = next((name for name in columns if name in values), None)
    if column is None:
        others = ", ".join(str(name) for name in values if name != "file_name") or "nothing else"
        raise _BadRow(f"no caption: it has {others}, not {' or '.join(columns)}", "Give the captions' column as --caption_column.")
    try:
        return values["file_name"], several(values[column])
    except TypeError as error:
        raise _BadRow(f"no caption: its {column} is {error}", "Correct that line.") from None


def _lines_of_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers with what the lines say; None for one that is no JSON."""
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(_MAX_LINE_BYTES):
            number += 1
            try:
                if line.strip():
                    yield number, json.loads(line)
            except (ValueError, RecursionError):
                yield number, None


def _lines_of_csv(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        for row in reader:
            yield reader.line_num, row
