"""What a trainer tells its supervisor while it lives: what it is doing, and on demand where it is in the code.

Under `dd-peer`, the variable DD_SUPERVISED names a folder: rank 0 writes `life` into it, and every process that the supervisor may ask
writes its stacks to `stacks-PID` when it gets SIGUSR1. Without the variable nothing is written.
"""

import contextlib
import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "DD_SUPERVISED"
TRAINING = "training"
"""Steps, and waits between them: signs of life come again and again. All else takes as long as it takes."""
_EVERY_SECONDS = 1.0
_BYTES = 128
"""Written at once, over what was there: a reader sees one sign whole, or the one before."""


@dataclass(frozen=True)
class Sign:
    doing: str
    at: float
    """Seconds of time.monotonic(), which all processes of a machine share, and which stands still while it sleeps."""


class Life:
    """`life("drawing")`: this is what I begin now. Costs a write a second, or none."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.monotonic):
        self._file = os.open(folder / "life", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644) if folder else None
        self._clock, self._last = clock, Sign("", float("-inf"))

    @classmethod
    def of_process(cls, environ: Mapping[str, str] = os.environ) -> "Life":
        """This process's, which from now on also says where it is when asked. Only rank 0 shows life: the others wait for it, and it for them."""
        folder = Path(environ[FOLDER]) if environ.get(FOLDER) else None
        answer_with_stacks(environ)
        return cls(folder if environ.get("RANK") in (None, "", "0") else None)

    def __call__(self, doing: str = "") -> None:
        """doing: "" for what was begun before."""
        now, doing = self._clock(), doing or self._last.doing or "starting"
        if self._file is None or (doing == self._last.doing and now - self._last.at < _EVERY_SECONDS):
            return
        self._last = Sign(doing, now)
        with contextlib.suppress(OSError):  # a full disk: others notice
            os.pwrite(self._file, json.dumps([doing, now]).ljust(_BYTES).encode(), 0)

    def while_asked(self, stopping: Callable[[], bool]) -> Callable[[], bool]:
        """`stopping`, as a sign of life: every loop that waits asks it again and again."""

        def asked() -> bool:
            self()
            return stopping()

        return asked


def last_sign(folder: Path) -> Sign | None:
    """The last sign of life, None when there is none."""
    try:
        doing, at = json.loads((folder / "life").read_bytes())
        return Sign(str(doing), float(at))
    except (OSError, ValueError, TypeError):
        return None


def answer_with_stacks(environ: Mapping[str, str] = os.environ) -> None:
    """On SIGUSR1 write where every thread is, also when Python itself hangs (faulthandler)."""
    if environ.get(FOLDER):
        file: Any = open(Path(environ[FOLDER]) / f"stacks-{os.getpid()}", "w")  # noqa: SIM115 for as long as the process lives
        faulthandler.register(signal.SIGUSR1, file=file)
        _kept.append(file)


_kept: list[Any] = []
