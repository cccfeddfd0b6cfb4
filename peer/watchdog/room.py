"""What a trainer tells its supervisor at the start: which options would make room here. It knows its device; one that the kernel killed says no more."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.life import FOLDER

_FILE = "room"


def tell_room(device: str, ways: Sequence[Mapping[str, Any]], batch: int, environ: Mapping[str, str] = os.environ) -> None:
    """device: whose memory is meant, such as 'cuda'; ways: changes of PeerConfig, the cheapest first; batch: samples of a micro-batch.

    Nothing is written where nobody supervises.
    """
    if environ.get(FOLDER):
        _write(Path(environ[FOLDER]), {"device": device, "ways": list(ways), "batch": batch})


def tell_counted(way: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Once memory has run out: what fits by count, before the ways that were told of at the start. Nothing is written where none were."""
    if environ.get(FOLDER) and (told := _told(folder := Path(environ[FOLDER]))):
        _write(folder, {**told, "ways": [dict(way), *told["ways"]]})


def forget_room(folder: Path) -> None:
    """Before a trainer starts: what the one before it told is old."""
    (folder / _FILE).unlink(missing_ok=True)


def next_way(folder: Path, *, killed: bool) -> Mapping[str, Any]:
    """The cheapest way that the trainer told of, empty where there is none. killed: by the kernel, so the host was short of memory, and no GPU."""
    told = _told(folder)
    return next(iter(told["ways"]), {}) if told and (told["device"] == "cpu" or not killed) else {}


def told_batch(folder: Path) -> int | None:
    """The micro-batch that the trainer had, which it may have measured (--train_batch_size auto); None where it told of none."""
    return _told(folder).get("batch")


def _write(folder: Path, told: Mapping[str, Any]) -> None:
    (folder / _FILE).write_text(json.dumps(told), encoding="utf-8")


def _told(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it ended before it could tell, or while it did
        return {}


def as_flags(way: Mapping[str, Any]) -> list[str]:
    return [word for name, value in way.items() for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]
