"""What a peer shows of itself: to Prometheus, to trackers, and to whoever looks at its terminal."""

import codecs
import contextlib
import io
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from peer.figures import trackers
from peer.figures.metrics import METRICS, NAMES, Progress
from peer.figures.prometheus import PREFIX, exposed
from peer.figures.terminal import lines
from swarm.errors import ExitCode, UserError
from swarm.ports import free_port
from tests.peer.test_alone import start  # noqa: F401  a fixture

KNOWN = {
    "step": 20, "samples": 40, "loss": 0.25, "validation_loss": 0.5, "learning_rate": 1e-3, "samples_per_second": 12.5, "round": 3, "committed": 6144, "peers": 2,
    "live_peers": 3, "swarm_samples_per_second": 30.0, "round_waiting": 512, "round_target": 2048, "sent_bytes": 3_000_000,
    "received_bytes": 2_000_000, "round_sent_bytes": 1_000_000, "round_received_bytes": 1_000_000, "transfer_seconds": 4.0,
    "share_lost": 0.125, "phase": "train", "note": "",
}  # fmt: skip
ABOUT = {"run": 'my "cats"', "run_id": "0123456789abcdef", "peer_id": "QmPeer"}


def scraped(port: int) -> dict:
    """(name, labels) -> value, as Prometheus' own parser reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples}


def test_prometheus_reads_every_figure_by_its_one_name():
    with exposed(lambda: KNOWN, ABOUT, host="127.0.0.1", port=0) as port:
        found = scraped(port)
    for metric in METRICS:
        assert found[(PREFIX + metric.name + ("_total" if metric.counts else ""),)] == KNOWN[metric.name]
    assert found["dd_peer_phase", ("dd_peer_phase", "train")] == 1 and found["dd_peer_phase", ("dd_peer_phase", "paused")] == 0
    assert found[("dd_peer_info", *sorted(ABOUT.items()))] == 1
    assert ("process_resident_memory_bytes",) in found


def test_what_is_not_known_is_not_said_and_no_text_of_others_is_a_label():
    with exposed(lambda: {"loss": None, "phase": "x" * 16, "note": "y"}, ABOUT, host="127.0.0.1", port=0) as port:
        found = scraped(port)
    ours = {key for key in found if key[0].startswith("dd_peer")}
    assert {key[0] for key in ours} == {"dd_peer_phase", "dd_peer_info"} and not any("x" * 16 in str(key) for key in ours)


def test_a_port_that_is_taken_is_one_line_that_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        there = {"host": "127.0.0.1", "port": taken.getsockname()[1]}
        with pytest.raises(UserError, match="cannot be served") as refused, exposed(dict, ABOUT, **there):
            raise AssertionError("two at one port")
    assert refused.value.code == ExitCode.NETWORK


def test_the_port_is_free_again_afterwards():
    with exposed(dict, ABOUT, host="127.0.0.1", port=0) as port:
        pass
    with exposed(dict, ABOUT, host="127.0.0.1", port=port) as again:
        assert again == port


@pytest.mark.parametrize(("total", "shown"), [(60000, "committed=21/60000"), (0, "committed=21")])
def test_a_plain_line_says_how_far_the_run_is_also_after_a_resume(tmp_path, caplog, total, shown):
    """A process that resumed has trained few of the run's samples itself."""
    progress = Progress(tmp_path / "metrics.jsonl", total_samples=lambda: total, every_steps=1, every_seconds=0)
    with contextlib.closing(progress), caplog.at_level("INFO", "peer.figures.metrics"):
        progress.stepped(step=21, samples=10, loss=0.5, committed=21)
    (line,) = caplog.messages
    assert line.startswith(f"training step=21 samples=10 {shown} loss=0.5000 ")


def test_metrics_jsonl_and_trackers_have_the_same_names(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = trackers.Trackers("tensorboard", tmp_path, "mine", {"run_name": "digits"})
    swarm = {name: value for name, value in KNOWN.items() if name not in NAMES[:9]}
    progress = Progress(tmp_path / "metrics.jsonl", total_samples=lambda: 100, every_steps=1, swarm=lambda: swarm, tell=told.log)
    progress.stepped(step=20, samples=4, loss=0.25, learning_rate=1e-3, round=3, committed=6144, peers=2)
    progress.measured(20, 0.5)
    progress.close()
    told.close()
    line, measured = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert set(line) | {"validation_loss"} == set(measured) == {"time", *NAMES} and measured["validation_loss"] == 0.5
    scalars = EventAccumulator(str(tmp_path / "mine")).Reload().Tags()["scalars"]
    assert set(scalars) == set(NAMES) - {"step"}


def test_a_run_exposes_what_it_writes(start, tmp_path):  # noqa: F811
    port = free_port()
    start(metrics_port=port).run()
    (line,) = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    found = scraped(port)  # until the fixture closes it
    assert found["dd_peer_loss",] == pytest.approx(line["loss"]) and found["dd_peer_samples_total",] == 60
    assert found["dd_peer_committed",] == 60


def drawn(values: dict, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(lines("my cats", values, 65536))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_the_display_says_how_far_the_run_and_its_round_are_and_what_the_link_does():
    run, following, figures, link = drawn(KNOWN)
    assert "6,656 of 65,536 (10%), about 32 min 42 s left" in run and run.startswith("my cats")
    assert following.startswith("round 4") and "512 of 2,048 (25%)" in following
    assert figures == "train 12.5 samples/s, loss 0.2500, validation 0.5000, 3 peers, step 20"
    assert link == "link sent 1 MB, received 1 MB in 4 s (2 Mbit/s), 12.5% of the time lost"


def test_the_display_promises_nothing_before_it_knows():
    assert drawn({}) == ["my cats 0 of 65,536 (0%)", ""]


def test_the_display_fits_and_obeys_no_stranger():
    rude = {**KNOWN, "note": "fetching \x1b[2J[red]" + "x" * 200, "phase": "catching_up"}
    shown = drawn(rude)
    assert max(map(len, shown)) <= 80 and "fetching \\x1b[2J[red]xxx" in shown[-1] and shown[2].startswith("catching up")


PROGRAM = """
import logging, os, subprocess, sys
from peer.figures.terminal import display, wanted
from swarm.logs import setup_logging
setup_logging(name="peer-1")
assert wanted("text") and not wanted("json")
log = logging.getLogger("peer.test")
values = {"committed": 5, "samples_per_second": 1.0, "loss": 0.5}
ends = [10]
with display("my cats", lambda: values, total_samples=lambda: ends[-1]):
    log.info("averaged round=%d state=[red]%s", 1, "ab")
    subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('from a child\\\\n')"])
    os.write(2, b"half\\rwhole line\\n")
    sys.stdin.readline()
    ends.append(50)  # the host extends the run
    sys.stdin.readline()
log.info("after it")
"""


def test_log_lines_run_above_the_display_those_of_children_too():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, env=environment
    )
    os.close(theirs)
    text, decode, deadline = "", codecs.getincrementaldecoder("utf-8")().decode, time.monotonic() + 60
    readable = select.poll()
    readable.register(ours, select.POLLIN)

    def read_until(words):
        nonlocal text
        while words not in text and time.monotonic() < deadline:
            if readable.poll(200):  # select() refuses a descriptor above 1,023, which a worker with many tests may be given
                try:
                    text += decode(os.read(ours, 65536))
                except OSError:  # the other end is closed
                    break
        assert words in text, text

    try:
        for words in ("averaged round=1 state=[red]ab", "from a child", "whole line", "5 of 10"):
            read_until(words)
        process.stdin.write(b"\n")
        process.stdin.flush()
        read_until("5 of 50")
        process.stdin.write(b"\n")
        process.stdin.close()
        read_until("after it")
        assert process.wait(30) == 0 and process.stdout.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(ours)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "half" not in plain and "Traceback" not in plain and plain.rstrip().endswith("peer.test: after it")
