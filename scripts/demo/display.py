"""One progress display for the whole swarm: a live one on a terminal, a plain line per round elsewhere."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class Display:
    """Feed it the dataset server's answers to GET /v1/progress. Use as a context manager; `say` writes a line above the bars."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self._bars = _Bars(self.console) if self.console.is_terminal else None
        self._round = -1
        self._speed = 0.0

    def __enter__(self) -> "Display":
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, progress: Mapping[str, Any]) -> None:
        # While they average, peers promise no samples; a display that drops to 0 once a round would say that they stand still.
        self._speed = progress["samples_per_second"] or self._speed
        progress = {**progress, "samples_per_second": self._speed}
        if self._bars:
            self._bars.show(progress)
        elif progress["round"] > self._round:
            self._round = progress["round"]
            self.say(line(progress))


def line(progress: Mapping[str, Any]) -> str:
    """Where the swarm stands, in one line."""
    of = f" of {progress['total_samples']:,}" if progress["total_samples"] else ""
    return f"round {progress['round']:<4} {progress['samples']:>7,}{of} samples  {numbers(progress)}"


def numbers(progress: Mapping[str, Any]) -> str:
    loss = "-" if progress["loss"] is None else f"{progress['loss']:.3f}"
    count = len(progress["peers"])
    return f"{progress['samples_per_second']:4.0f} samples/s  loss {loss:>5}  {count} peer{'' if count == 1 else 's'}"


class _Bars:
    """The whole run, the round under way, and the numbers below; fits 80 columns."""

    def __init__(self, console: Console):
        self._progress = Progress(TextColumn("{task.description:<10}"), BarColumn(bar_width=28), _Count(), _Remaining(), console=console)
        self._run = self._progress.add_task("whole run", total=None, rest=True)
        self._now = self._progress.add_task("this round", total=None, rest=False)
        self._numbers = Text("the peers are starting")
        live = Live(console=console, get_renderable=lambda: Group(self._progress, self._numbers), refresh_per_second=4)
        self.start, self.stop = live.start, live.stop

    def show(self, progress: Mapping[str, Any]) -> None:
        total, done, waiting = progress["total_samples"] or None, progress["samples"], progress["waiting_samples"]
        target = progress["target_batch_size"]
        if total:
            target = max(min(target, total - done), 1)
        # What waits for the next round is trained already: without it the bar would stand still and the time left be wrong.
        self._progress.update(self._run, total=total, completed=min(done + waiting, total or done + waiting))
        self._progress.update(self._now, total=target, completed=min(waiting, target), description=f"round {progress['round'] + 1}")
        self._numbers = Text(f"           {numbers(progress)}", style="dim")


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        of = f" of {int(task.total):,}" if task.total else ""
        return Text(f"{int(task.completed):>6,}{of} samples", style="cyan")


class _Remaining(TimeRemainingColumn):
    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields["rest"] else Text("")
