"""What training looks like from outside: `metrics.jsonl` for programs, a bar or plain lines for people."""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

log = logging.getLogger(__name__)


class Progress:
    """Averages every `every_steps` local steps into one line of `metrics.jsonl`, and shows people how far the run is.

    Each line: time (UNIX seconds), step (local), samples (trained by this peer in this process), loss (mean per sample, null when no step
    counted), learning_rate, samples_per_second, round, committed (samples in the swarm's state), peers.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        total_samples: int,
        every_steps: int = 10,
        every_seconds: float = 10,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[int, Mapping[str, Any]], None] = lambda step, values: None,
    ):
        """tell: is handed each line as well: the local step, and all else but the time.

        path: None writes and shows nothing (ranks other than 0); every_seconds: between plain lines, where `stream` is no terminal."""
        self._file = path.open("a", encoding="utf-8") if path else None
        self._every_steps, self._every_seconds, self._clock = every_steps, every_seconds, clock
        self._total, self._tell = total_samples, tell
        self._bar = _bar(stream or sys.stderr, total_samples) if path else None
        self._samples = self._steps = 0
        self._window_samples, self._window_loss, self._window_began = 0, 0.0, clock()
        self._said = clock()

    def stepped(self, *, step: int, samples: int, loss: float | None, **position: Any) -> None:
        """One local step: samples counted (0 when it did not count), their mean loss, and where the run stands."""
        if self._file is None:
            return
        self._samples += samples
        self._window_samples += samples
        self._window_loss += (loss or 0.0) * samples
        self._steps += 1
        if self._bar is not None:
            self._bar.update(samples)
        if self._steps % self._every_steps == 0:
            self._write(step, position)

    def _write(self, step: int, position: dict[str, Any]) -> None:
        assert self._file is not None
        now = self._clock()
        speed = self._window_samples / max(now - self._window_began, 1e-9)
        loss = self._window_loss / self._window_samples if self._window_samples else None
        line = {"time": round(time.time(), 3), "step": step, "samples": self._samples, "loss": loss, "samples_per_second": round(speed, 2)}
        self._file.write(json.dumps(line | position) + "\n")
        self._file.flush()
        self._tell(step, {name: value for name, value in (line | position).items() if name not in ("time", "step")})
        self._show(now, step, loss, speed, position)
        self._window_samples, self._window_loss, self._window_began = 0, 0.0, now

    def _show(self, now: float, step: int, loss: float | None, speed: float, position: dict[str, Any]) -> None:
        shown = "-" if loss is None else f"{loss:.4f}"
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss={shown} round={position.get('round')} peers={position.get('peers')}")
        elif now - self._said >= self._every_seconds:
            of = f"/{self._total}" if self._total else ""
            log.info("training step=%d samples=%d%s loss=%s samples_per_second=%.1f", step, self._samples, of, shown, speed)
            self._said = now

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            self._file.close()


def _bar(stream: IO[str], total_samples: int):
    if not stream.isatty():
        return None
    from tqdm import tqdm

    return tqdm(total=total_samples or None, unit="sample", file=stream, dynamic_ncols=True)
