"""A peer's figures: what each is called everywhere, `metrics.jsonl` for programs, plain lines for people."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Metric:
    """counts: only ever grows, while the process lives."""

    name: str
    help: str
    counts: bool = False


METRICS = (
    Metric("step", "Local steps, those before a resume included."),
    Metric("samples", "Samples that this process trained and that counted.", counts=True),
    Metric("loss", "Mean loss per sample over the last steps."),
    Metric("validation_loss", "Mean loss of the held-out pictures, as it was measured last."),
    Metric("learning_rate", "Learning rate of the local optimizer."),
    Metric("samples_per_second", "Samples that this peer trains a second, over the last steps."),
    Metric("round", "Round of the state that this peer holds."),
    Metric("committed", "Samples in that state, all peers' together."),
    Metric("peers", "Peers whose work is in its last round."),
    Metric("live_peers", "Peers that train now, this one included."),
    Metric("swarm_samples_per_second", "Samples that all of them train a second."),
    Metric("round_waiting", "Samples trained by all of them for the next round."),
    Metric("round_target", "Samples that it needs."),
    Metric("sent_bytes", "Bytes sent in averaged rounds.", counts=True),
    Metric("received_bytes", "Bytes received in averaged rounds.", counts=True),
    Metric("round_sent_bytes", "Bytes sent in the last averaged round."),
    Metric("round_received_bytes", "Bytes received in it."),
    Metric("transfer_seconds", "Seconds from its group to the whole average."),
    Metric("share_lost", "Share of this peer's time that it loses to rounds."),
)
"""What metrics.jsonl, tensorboard and wandb call by this name, and Prometheus with `dd_peer_` before it, and `_total` after what counts.

From `live_peers` on they are of a swarm, and missing alone. docs/operate.md explains them.
"""
NAMES = tuple(metric.name for metric in METRICS)


class Progress:
    """Averages every `every_steps` local steps into one line of `metrics.jsonl`: the time in UNIX seconds, and METRICS as far as they are known.

    loss is null when no step counted.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        total_samples: Callable[[], int],
        every_steps: int = 10,
        every_seconds: float = 10,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        print_loss: bool = False,
        swarm: Callable[[], Mapping[str, Any]] = dict,
        tell: Callable[[int, Mapping[str, Any]], None] = lambda step, values: None,
    ):
        """tell: is handed each line as well: the local step, and all else but the time. swarm: what is known of the swarm, by name.
        print_loss: log every local step's loss. total_samples: where the run ends now; 0: nowhere.

        path: None writes and shows nothing (ranks other than 0); every_seconds: between plain lines, of which a `quiet` one says none.
        """
        self._file = path.open("a", encoding="utf-8") if path else None
        self._every_steps, self._every_seconds, self._clock = every_steps, every_seconds, clock
        self._total, self._tell, self._swarm, self._quiet, self._print_loss = total_samples, tell, swarm, quiet, print_loss
        self._samples = self._steps = 0
        self._window_samples, self._window_loss, self._window_began = 0, 0.0, clock()
        self._said = clock()
        self._known: dict[str, Any] = {}

    def values(self) -> dict[str, Any]:
        """METRICS as far as they are known, and what else the swarm's side says; for any thread."""
        return {**self._swarm(), **self._known}

    def stepped(self, *, step: int, samples: int, loss: float | None, **position: Any) -> None:
        """One local step: samples counted (0 when it did not count), their mean loss, and where the run stands."""
        if self._file is None:
            return
        if self._print_loss:
            log.info("step=%d samples=%d loss=%s", step, samples, "-" if loss is None else f"{loss:.6f}")
        self._samples += samples
        self._window_samples += samples
        self._window_loss += (loss or 0.0) * samples
        self._steps += 1
        self._known = {**self._known, "step": step, "samples": self._samples, **position}
        if self._steps % self._every_steps == 0:
            self._write(step)

    def measured(self, step: int, loss: float) -> None:
        """The held-out loss: a line of its own, and in those that follow."""
        if self._file is not None:
            self._known = {**self._known, "step": step, "validation_loss": loss}
            self._line(step)

    def _write(self, step: int) -> None:
        now = self._clock()
        speed = round(self._window_samples / max(now - self._window_began, 1e-9), 2)
        loss = self._window_loss / self._window_samples if self._window_samples else None
        self._known = {**self._known, "loss": loss, "samples_per_second": speed}
        self._line(step)
        self._say(now, step, loss, speed)
        self._window_samples, self._window_loss, self._window_began = 0, 0.0, now

    def _line(self, step: int) -> None:
        """What is known, in metrics.jsonl and at the trackers."""
        assert self._file is not None
        known = self.values()
        line = {name: known[name] for name in NAMES if name in known}
        self._file.write(json.dumps({"time": round(time.time(), 3)} | line) + "\n")
        self._file.flush()
        self._tell(step, {name: value for name, value in line.items() if name != "step"})

    def _say(self, now: float, step: int, loss: float | None, speed: float) -> None:
        if self._quiet or now - self._said < self._every_seconds:
            return
        shown = "-" if loss is None else f"{loss:.4f}"
        total = self._total()
        of = f"{self._known['committed']}/{total}" if total else self._known["committed"]
        log.info("training step=%d samples=%d committed=%s loss=%s samples_per_second=%.1f", step, self._samples, of, shown, speed)
        self._said = now

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
