"""`--profile_duration`: what the device does for some milliseconds, as a file for TensorBoard (XLA) or a trace viewer (all else)."""

import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)

_FIRST_STEP = 3
"""The first two compile, allocate and read models from the disk."""


def profile_folder(output: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Where PyTorch/XLA's users say it, in the variable PROFILE_DIR."""
    return Path(environ.get("PROFILE_DIR") or output / "profile")


class Profiler:
    """Records from the third local step on, whole steps only, until `milliseconds` or the run are over."""

    def __init__(self, milliseconds: int, folder: Path, device: torch.device, clock: Callable[[], float] = time.monotonic):
        """milliseconds: 0 for nothing. Raises UserError when `folder` cannot be made."""
        self._seconds, self._folder, self._device, self._clock = milliseconds / 1000, folder, device, clock
        self._recording: Any = None
        self._steps, self._until = 0, 0.0
        if milliseconds:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"{folder} cannot be made: {error.strerror}.", fix="Choose another PROFILE_DIR.", code=ExitCode.DISK
                ) from None

    def stepped(self) -> None:
        """A local step is over."""
        self._steps += 1
        if self._seconds and self._recording is None and self._steps == _FIRST_STEP - 1:
            self._recording = _recording(self._folder, self._device)
            self._until = self._clock() + self._seconds
        elif self._recording is not None and self._clock() >= self._until:
            self.close()

    def close(self) -> None:
        if self._recording is None:
            if self._seconds and self._steps < _FIRST_STEP:
                log.warning("nothing was profiled: there were only %d local steps", self._steps)
        else:
            self._recording.stop()
            log.info("profile written to %s", self._folder)
        self._recording, self._seconds = None, 0.0


def _recording(folder: Path, device: torch.device) -> Any:
    if device.type == "xla":
        return importlib.import_module("peer.machine.xla").Recording(folder)
    return _Torch(folder, device)


class _Torch:
    """torch.profiler; the trace is for chrome://tracing or ui.perfetto.dev."""

    def __init__(self, folder: Path, device: torch.device):
        from torch.profiler import ProfilerActivity, profile

        self._path = folder / f"trace-{time.strftime('%Y%m%d-%H%M%S')}.json"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=kinds)
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
