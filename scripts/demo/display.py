"""One progress display for the whole swarm: a live one on a terminal, a plain line per round elsewhere."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class Display:
    """Feed it the dataset server's answers to GET /v1/progress. Use as a context manager; `say` writes a line above the bars."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._bars = _Bars(self.console) if self.console.is_terminal else None
        self._round = -1

    def __enter__(self) -> "Display":
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def show(self, progress: Mapping[str, Any]) -> None:
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
    """The whole run, and the round under way."""

    def __init__(self, console: Console):
        self._progress = Progress(
            TextColumn("{task.description:<12}"), BarColumn(), _Count(), TextColumn("{task.fields[note]}"), _Remaining(), console=console
        )
        self._run = self._progress.add_task("whole run", total=None, note="", rest=True)
        self._now = self._progress.add_task("this round", total=None, note="", rest=False)
        self.start, self.stop = self._progress.start, self._progress.stop

    def show(self, progress: Mapping[str, Any]) -> None:
        total, done, waiting = progress["total_samples"] or None, progress["samples"], progress["waiting_samples"]
        target = progress["target_batch_size"]
        if total:
            target = max(min(target, total - done), 1)
        # What waits for the next round is trained already: without it the bar would stand still and the time left be wrong.
        self._progress.update(self._run, total=total, completed=min(done + waiting, total or done + waiting), note=numbers(progress))
        self._progress.update(self._now, total=target, completed=min(waiting, target), description=f"round {progress['round'] + 1}")


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        of = f" of {int(task.total):,}" if task.total else ""
        return Text(f"{int(task.completed):>6,}{of} samples", style="cyan")


class _Remaining(TimeRemainingColumn):
    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields["rest"] else Text("")
