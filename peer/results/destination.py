"""Where `dd-export` writes: what it may replace there, and what to say where it cannot write.

An earlier export is told by its contents. A pipeline that another program saved, with nothing beside its parts, counts as one.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from peer.results.checkpoint import FULL
from swarm.errors import ExitCode, UserError, system_number

_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


def check(out: Path, *, folder: bool) -> None:
    """Raise UserError where an export to `out`, a folder or else a file, would replace anything but an earlier one."""
    if out.name in ("", ".."):
        raise UserError(f"--out is '{out}', which gives the export no name.", fix="Give a name of its own, such as --out model.")
    if folder and out.exists() and not _is_export(out):
        raise UserError(f"{out} is there already, and is not an earlier export.", fix="Choose another --out, or move it away.")
    if not folder and out.is_dir():
        raise UserError(f"{out} is a folder, and this format is one file.", fix="Choose another --out.")


def keep(out: Path, *sources: Path) -> None:
    """Raise UserError where an export to `out` would replace one of `sources`, which it is made from."""
    for source in sources:
        if source.exists() and source.resolve().is_relative_to(out.resolve()):
            raise UserError(f"The export to {out} would replace {source}, which it is made from.", fix="Choose another --out.")


def _is_export(path: Path) -> bool:
    """Whether it is a folder with nothing in it but a pipeline. Results of a training have a `result.json` beside it."""
    try:
        names = {entry.name for entry in path.iterdir()}
        parts = json.loads((path / "model_index.json").read_text(encoding="utf-8")) if names else {}
        return names <= {"model_index.json", *parts}
    except (OSError, ValueError, TypeError):
        return False


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Within it, a full disk and what else keeps `out` from being written is a UserError (disk) that names the way out."""
    try:
        yield
    except (OSError, SafetensorError, UserError) as error:
        # A UserError of a full disk gives advice to who trains (`replacing`): --output_dir, --resume_from_checkpoint.
        cause = error if not isinstance(error, UserError) else error.__cause__ if error.code == ExitCode.DISK else None
        number = system_number(cause)
        if number in FULL:
            what, fix = f"{out} could not be written", "Free some space, or choose another --out."
        elif number in _REFUSED and cause is error:
            what, fix = getattr(cause, "filename", None) or out, "Check whose it is, or choose another --out."
        else:
            raise
        raise UserError(f"{what}: {os.strerror(number)}.", fix=fix, code=ExitCode.DISK) from cause
