"""The picture in a row of a dataset that strangers wrote: bytes in the row, or a file of the dataset itself, never a file or URL elsewhere.

A row's path is a stranger's word. Honest datasets need two kinds of it: files of the folder or Hub repository that holds the dataset
(`imagefolder`), and members of a zip there. Anything else would read this machine's files, or fetch URLs from within its network.
"""

import os
from pathlib import Path, PurePosixPath
from typing import Any

MAX_PICTURE_BYTES = 256 << 20
_HUB, _ZIP = "hf://datasets/", "zip://"


class NoPicture(Exception):
    """A row without a picture that may be read; the text says why."""


def read_picture(value: Any, dataset: str) -> bytes:
    """The encoded picture in `value`, the cell of a row of `dataset`, which is a folder or the name of one of the Hub. Raises NoPicture."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise NoPicture("no picture in this row")
    try:
        return _read(_within(value, dataset))
    except NoPicture:
        raise
    except Exception as error:  # of files and links OSError, of zips BadZipFile, RuntimeError, NotImplementedError, ..., of the Hub its own
        raise NoPicture(f"cannot be read: {str(error)[:200] or type(error).__name__}") from None


def _within(path: str, dataset: str) -> str:
    """`path`, as `datasets` opens it, with links followed. Raises NoPicture unless it names a file of the dataset, or a member of its zip."""
    member, chained, file = path.rpartition("::") if path.startswith(_ZIP) else ("", "", path)
    folder = Path(dataset).expanduser()
    if "::" in member or "::" in file:  # one file system in another, and who knows what in that
        raise NoPicture("a path that leads out of the dataset")
    if folder.is_dir():
        real = Path(file).resolve() if Path(file).is_absolute() else (folder / file).resolve()
        if not any(map(real.is_relative_to, _roots(folder.resolve()))):
            raise NoPicture("a path that leads out of the dataset")
        if not real.is_file():  # reading a pipe would wait for ever
            raise NoPicture("no file, or a link that leads nowhere")
        return f"{member}{chained}{real}"
    repository, revision, inside = file.partition("@")
    if repository != _HUB + dataset or not revision or not PurePosixPath(inside).parts[1:] or ".." in inside.split("/"):
        raise NoPicture("a path that leads out of the dataset")
    return path


def _roots(folder: Path) -> list[Path]:
    """Where the files of a dataset's folder lie: in it, and where it is a snapshot in the Hub's cache, in the `blobs` that its links lead to."""
    return [folder, *([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [])]


def _read(path: str) -> bytes:
    if os.path.isabs(path):
        with open(path, "rb") as file:
            return _at_most(file.read(MAX_PICTURE_BYTES + 1))
    from datasets.utils.file_utils import xopen

    with xopen(path, "rb") as file:
        return _at_most(file.read(MAX_PICTURE_BYTES + 1))


def _at_most(data: bytes) -> bytes:
    if len(data) > MAX_PICTURE_BYTES:
        raise NoPicture(f"larger than {MAX_PICTURE_BYTES >> 20} MiB")
    return data
