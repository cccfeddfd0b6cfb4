"""`--report_to`: metrics and pictures for tensorboard and wandb, each an optional library.

accelerate's trackers are not used: they log through accelerate's own state of the process, which would start a process group of its own.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import UserError


class Tensorboard:
    """Event files in `folder`, of values that are numbers."""

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / project))
        self._writer.add_text("settings", "\n".join(f"    {name} = {value!r}" for name, value in settings.items()))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def picture(self, step: int, name: str, picture: Any) -> None:
        import numpy as np

        self._writer.add_image(name, np.asarray(picture), step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of the project, its own files in `folder`."""

    def __init__(self, folder: Path, project: str, settings: Mapping[str, Any]):
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(project=project, name=settings.get("run_name"), dir=str(folder), config=dict(settings))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, picture: Any) -> None:
        import wandb

        self._run.log({name: wandb.Image(picture)}, step=step)

    def close(self) -> None:
        self._run.finish()


_KINDS = {"tensorboard": Tensorboard, "wandb": Wandb}


class Trackers:
    """All that were asked for, as one."""

    def __init__(self, report_to: str, folder: Path, project: str, settings: Mapping[str, Any]):
        """settings: of the run, to be shown beside it. Raises UserError when a library that was asked for is missing."""
        self._trackers = [_KINDS[name](folder, project, settings) for name in wanted(report_to)]

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)

    def picture(self, step: int, name: str, picture: Any) -> None:
        for tracker in self._trackers:
            tracker.picture(step, name, picture)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def wanted(report_to: str) -> list[str]:
    """Names of trackers; 'all' are those whose libraries are installed. Raises UserError for one whose library is not."""
    if report_to == "none":
        return []
    names = list(_KINDS) if report_to == "all" else [report_to]
    there = [name for name in names if importlib.util.find_spec(name)]
    if not there:
        raise UserError(f"--report_to {report_to} needs a library that is not installed.", fix=f"pip install {' '.join(names)}")
    return there
