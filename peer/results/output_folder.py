"""Whose folder is this: what an --output_dir holds of a run, and of which run. The one place that answers that.

`run.json` says which run it is. Checkpoints, results, states and figures are that run's. When this peer takes part in another run, they move
into `earlier/ID`, laid out as they were, and come back when that run is joined again: nothing is deleted, and nobody has to be there.
What belongs to the peer or the machine stays: identity.key, known_hosts.json, contribution_number, peer_state, caches, logs of dd-peer.
"""

import fcntl
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from peer.config import PeerConfig
from swarm.digest import digest_json
from swarm.errors import ExitCode, UserError
from swarm.files import replace
from swarm.run.strategy import swarms
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

RESULTS = ("model", "model-steps-*", "learned_embeds-steps-*", "validation")
EARLIER = "earlier"
_PRECIOUS = (*RESULTS, "checkpoint-*", "state", "settled")
"""What is another's work, should nothing say whose."""
_OF_A_RUN = (
    *_PRECIOUS, ".model*", ".learned_embeds*", ".checkpoint-*", "kind.json", "extension.json", "rounds.jsonl", "rounds.1.jsonl", "metrics.jsonl", "peers_met.json",
    "bans.json", "logs", "profile",
)  # fmt: skip
_RESULT = "model"
_OF_THE_FOLDER = ("README.md", "result.json")
"""What a result's folder says of itself alone."""
_ID = re.compile("[0-9a-f]{16}")
_SAYS, _LOCK = "run.json", "in_use.lock"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A run as a folder knows it."""

    id: str
    """Of a swarm's run its run_id; of one trained alone a digest of its options, model and data."""
    name: str
    alone: bool
    about: Mapping[str, Any] = field(default_factory=dict)
    """What run.json says besides, for `dd-export` and for who assists."""

    def __str__(self) -> str:
        return f"the run '{self.name}' ({self.id})" if not self.alone else f"'{self.name}', which was trained alone ({self.id})"


def folder_id(run: RunConfig, peer: PeerConfig) -> str:
    """By what an output folder tells runs apart: a swarm's by its run_id, those trained alone by their options, model and data."""
    return run.run_id if peer.swarming else digest_json([run.digest, run.model, peer.own_data_told])[:16]


def made(folder: Path) -> Path:
    """It, which is there now. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}.", fix="Choose another --output_dir.", code=ExitCode.DISK) from None
    return folder


def lock(folder: Path) -> TextIO:
    """Keep `folder` from other processes until what is returned is closed: they would move or overwrite what is written. Raises UserError."""
    try:
        file = (folder / _LOCK).open("w")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"Another peer is using {folder}.", fix="Stop that one, or choose another --output_dir.") from None
    except OSError as error:
        raise _unwritable(folder, error) from None
    return file


def claim(folder: Path, owner: Owner, *, wanted: str = "auto", used: Iterable[Path] = ()) -> bool:
    """Make `folder` that of `owner`'s run; whether it was before. What it holds of another run is set aside, and what it held of this one comes back.

    wanted: as --resume_from_checkpoint has it; who asks for one in this folder, alone, goes on with what is there under other options,
    and `mark`s it when that has come about: until then it says of which options the checkpoints are, which may be refused.
    used: files and folders that this start needs. Raises UserError when whose the folder is cannot be known, when a checkpoint of
    another run is asked for, when what would be set aside is in use, and when the disk refuses.
    """
    earlier, place = owner_of(folder), _place(folder, owner.id)
    known = bool(earlier and earlier.id == owner.id) or (place / _SAYS).exists()
    adopted = not known and earlier is not None and _asks_for_one_here(folder, wanted)
    if adopted:
        _check_adoption(folder, earlier, owner)
    try:
        if earlier and earlier.id != owner.id and not adopted:
            _set_aside(folder, earlier, used)
        if not adopted:
            _say(folder, owner)
        _take_back(folder, place)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return known or adopted


def mark(folder: Path, owner: Owner) -> None:
    """From now on `folder` says that it is of `owner`'s run. Raises UserError when the disk refuses."""
    try:
        _say(folder, owner)
    except OSError as error:
        raise _unwritable(folder, error) from None


def owner_of(folder: Path) -> Owner | None:
    """Whose checkpoints and results `folder` holds; None when it holds none. Raises UserError when that cannot be known."""
    said = folder / _SAYS
    try:
        saved = json.loads(said.read_text(encoding="utf-8"))
        run = RunConfig.from_mapping(saved["run"], where=str(said))
        identity = saved.get("id", run.run_id)
        if not _ID.fullmatch(identity):
            raise ValueError("it has no id")
        return Owner(id=identity, name=run.run_name, alone=not swarms(run.sync))
    except FileNotFoundError:
        problem = "is missing"
    except (OSError, ValueError, KeyError, TypeError, UserError):
        problem = "is damaged"
    if precious := _entries(folder, _PRECIOUS):
        names = ", ".join(path.name for path in precious[:5])
        raise UserError(
            f"{said} {problem}, which names the run of {names}.",
            fix="Move these away, or choose another --output_dir.",
        )
    return None


def link_result(folder: Path) -> None:
    """Let `folder` be loaded as the result in it, as programs expect that know no `model`: a link to each of its parts. Others' files stay."""
    try:
        for link in links(folder):
            link.unlink()
        for part in sorted((folder / _RESULT).iterdir()):
            if part.name not in _OF_THE_FOLDER and not os.path.lexists(folder / part.name):
                (folder / part.name).symlink_to(Path(_RESULT) / part.name)
    except OSError as error:  # a file system without links
        log.debug("no links to the result in %s: %s", folder, error.strerror)


def links(folder: Path) -> list[Path]:
    """What `link_result` made."""
    return sorted(path for path in folder.iterdir() if path.is_symlink() and path.readlink() == Path(_RESULT) / path.name)


def _say(folder: Path, owner: Owner) -> None:
    replace(folder / _SAYS, json.dumps({"id": owner.id, **owner.about}, indent=2).encode())


def asked_path(folder: Path, wanted: str) -> Path:
    """Where the checkpoint is that was asked for: a name alone is one in `folder`, if there is one, as in diffusers' scripts."""
    if Path(wanted).name == wanted and (folder / wanted).is_dir():
        return folder.absolute() / wanted
    return Path(os.path.abspath(wanted))  # of `.` too; a link stays where it is, beside the run's run.json


def _asks_for_one_here(folder: Path, wanted: str) -> bool:
    return wanted == "latest" or (wanted not in ("auto", "none") and asked_path(folder, wanted).resolve().parent == folder.resolve())


def _check_adoption(folder: Path, earlier: Owner, owner: Owner) -> None:
    """Alone, other options may go on with what there is; whose run a swarm's checkpoint is of, is not for one peer to say."""
    if not (owner.alone and earlier.alone):
        raise UserError(
            f"{folder} holds {earlier}: there is no checkpoint of {owner}.",
            fix="Remove --resume_from_checkpoint to set that aside and start again, or choose another --output_dir.",
        )


def _entries(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def _of_its_run(folder: Path) -> list[Path]:
    return sorted({*_entries(folder, _OF_A_RUN), *links(folder)})


def _place(folder: Path, identity: str) -> Path:
    return folder / EARLIER / identity


def _set_aside(folder: Path, earlier: Owner, used: Iterable[Path]) -> None:
    """run.json goes last: a process that is killed on the way moves the rest at its next start."""
    entries, place = _of_its_run(folder), _place(folder, earlier.id)
    for path in used:
        as_a_whole = path.resolve() == folder.resolve() and links(folder)  # what can be loaded there are links into what would be set aside
        if as_a_whole or any(path.resolve().is_relative_to(entry.resolve()) for entry in entries):
            raise UserError(f"{path} is part of {earlier}, which {folder} holds.", fix="Choose another --output_dir for this one.")
    if not entries:
        return
    place.mkdir(parents=True, exist_ok=True)
    for path in entries:
        path.rename(_free(place / path.name))
    (folder / _SAYS).rename(place / _SAYS)
    log.warning("%s held %s: moved its checkpoints and results to %s; joining it again brings them back", folder, earlier, place)


def _take_back(folder: Path, place: Path) -> None:
    """After run.json: a process that is killed on the way takes the rest at its next start."""
    if not place.is_dir():
        return
    for path in _of_its_run(place):
        if not (folder / path.name).exists():
            path.rename(folder / path.name)
    (place / _SAYS).unlink(missing_ok=True)
    for empty in (place, place.parent):
        if not any(empty.iterdir()):
            empty.rmdir()
    log.info("brought back what %s held of this run before, from %s", folder, place)


def _free(path: Path) -> Path:
    """`path`, or with a number behind its name when that is taken."""
    number, free = 2, path
    while free.exists():
        free, number = path.with_name(f"{path.name}.{number}"), number + 1
    return free


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"{error.filename or folder}: {error.strerror}.", fix="Check whose it is, or choose another --output_dir.", code=ExitCode.DISK
    )
