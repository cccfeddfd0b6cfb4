"""Captions of pictures: what counts as one, and those that metadata files have, in the layout of the imagefolder of `datasets`."""

import csv
import json
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swarm.picture_file import BadSample

Captions = tuple[str, ...]
Faults = list[tuple[str, str]]
"""(name, reason) of what is no sample."""
CAPTION_COLUMNS = ("text", "caption", "prompt")
METADATA = ("metadata.csv", "metadata.jsonl")  # the later one wins
_MAX_LINE_BYTES = 1 << 20
_JOINERS = "\u200c\u200d"


class Row(NamedTuple):
    """What a metadata file says of a picture. where: the file, below the folder, and its line."""

    captions: Captions
    where: str


def one_line(text: str) -> str:
    """A caption as one line of composed characters (NFC) without control characters; those that join letters and emoji stay."""
    text = unicodedata.normalize("NFC", text)
    return "".join(char if char.isprintable() or char in _JOINERS else " " for char in text).strip()


def several(value: Any) -> Captions:
    """The captions in a cell of a table: a text, or a list of texts, of which chance takes one; none where it is empty. Raises BadSample."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadSample("caption is neither a text nor a list of texts")
    return tuple(filter(None, map(one_line, texts)))


def read_metadata(folder: Path, path: Path, column: str, faults: Faults) -> dict[str, Row]:
    """Rows by the name of their picture below `folder`, of lines such as {"file_name": "0001.png", "text": "a red square"}.

    column: with the captions; 'text' stands for the first there is of text, caption and prompt. faults: gets what cannot be used.
    """
    name = path.relative_to(folder).as_posix()
    columns = CAPTION_COLUMNS if column == CAPTION_COLUMNS[0] else (column,)
    rows: dict[str, Row] = {}
    try:
        for line, values in _lines_of_csv(path) if path.suffix == ".csv" else _lines_of_jsonl(path):
            where = f"{name}, line {line}"
            try:
                picture, captions = _picture_and_captions(values, columns)
                rows[os.path.relpath(os.path.normpath(path.parent / picture), folder)] = Row(captions, where)
            except BadSample as bad:
                faults.append((where, str(bad)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        faults.append((name, f"cannot be read: {error}"))
    return rows


def _picture_and_captions(values: Any, columns: Sequence[str]) -> tuple[str, Captions]:
    """Raises BadSample."""
    if values is None:
        raise BadSample("no JSON")
    if not isinstance(values, Mapping) or not isinstance(values.get("file_name"), str):
        raise BadSample('no file_name: each row is like {"file_name": "0001.png", "text": "a cat"}')
    column = next((name for name in columns if name in values), None)
    if column is None:
        others = ", ".join(str(name) for name in values if name != "file_name") or "nothing else"
        raise BadSample(f"no caption: it has {others}, not {' or '.join(columns)}; give the captions' column as --caption_column")
    return values["file_name"], several(values[column])


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
