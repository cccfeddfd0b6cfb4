"""A peer's own terminal: a few steady lines at the bottom, with log lines running above them. Where there is no terminal, nothing.

Everything that this process and its children write to stderr goes above: it is read from a pipe that takes the place of descriptor 2.
"""

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swarm import advice
from swarm.logs import plain
from swarm.screen import bar, span

_REFRESHES_PER_SECOND = 2
_LONGEST_LINE_BYTES = 1 << 16


def wanted(log_format: str) -> bool:
    """Whether a person looks on."""
    return log_format == "text" and os.isatty(2)


@contextlib.contextmanager
def display(title: str, values: Callable[[], Mapping[str, Any]], *, total_samples: Callable[[], int]) -> Iterator[None]:
    """Show `values()`, by the names of `peer.figures.metrics.METRICS`, at the bottom of the terminal that stderr is, until the context ends.

    total_samples: where the run ends now, for its host may put that off; 0: nowhere.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    reading, writing = os.pipe()
    with os.fdopen(terminal, "w", encoding="utf-8", errors="backslashreplace") as file:
        console = Console(file=file)
        live = Live(
            console=console,
            get_renderable=lambda: lines(title, values(), total_samples()),
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        os.dup2(writing, 2)
        os.close(writing)
        ended, tell_end = os.pipe()
        above = threading.Thread(target=_show_above, args=(console, reading, ended), daemon=True)
        above.start()
        try:
            with live:
                console.show_cursor(True)  # a process that is killed cannot bring it back
                yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(tell_end)
            above.join()
            os.close(reading)
            os.close(ended)


def _show_above(console: Console, reading: int, ended: int) -> None:
    """Print whole lines above what is live, as plain text. Of a line that was drawn over and over, the last is printed."""
    rest, poll = b"", select.poll()
    poll.register(reading, select.POLLIN)
    poll.register(ended)  # its hang-up
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}  # children may hold the pipe open for longer than we read it
        data = os.read(reading, 1 << 16) if reading in ready else b""
        if data:
            *whole, rest = (rest + data).split(b"\n")
            rest = rest.rpartition(b"\r")[2][-_LONGEST_LINE_BYTES:]
            for line in whole:
                _print(console, line)
        else:
            return _print(console, rest) if rest else None


def _print(console: Console, line: bytes) -> None:
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="backslashreplace")
    console.print(Text(plain(text)), soft_wrap=True)


def lines(title: str, values: Mapping[str, Any], total_samples: int) -> RenderableType:
    """The run, the next round, the figures, and what the last round moved: as far as they are known."""
    rows = Table.grid(padding=(0, 2))
    samples = values.get("committed", 0) + values.get("round_waiting", 0)
    speed = values.get("swarm_samples_per_second", values.get("samples_per_second")) or 0.0
    left = f", about {span((total_samples - samples) / speed)} left" if speed and total_samples > samples else ""
    rows.add_row(Text(plain(title), style="bold"), bar(min(samples, total_samples) if total_samples else samples, total_samples, left))
    if values.get("round_target"):
        rows.add_row(f"round {values.get('round', 0) + 1}", bar(values["round_waiting"], values["round_target"]))
    rows.add_row(
        Text(plain(str(values.get("phase", ""))).replace("_", " ")), Text(", ".join(_figures(values)), overflow="ellipsis", no_wrap=True)
    )
    if values.get("transfer_seconds"):
        rows.add_row("link", Text(_transfer(values), overflow="ellipsis", no_wrap=True))
    if values.get("note"):
        rows.add_row("", Text(plain(values["note"]), style="yellow", overflow="ellipsis", no_wrap=True))
    return Group(rows)


def _figures(values: Mapping[str, Any]) -> Iterator[str]:
    if values.get("samples_per_second") is not None:
        yield f"{values['samples_per_second']:,.1f} samples/s"
    if values.get("loss") is not None:
        yield f"loss {values['loss']:.4f}"
    if values.get("validation_loss") is not None:
        yield f"validation {values['validation_loss']:.4f}"
    if values.get("live_peers") is not None:
        yield f"{values['live_peers']:,} peers"
    if values.get("step") is not None:
        yield f"step {values['step']:,}"


def _transfer(values: Mapping[str, Any]) -> str:
    seconds = values["transfer_seconds"]
    up, down = values["round_sent_bytes"], values["round_received_bytes"]
    moved = f"sent {advice.size(up)}, received {advice.size(down)} in {advice.duration(seconds)}"
    return f"{moved} ({8e-6 * max(up, down) / seconds:,.0f} Mbit/s), {values['share_lost']:.1%} of the time lost"
