"""Checkpoints that are whole or not there: written beside, flushed to disk, renamed; verified by digests before they are used.

A checkpoint is a folder `checkpoint-<number>` with `tensors.safetensors`, `state.json` and `manifest.json`; no pickle.
"""

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peer.results.output_folder import asked_path
from swarm.digest import digest_file, digest_json
from swarm.errors import ExitCode, UserError, system_number
from swarm.files import flush
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d{6,})")
SPARE_BYTES = 16 << 20
"""Left free by a checkpoint, for logs and for others."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""The system's numbers of a disk, or a quota, that takes no more."""


class Damaged(Exception):
    """A checkpoint that is not what was written, and why."""


class Checkpoints:
    """The checkpoints of one output folder; the last `keep` of them stay.

    of: what they are of, as plain strings: the run, and what of this start's choice their contents fit alone.
    options: the run's, as it is sent. The folder's run.json may be of a later start that went on under other options.
    """

    def __init__(self, folder: Path, keep: int, of: Mapping[str, str] | None = None, options: Mapping[str, Any] | None = None):
        self._folder, self._keep, self._of, self._options = folder, keep, dict(of or {}), options

    def paths(self) -> list[Path]:
        """Oldest first."""
        return sorted((path for path in self._folder.glob("checkpoint-*") if _NAME.fullmatch(path.name)), key=_number)

    def save(self, state: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
        """Write `state`, a tree of dicts, lists, plain values, bytes and tensors; about: what to say of it in manifest and log.

        Raises UserError when the disk is full, before anything is written where that can be foreseen; the checkpoints before are
        untouched and nothing is left behind.
        """
        paths = self.paths()
        target = self._folder / f"checkpoint-{_number(paths[-1]) + 1 if paths else 1:06}"
        with replacing(target) as folder:
            tensors: dict[str, Tensor] = {}
            tree = _without_tensors(state, tensors)
            _check_room(folder, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
            save_file(tensors, folder / "tensors.safetensors")
            (folder / "state.json").write_text(json.dumps(tree), encoding="utf-8")
            files = {name: digest_file(folder / name) for name in ("tensors.safetensors", "state.json")}
            manifest = {"about": dict(about), "of": self._of, "run": self._options, "files": files}
            (folder / "manifest.json").write_text(json.dumps(manifest | {"digest": digest_json(manifest)}), encoding="utf-8")
        for path in paths[: max(0, len(paths) + 1 - self._keep)]:
            shutil.rmtree(path, ignore_errors=True)
        log.info("saved %s %s", target, " ".join(f"{name}={value}" for name, value in about.items()))
        return target

    def load(self, wanted: str, *, fix: str = "Start without --resume_from_checkpoint.") -> tuple[Path, dict[str, Any]] | None:
        """The state of checkpoint `wanted`, a folder or 'latest'; for a damaged one the newest good one before it, with a warning.

        None when 'latest' was asked for and there is none at all. Raises UserError when there is no such folder, or no good one;
        fix: what to do then.
        """
        folder, paths = self._folder, self.paths()
        if wanted != "latest":
            asked = asked_path(folder, wanted)
            if not asked.is_dir():
                raise UserError(f"There is no checkpoint {asked}.", fix="Give its folder, or 'latest'.")
            folder = asked.parent
            before = Checkpoints(folder, keep=1).paths() if _NAME.fullmatch(asked.name) else []
            paths = [path for path in before if _number(path) < _number(asked)] + [asked]
        for path in reversed(paths):
            try:
                return path, read(path)
            except Damaged as damage:
                log.warning("damaged checkpoint=%s because %s; trying the one before", path, damage)
        if not paths:
            return None
        raise UserError(f"No checkpoint in {folder} is whole.", fix=fix, code=ExitCode.DISK)

    def asked_for(self, wanted: str, run: RunConfig | None) -> tuple[Path, dict[str, Any]] | None:
        """`wanted` as --resume_from_checkpoint has it; run: the swarm's, None alone.

        Unasked ('auto'), one that does not fit is passed over: in a swarm it costs the optimizer's moments. Raises UserError for one that was asked for.
        """
        if wanted == "auto":
            return self.load_own()
        found = self.load(wanted)
        theirs = of(found[0]).get("run") if found else None
        if theirs and run and theirs != run.run_id:
            raise UserError(
                f"The checkpoint {found[0]} is of the run {theirs}, not of '{run.run_name}' ({run.run_id}).",
                fix="Remove --resume_from_checkpoint; to build on it, give its result as the --model of a new run.",
            )
        its = of(found[0]).get("optimizer") if found else None
        if its and its != self._of.get("optimizer", its):
            raise UserError(
                f"The checkpoint {found[0]} has the state of {its}, and this start has {self._of['optimizer']}.",
                fix="Start with the --optimizer and --text_encoder_lr that it was made with; or remove --resume_from_checkpoint.",
            )
        return found

    def load_own(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest state that is whole and of the same as we are; None when there is none. Others are passed over with a warning."""
        for path in reversed(self.paths()):
            try:
                if differs := _differences(self._of, of(path)):
                    log.warning("ignored %s: %s", path, differs)
                else:
                    return path, read(path)
            except Damaged as damage:
                log.warning("ignored %s: damaged, %s", path, damage)
        return None


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """In words; '' when there are none."""
    return ", ".join(
        f"its {name} is {theirs.get(name, 'not said')}, not {value}" for name, value in ours.items() if theirs.get(name) != value
    )


def about(path: Path) -> dict[str, Any]:
    """What was said of the checkpoint at `path` when it was saved. Raises Damaged."""
    return _manifest(path)["about"]


def of(path: Path) -> dict[str, str]:
    """What the checkpoint at `path` is of; {} where an older version saved it. Raises Damaged."""
    return _manifest(path).get("of", {})


def run_of(path: Path) -> RunConfig | None:
    """The run whose options made the checkpoint at `path`; None where an older version saved it. Raises Damaged."""
    saved = _manifest(path).get("run")
    return RunConfig.from_mapping(saved, where=str(path / "manifest.json")) if saved else None


def read(path: Path) -> dict[str, Any]:
    """The state saved at `path`, every byte verified; tensors on the CPU. Raises Damaged."""
    for name, digest in _manifest(path)["files"].items():
        try:
            if digest_file(path / name) != digest:
                raise Damaged(f"{name} is not what was written")
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from error
    tree = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return _with_tensors(tree, load_file(path / "tensors.safetensors"))


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if manifest.pop("digest") != digest_json(manifest):
            raise Damaged("manifest.json is not what was written")
        return manifest
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"manifest.json: {error}") from error


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields an empty folder that becomes `target`, flushed to disk, when the block ends well, and vanishes when it does not.

    Raises UserError (code DISK) when the disk is full.
    """
    temporary, old = (target.with_name(f".{target.name}.{kind}") for kind in ("writing", "old"))
    _remove(temporary)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            flush(path)
        _remove(old)
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        flush(target.parent)
        _remove(old)
    except (OSError, SafetensorError) as error:
        if (number := system_number(error)) in FULL:
            raise UserError(
                f"{target} could not be written: {os.strerror(number)}.",
                fix="Free space or choose another --output_dir, then start again with --resume_from_checkpoint latest.",
                code=ExitCode.DISK,
            ) from error
        raise
    finally:
        _remove(temporary)


def _check_room(folder: Path, num_bytes: int) -> None:
    """Do not begin what cannot end: a disk filled to its last byte is everybody's trouble on this machine. Raises OSError."""
    if shutil.disk_usage(folder).free < num_bytes + SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _number(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found
    return int(found[1])


def _without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors go to `tensors` under running numbers, which stand in their places."""
    if isinstance(value, Tensor):
        # A clone: safetensors refuses tensors that share memory, and tied or viewed ones do.
        tensors[str(len(tensors))] = value.detach().to("cpu", copy=True).contiguous()
        return {"@tensor": str(len(tensors) - 1)}
    if isinstance(value, bytes):
        return {"@bytes": value.hex()}
    if isinstance(value, Mapping):
        return {"@map": [[key, _without_tensors(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"@tuple": [_without_tensors(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_without_tensors(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__}")


def _with_tensors(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_with_tensors(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "@tensor":
        return tensors[value]
    if kind == "@bytes":
        return bytes.fromhex(value)
    if kind == "@tuple":
        return tuple(_with_tensors(item, tensors) for item in value)
    return {key: _with_tensors(item, tensors) for key, item in value}
