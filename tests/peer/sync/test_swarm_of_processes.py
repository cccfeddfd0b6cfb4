"""Processes that die: trainers, sidecars, p2pd. Real ones, killed with SIGKILL, on loopback."""

import contextlib
import json
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from peer.contracts import Member, SyncReport
from peer.sync.engine.state import first_state, next_state
from peer.sync.engine.trainer import sidecar_process, swarm_sync
from peer.sync.engine.trainer.messages import Done, Freeze, Rebase
from peer.sync.engine.trainer.port import Port
from peer.sync.engine.vectors import flatten
from scripts.churn.checks import read_rounds
from tests.peer.sync.toy_peer import build
from tests.warm import Warm

pytestmark = pytest.mark.swarm
ROOT = Path(__file__).resolve().parents[3]
WAIT_SECONDS = 100.0
ORPHAN_SECONDS = 60.0
"""A process without its parent ends at once, or never."""


PARTS = {"sidecar": "peer.sync.engine.trainer.sidecar", "p2pd": "hivemind_cli/p2pd"}
"""Of a peer, and what is in their command lines."""


class Toy:
    """A toy peer's process: its log, what it said, its rounds."""

    def __init__(self, folder: Path, *arguments: str, strategy: str = "parameters", sidecars: int = 1, **options):
        self.folder, self._log = folder, folder.with_suffix(".log")
        self._failpoints = folder.with_suffix(".failpoints")
        words = ["-m", "tests.peer.sync.toy_peer", folder, strategy, *arguments, *(f"--{name}={value}" for name, value in options.items())]
        self.process = Warm(words, ROOT, self._log, failpoints=self._failpoints, sidecars=sidecars)

    @property
    def log(self) -> str:
        """Of it, of those of its name before it, and of their sidecars."""
        return self._log.read_text()

    @property
    def lines(self) -> list[dict]:
        """What it said."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def family(self, part: str = "") -> list[psutil.Process]:
        """Living descendants, or those of them that are such a part of a peer."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if PARTS.get(part, "") in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                        found.append(child)
        return found

    def shared_buffers(self) -> int:
        """How many states and contributions its processes hold in memory, each counted once."""
        found = set()
        for process in [psutil.Process(self.process.pid), *self.family()]:
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                found |= {line.split()[4] for line in maps.splitlines() if "/memfd:swarm" in line}
        return len(found)

    def maddr(self) -> str:
        pattern = re.compile(r"--peers (/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+)")
        until(lambda: pattern.search(self.log), self)
        return pattern.findall(self.log)[-1]

    def has_met(self, other: "Toy") -> bool:
        """Whether it has written down where the other one is now, which that one says once somebody has dialled it."""
        path = self.folder / "peers_met.json"
        return path.exists() and other.maddr() in path.read_text()

    def rounds(self) -> list[dict]:
        return read_rounds(self.folder)

    def round(self) -> int:
        return max((line["round"] for line in self.rounds()), default=0)

    def arm(self, what: str):
        """Let it fail at a failpoint, once; `armed` until it has."""
        self._failpoints.write_text(what)

    def armed(self) -> bool:
        return bool(self._failpoints.exists() and self._failpoints.read_text())

    def stop(self) -> None:
        """Ask it to leave in order."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_SECONDS)

    def end(self) -> dict:
        """Wait for its end; what it said last."""
        assert self.process.wait(WAIT_SECONDS) == 0, self.log
        return self.lines[-1]


def until(true, *toys: Toy, seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain\n" + "\n".join(toy.log[-3000:] for toy in toys)
        time.sleep(0.05)


@pytest.fixture
def toys(tmp_path):
    started: list[Toy] = []

    def start(name: str, *arguments: str, **options) -> Toy:
        started.append(Toy(tmp_path / name, *arguments, **options))
        return started[-1]

    yield start
    family = [child for toy in started for child in toy.family()]
    for toy in started:
        toy.kill()
    _, alive = psutil.wait_procs(family, timeout=ORPHAN_SECONDS)
    assert not alive, f"orphans: {[child.cmdline() for child in alive]}"


def assert_one_lineage(*peers: Toy) -> None:
    """Whoever made or took over the state after one parent and group has the same digest."""
    digests = {}
    for peer in peers:
        for line in peer.rounds():
            group = (line["parent"], json.dumps(line["members"]))
            assert digests.setdefault(group, line["digest"]) == line["digest"]


OVERLAP = {"overlap": 1, "seconds": 0.05}


def test_two_peers_come_to_the_runs_end_with_one_state_and_say_what_became_of_every_sample(toys):
    """Of `gradients`, whose trainer hands over what others keep; every strategy with and without overlap: tests/simulation/test_scenarios.py."""
    one = toys("one", strategy="gradients", total=128, min_peers=2)  # else it is at the end before the other one has started
    two = toys("two", one.maddr(), strategy="gradients", total=128, min_peers=2)
    ends = [one.end(), two.end()]
    for peer, end in zip((one, two), ends, strict=True):
        assert end["done"] and end["finite"] and end["samples"] >= 128
        assert end["trained"] == end["final"] + end["dropped"] and end["waiting"] == 0, (end, peer.log)
        final = [line for line in peer.lines if line["event"] == "committed_round"]
        assert [line["round"] for line in final] == list(range(1, end["round"] + 1))
        assert sum(line["samples"] for line in final) == end["samples"]
    assert one.rounds()[-1]["digest"] == two.rounds()[-1]["digest"] and ends[0]["checksum"] == ends[1]["checksum"]
    assert_one_lineage(one, two)


def test_the_contract_holds_without_a_swarm(toys):
    end = toys("one", strategy="none", total=256, seconds=0).end()
    assert end["done"] and end["final"] == end["trained"] == end["samples"] == 256


def test_a_joiner_whose_sidecar_dies_after_the_peer_it_came_by_goes_on_and_meets_it_again(toys):
    """With overlap: while it is not sure yet that it is alone, it trains two rounds of 64 and no more."""
    founder = toys("founder", host="/ip4/127.0.0.1/tcp/0", **OVERLAP)
    joiner = toys("joiner", founder.maddr(), **OVERLAP)
    until(lambda: min(founder.round(), joiner.round()) >= 1 and list((founder.folder / "state").glob("*.state")), founder, joiner)
    came_by, family = founder.maddr(), founder.family()
    assert len(family) == 2 and any("p2pd" in " ".join(child.cmdline()) for child in family)
    founder.kill()
    _, alive = psutil.wait_procs(family, timeout=ORPHAN_SECONDS)
    assert not alive, "a killed trainer leaves no process behind"
    states = {int(path.name.split("-")[3]) for path in (founder.folder / "state").glob("*.state")}
    joiner.family("sidecar")[0].kill()
    until(lambda: "none of the peers met before answers" in joiner.log, joiner)
    at = joiner.round()
    until(lambda: joiner.round() > at + 1, joiner)
    port = came_by.split("/tcp/")[1].split("/")[0]
    again = toys("founder", host=f"/ip4/127.0.0.1/tcp/{port}", **OVERLAP)
    until(lambda: any(line["how"] == "averaged" and line["round"] > at + 1 for line in joiner.rounds()), joiner, again)
    assert f"going on from round={max(states)} " in again.log
    assert_one_lineage(joiner, again)
    joiner.stop()
    end = joiner.end()
    assert end["most_waiting"] == 128 and end["overlapped"] > 0
    assert end["trained"] == end["final"] + end["dropped"] and end["waiting"] == 0, (end, joiner.log)


@pytest.fixture
def silent(monkeypatch):
    """Sidecars of this process say nothing: what they say is said by the test."""
    ports = []

    def spawn():
        port, theirs = Port.pair()
        ports.append(theirs)
        return subprocess.Popen(["sleep", "600"], start_new_session=True), port

    monkeypatch.setattr(sidecar_process, "_spawn", spawn)
    monkeypatch.setattr(sidecar_process, "CLOSE_SECONDS", 0.0)
    yield
    for port in ports:
        port.close()


def test_who_is_in_no_hurry_waits_for_the_runs_last_state_while_that_is_on_its_way(tmp_path, silent, caplog):
    """Seen in the code: the server had ended the run, so the data ended, and a peer exported the state before the last one."""
    _, sync = build(tmp_path / "out", "parameters", [], {"total": "64"})
    now = [0.0]
    try:
        sync._clock = lambda: now[0]
        sync._exchange = lambda seconds: None
        state = sync._work.state
        sync._hear(Rebase(state.digest, state.header.to_json(), state.buffer))
        sync.seen = {"phase": "catching_up"}
        for now[0] in range(0, 60, 10):
            assert sync.leave(hurry=False).wait, "four times as long as without that sign"
        sync.seen = {"phase": "train", "round_target": 2, "round_waiting": 5}
        for now[0] in range(60, 120, 10):
            assert sync.leave(hurry=False).wait, "another peer has what the last round takes (seed 17000455)"
        sync.seen = {"phase": "train"}
        now[0] += swarm_sync.LAST_STATE_SECONDS - 1
        assert sync.leave(hurry=False).wait
        now[0] += 2
        assert "ends with" not in caplog.text and not sync.leave(hurry=False).wait
        assert "this peer ends with 0 of the run's 64 samples" in caplog.text
        caplog.clear()
        for cut_short in (lambda: sync.leave(hurry=True), lambda: sync._hear(Done())):
            sync._leaving = None
            assert sync.leave(hurry=False).wait
            cut_short()
            assert not sync.leave(hurry=False).wait
        assert "ends with" not in caplog.text
    finally:
        sync.close()


def test_a_resumed_peer_stands_on_the_swarms_state_and_not_on_its_checkpoint(tmp_path, silent):
    """Seen in the code: in a run's first eight rounds it landed on that state PLUS all that the run had learned until the checkpoint, and
    what had been trained beyond a state counted as trained though no contribution held it."""
    params, sync = build(tmp_path / "out", "parameters", [], {})
    base = flatten(params, torch.empty(10_007))
    sync.step(8)
    sync._hear(Freeze())
    assert sync.step(8).frozen == 1
    books = sync.state_dict()
    sync.close()

    params, sync = build(tmp_path / "out", "parameters", [], {})
    try:
        for parameter in params.values():
            parameter.data.add_(1.0)  # the checkpoint's
        assert sync.load_state_dict(books) == SyncReport(final=(1,), dropped=(0,))
        run = sync._context.run.digest
        start = first_state(run, sync._schema.digest, base, 0)
        state = next_state(start, [[base + 0.5]], [Member("QmOther", 1, 64)])
        sync._hear(Rebase(state.digest, state.header.to_json(), state.buffer))
        assert torch.equal(flatten(params, torch.empty(10_007)), base + 0.5)
    finally:
        sync.close()


def test_sidecars_and_a_p2pd_that_die_or_hang_are_started_again_and_who_leaves_says_what_became_of_every_sample(toys):
    founder = toys("founder", min_peers=2, wire="fp16", sidecars=3)
    joiner = toys("joiner", founder.maddr(), min_peers=2, wire="fp16", silent=8, sidecars=2)  # its third is a fresh interpreter
    other = toys("other", founder.maddr(), wire="fp16", rows=50)
    until(lambda: min(founder.round(), joiner.round()) >= 1, founder, joiner)
    assert other.process.wait(WAIT_SECONDS) == 2
    assert "error: The peers of this run train other tensors" in other.log and "Traceback" not in other.log
    # The founder was given no address of anybody: it must remember whom it met.
    until(lambda: founder.has_met(joiner), founder, joiner)
    for victim, process in ((founder, "sidecar"), (joiner, "p2pd")):
        victim.family(process)[0].kill()
        until(lambda victim=victim: "starting it again" in victim.log, founder, joiner)
        at = max(founder.round(), joiner.round())
        until(lambda v=victim, at=at: any(line["how"] == "averaged" and line["round"] > at + 1 for line in v.rounds()), founder, joiner)
        # A new sidecar listens at a new port. Who is killed before it has heard of that, two rounds of 0.1 s later, knows nobody any more.
        other = joiner if victim is founder else founder
        until(lambda v=victim, other=other: other.has_met(v), founder, joiner)
    # SIGSTOP: all is open, nothing answers. (That p2pd hangs the sidecar finds out by a real call: tests/swarm/test_dht.py.)
    hung = joiner.family("sidecar")[0]
    hung.suspend()
    until(lambda: "does not answer any more" in joiner.log and not hung.is_running(), founder, joiner)
    at = max(founder.round(), joiner.round())
    until(lambda: any(line["how"] == "averaged" and line["round"] > at + 1 for line in joiner.rounds()), founder, joiner)
    # Between two contributions: the state, the last contribution's memory, which the next one takes, and nothing of the past.
    until(lambda: founder.shared_buffers() == 2, founder)
    joiner.stop()
    end = joiner.end()
    assert end["trained"] == end["final"] + end["dropped"] and end["waiting"] == 0, (end, joiner.log)
    assert end["off_the_state"] == 0.0, "it exports the swarm's state itself, without what the codec left over"
    assert_one_lineage(founder, joiner)
    assert "averaging sends and receives up to" in founder.log and "% of the time is lost to rounds" in founder.log
    founder.family("sidecar")[0].kill()
    at = founder.round()
    until(lambda: founder.round() > at + 1, founder)  # in company it was once: --min_peers is not asked for again


FAILPOINTS_OF_PROCESSES = {"half_of_parts_sent": "stop 4", "rebased": "kill"}
"""At which a sidecar is stopped and a trainer killed; all others, and these, are the simulator's (fault `point`)."""


@pytest.mark.timeout(900)
def test_a_process_stopped_or_killed_at_a_point_stops_nobody_and_comes_back(toys):
    """The victim keeps its state on disk, where it leaves nothing behind when it is killed; it comes back with its state in memory."""
    one = toys("one", min_peers=3)
    two, victim = toys("two", one.maddr(), min_peers=3), toys("victim", one.maddr(), min_peers=3, state_on="disk")
    until(lambda: min(one.round(), two.round(), victim.round()) >= 1, one, two, victim)
    in_memory = victim.shared_buffers()
    for point, action in FAILPOINTS_OF_PROCESSES.items():
        victim.arm(f"{point} {action}")
        until(lambda victim=victim: not victim.armed(), victim)
        at = max(one.round(), two.round())
        until(lambda at=at: min(one.round(), two.round()) >= at + 2, one, two)
        if action == "kill":
            assert not in_memory, "all that it shares with its sidecar is on disk"
            until(lambda victim=victim: victim.process.poll() is not None, victim)
            assert {path.suffix for path in (victim.folder / "state").iterdir() if path.is_file()} <= {".state", ".tmp", ".json"}
            victim = toys("victim", one.maddr())
        at = max(one.round(), two.round())
        until(lambda v=victim, at=at: any(line["how"] == "averaged" and line["round"] > at for line in v.rounds()), one, two, victim)
    assert_one_lineage(one, two, victim)
    for toy in (one, two, victim):
        toy.stop()
    for toy in (one, two, victim):
        end = toy.end()
        assert end["trained"] == end["final"] + end["dropped"] and end["waiting"] == 0, (end, toy.log)


def test_a_trainer_killed_while_its_sidecar_joins_leaves_no_process_behind(toys):
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    one = toys("one", nobody)
    until(lambda: "joining failed" in one.log or one.family("p2pd"), one)
    family = one.family()
    one.kill()
    _, alive = psutil.wait_procs(family, timeout=ORPHAN_SECONDS)
    assert not alive
