"""The run that a founder's folder is of: a founder that starts again, in a newer version too, goes on with that one."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.run_config import RunConfig
from swarm.run_defaults import DEFAULTS
from swarm.run_identity import PLACES


def as_it_began(folder: Path, said: Mapping[str, Any], run: RunConfig) -> RunConfig:
    """The run of `folder`, under the id that it has had, where the options in `said`, which make `run` now, made it; else `run`."""
    try:
        began = RunConfig.from_mapping(json.loads((folder / "run.json").read_text(encoding="utf-8"))["run"], where=str(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):  # none began here, or none that could go on
        return run
    # What is not said now, and was not given then, may differ: this program may have another default than the one that founded the run, or
    # find out what that one left open.
    differ = [name for name in began.differing(asdict(run)) if name in began.differing(said) or getattr(began, name) != DEFAULTS[name]]
    return run if differ else replace(began, **{name: getattr(run, name) for name in PLACES})
