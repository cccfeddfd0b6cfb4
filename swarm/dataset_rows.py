"""A dataset of the Hugging Face Hub, or one that `datasets` reads from a folder, streamed: what hosts and peers take from a row of it.

A row has its picture as bytes, or names a file of the dataset itself, never a file or URL elsewhere. A row's path is a stranger's word. Honest
datasets need two kinds of it: files of the folder or Hub repository that holds the dataset (`imagefolder`), and members of a zip there.
Anything else would read this machine's files, or fetch URLs from within its network.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from swarm.captions import several
from swarm.errors import ExitCode, UserError
from swarm.picture_file import BadSample
from swarm.picture_folder import MAX_FILE_BYTES, Pair, leads_inside

_HUB, _ZIP = "hf://datasets/", "zip://"


@dataclass(frozen=True)
class HubDataset:
    """What to read, in the words of diffusers' training scripts. config, revision: empty for the default. max_samples: 0 for all rows."""

    name: str
    config: str = ""
    split: str = "train"
    revision: str = ""
    image_column: str = "image"
    caption_column: str = "text"
    max_samples: int = 0

    def __str__(self) -> str:
        return self.name

    def open(self, *, bare: bool = False) -> Any:
        """A stream of all its rows, with the two columns alone and pictures not decoded. bare: there need be no column of captions.

        Raises UserError for a column that is missing, and whatever `datasets` raises; see `told`.
        """
        import datasets

        name = str(Path(self.name).expanduser()) if Path(self.name).expanduser().is_dir() else self.name
        rows = datasets.load_dataset(name, self.config or None, split=self.split, revision=self.revision or None, streaming=True)
        features = rows.features or rows._resolve_features().features
        columns = {"image_column": self.image_column, "caption_column": self.caption_column}
        if bare and self.caption_column not in features:
            del columns["caption_column"]
        for option, column in columns.items():
            if column not in features:
                raise UserError(f"{self} has no column '{column}'; it has {', '.join(features)}.", fix=f"Give one of them as --{option}.")
        if not bare and _never_text(features[self.caption_column]):
            raise UserError(f"The column '{self.caption_column}' of {self} holds no text.", fix="Give one with captions as --caption_column, or --instance_prompt.")
        rows = rows.select_columns(list(columns.values()))
        if isinstance(features[self.image_column], datasets.Image):
            rows = rows.cast_column(self.image_column, datasets.Image(decode=False))
        return rows

    def pair(self, name: str, row: Mapping[str, Any], **options: Any) -> Pair:
        """The picture and the captions of a row; options: as in `Pair`. Raises BadSample for a row without a picture that may be read."""
        try:
            captions = several(row.get(self.caption_column))
        except BadSample:
            captions = ()
        return Pair(name, read_picture(row[self.image_column], self.name), captions, **options)

    @contextmanager
    def told(self) -> Iterator[None]:
        """`datasets` raises FileNotFoundError, ValueError, HfHubHTTPError, ArrowInvalid, ConnectionError, ...: one kind of error for all."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            first = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            raise UserError(
                f"The dataset {self} cannot be read: {first}",
                fix="Check its name, configuration and split, and the connection; what was read and checked already is kept.",
                code=ExitCode.NETWORK,
            ) from error


def _never_text(feature: Any) -> bool:
    import datasets

    kind = getattr(feature, "dtype", None)
    return isinstance(feature, datasets.ClassLabel) or (isinstance(feature, datasets.Value) and "string" not in kind and kind != "null")


def read_picture(value: Any, dataset: str) -> bytes:
    """The encoded picture in `value`, the cell of a row of `dataset`, which is a folder or the name of one of the Hub. Raises BadSample."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise BadSample("no picture in this row")
    try:
        return _read(_within(value, dataset))
    except BadSample:
        raise
    except Exception as error:  # of files and links OSError, of zips BadZipFile, RuntimeError, NotImplementedError, ..., of the Hub its own
        raise BadSample(f"cannot be read: {str(error)[:200] or type(error).__name__}") from None


def _within(path: str, dataset: str) -> str:
    """`path`, as `datasets` opens it, with links followed. Raises BadSample unless it names a file of the dataset, or a member of its zip."""
    member, chained, file = path.rpartition("::") if path.startswith(_ZIP) else ("", "", path)
    folder = Path(dataset).expanduser()
    if "::" in member or "::" in file:  # one file system in another, and who knows what in that
        raise BadSample("a path that leads out of the dataset")
    if folder.is_dir():
        real = (folder / file).resolve()
        if not leads_inside(folder, real):
            raise BadSample("a path that leads out of the dataset")
        if not real.is_file():  # reading a pipe would wait for ever
            raise BadSample("no file, or a link that leads nowhere")
        return f"{member}{chained}{real}"
    repository, revision, inside = file.partition("@")
    if repository != _HUB + dataset or not revision or not PurePosixPath(inside).parts[1:] or ".." in inside.split("/"):
        raise BadSample("a path that leads out of the dataset")
    return path


def _read(path: str) -> bytes:
    if os.path.isabs(path):
        with open(path, "rb") as file:
            return _at_most(file.read(MAX_FILE_BYTES + 1))
    from datasets.utils.file_utils import xopen

    with xopen(path, "rb") as file:
        return _at_most(file.read(MAX_FILE_BYTES + 1))


def _at_most(data: bytes) -> bytes:
    if len(data) > MAX_FILE_BYTES:
        raise BadSample(f"larger than {MAX_FILE_BYTES >> 20} MiB")
    return data
