"""A swarm on this machine: a dataset server and peers that know no more than its URL, watched until the run's samples are committed.

Nothing here is special to one machine: the same commands, with the server's address in place of 127.0.0.1, make a swarm over the internet.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.attacks.rows import ROWS
from scripts.demo import processes, results
from scripts.demo.display import Display
from scripts.demo.processes import Program
from swarm.errors import ExitCode, UserError
from swarm.lifeline import adopt_orphans

ROOT = Path(__file__).resolve().parents[2]
JOIN_AFTER_ROUND = 2
START_SECONDS = 300
LEAVE_SECONDS = 60


@dataclass(frozen=True)
class Plan:
    """What to run; `folder` holds `dataset/` and `base/` already."""

    folder: Path
    peers: int = 2
    total_samples: int = 65_536
    target_batch_size: int = 2048
    port: int = 0
    churn: bool = False
    strangers: tuple[str, ...] = ()
    """Rows of `scripts/strangers`, one attacker each. The run is then for members, and they are none."""
    batch: int = 32
    """Samples per local step."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's options where they are not the quickstart's."""
    peer_flags: tuple[str, ...] = ()
    first_peer_flags: tuple[str, ...] = ()
    """Besides, of the first peer alone."""
    core_each: bool = False
    """Every peer has one core, with all its processes."""
    in_turn: bool = False
    """Each peer starts once others can join the one before it."""
    stall_seconds: float = 300.0
    """Without a round for this long, the run has failed."""


@dataclass
class Story:
    """What happened, as seen from outside of the peers."""

    seconds_training: float = 0.0
    peak_memory_gib: float = 0.0
    joined_at_round: int | None = None
    killed_peer: str | None = None
    killed_at_round: int | None = None
    strangers_at_round: int | None = None
    strangers: list[str] = field(default_factory=list)
    """Their peer ids."""
    processes_left: list[str] = field(default_factory=list)


def run_settings(plan: Plan) -> str:
    """The run's TOML file: what all peers agree on. The server hands it to them."""
    values = {
        "run_name": "quickstart",
        "model": str(plan.folder / "base"),
        "total_samples": plan.total_samples,
        "target_batch_size": plan.target_batch_size,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "resolution": 16,
        "center_crop": True,
        "random_flip": False,
        "ucg": 0.1,
        **plan.settings,
    }
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())  # for these types JSON is TOML


class SwarmRun:
    """The programs of one plan. Use as a context manager: on the way out every program is ended, whatever happened."""

    def __init__(self, plan: Plan, display: Display):
        self.plan, self.display, self.story = plan, display, Story()
        self.peers: dict[str, Program] = {}
        self._server: Program | None = None
        self._strangers: list[Program] = []
        self._url = ""
        self._began = self._looked = self._advanced = time.monotonic()
        self._round = 0

    def __enter__(self) -> "SwarmRun":
        adopt_orphans()
        return self

    def __exit__(self, *_: object) -> None:
        programs = [*self._strangers, *self.peers.values(), *([self._server] if self._server else [])]
        self.story.processes_left += processes.end_all(programs)

    def run(self) -> Story:
        """Start everything, watch it to the end, and stop the server. Raises UserError when something ends too early or stands still."""
        self._start_server()
        self._began = self._advanced = time.monotonic()
        for number in range(self.plan.peers):
            self._start_peer(number + 1)
            while self.plan.in_turn and not self.peers[f"peer-{number + 1}"].address():
                self._watch()
                time.sleep(0.25)
        while not self._all_left():
            self._watch()
            time.sleep(0.25)
        self.story.seconds_training = round(time.monotonic() - self._began, 1)
        self._send_strangers_away()
        self._stop_server()
        return self.story

    def held(self) -> dict[str, list[dict[str, Any]]]:
        """What each peer, a killed one too, wrote about the states that it held."""
        return {name: results.read_lines(self.plan.folder / name / "rounds.jsonl") for name in self.peers}

    def _start_server(self) -> None:
        folder = self.plan.folder
        (folder / "run.toml").write_text(run_settings(self.plan), encoding="utf-8")
        command = [sys.executable, "-m", "datasetserver", "--dataset", str(folder / "dataset"), "--config", str(folder / "run.toml")]
        command += ["--work_dir", str(folder / "server"), "--port", str(self.plan.port), "--shard_samples", "64"]
        command += ["--members", "yes"] if self.plan.strangers else []
        self._server = Program("server", command, folder / "logs" / "server.log", {}, ROOT)
        self._url = self._wait_for_url(time.monotonic() + START_SECONDS)
        self.display.say(f"dataset server at {self._url}")

    def _wait_for_url(self, deadline: float) -> str:
        assert self._server is not None
        while time.monotonic() < deadline:
            for line in self._server.last_words(100).splitlines():
                if line.startswith("serving http"):
                    return line.split()[1]
            if self._server.ended() is not None:
                raise _failed(self._server)
            time.sleep(0.1)
        raise UserError(f"The dataset server did not start within {START_SECONDS} s.", fix=f"See {self._server.log}.")

    def _start_peer(self, number: int) -> None:
        name = f"peer-{number}"
        cores = sorted(os.sched_getaffinity(0))
        threads = 1 if self.plan.core_each else max(1, len(cores) // self.plan.peers)
        # torchrun itself would listen on one fixed port; --standalone lets several on one machine choose free ones.
        command = ["taskset", "--cpu-list", str(cores[(number - 1) % len(cores)])] if self.plan.core_each else []
        command += [
            str(Path(sys.executable).with_name("torchrun")),
            "--standalone",
            "--nproc_per_node=1",
            str(ROOT / "peer" / "finetune.py"),
        ]
        command += ["--datasetserver", self._url, "--output_dir", str(self.plan.folder / name)]
        command += ["--train_batch_size", str(self.plan.batch), "--num_threads", str(threads), *self.plan.peer_flags]
        command += self.plan.first_peer_flags if number == 1 else ()
        env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self.peers[name] = Program(name, command, self.plan.folder / "logs" / f"{name}.log", env, ROOT)
        self.display.say(f"{name} started with nothing but that address")

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._looked >= 2:
            self._looked = now
            self.story.peak_memory_gib = max(self.story.peak_memory_gib, round(processes.memory_gib(), 2))
        assert self._server is not None
        for program in [self._server, *self._living()]:
            if program.ended():
                raise _failed(program)
        for stranger in self._strangers:
            if stranger.ended() is not None:
                raise _failed(stranger)
        if progress := self._progress():
            self.display.show(progress)
        number = max((lines[-1]["round"] for lines in self.held().values() if lines), default=0)
        if number > self._round:
            self._round, self._advanced = number, now
        if self.plan.churn:
            self._stir()
        if self.plan.strangers and not self._strangers and self._round:
            self._let_strangers_come()
        if now - self._advanced > self.plan.stall_seconds:
            raise UserError(
                f"No round was committed for {self.plan.stall_seconds:.0f} s.", fix=f"See the logs in {self.plan.folder / 'logs'}."
            )

    def _stir(self) -> None:
        """The harder story: a peer comes late, and once it has taken part in a round the first one is killed."""
        late, first = f"peer-{self.plan.peers + 1}", "peer-1"
        if late not in self.peers and self._round >= JOIN_AFTER_ROUND:
            self.story.joined_at_round = self._round
            self._start_peer(self.plan.peers + 1)
        elif late in self.peers and self.story.killed_peer is None and self.peers[first].ended() is None:
            held = self.held()
            caught_up = results.first_round_with(late, held)
            # Not in the midst of a commit, when the first peer alone may hold the new state: this story is of a peer lost, not of a round.
            if caught_up is not None and results.in_step(self.peers, held, caught_up):
                self.peers[first].kill_tree()
                self.story.killed_peer, self.story.killed_at_round = first, self._round
                self.display.say(f"{late} has caught up (in round {caught_up}); {first} was killed with SIGKILL")

    def _let_strangers_come(self) -> None:
        """Each learns one peer's address, as anybody could who has seen it, and nothing else."""
        folder, address = self.plan.folder, self.peers["peer-1"].address()
        if not address:
            return
        self.story.strangers_at_round = self._round
        for row in self.plan.strangers:
            command = [sys.executable, "-m", "scripts.attacks.stranger", row, str(folder / "strangers" / row), "--address", address]
            self._strangers.append(
                Program(row, [*command, "--seconds", "86400"], folder / "logs" / f"{row}.log", {"OMP_NUM_THREADS": "1"}, ROOT)
            )
            self.display.say(f"a stranger comes who knows the address of peer-1, and {ROWS[row].does}")

    def _send_strangers_away(self) -> None:
        for program in self._strangers:
            self.story.strangers += [peer for line in processes.said(program) if line.get("event") == "came" for peer in line["peers"]]
            program.kill_tree()

    def _living(self) -> list[Program]:
        return [program for name, program in self.peers.items() if name != self.story.killed_peer]

    def _all_left(self) -> bool:
        return all(program.ended() == 0 for program in self._living())

    def _progress(self) -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(f"{self._url}/v1/progress", timeout=2) as answer:
                return json.load(answer)
        except (OSError, ValueError, urllib.error.URLError):
            return None

    def _stop_server(self) -> None:
        assert self._server is not None
        self._server.terminate()
        if self._server.wait(LEAVE_SECONDS) != 0:
            raise _failed(self._server)
        self.story.processes_left += processes.names(processes.settle(LEAVE_SECONDS))


def _failed(program: Program) -> UserError:
    """What is known of a program that ended too early: the one line of its own error, or its last words."""
    errors = [line for line in program.last_words(1000).splitlines() if line.startswith("error: ")]
    words = errors[-1].removeprefix("error: ") if errors else "its last words: " + program.last_words(3)
    return UserError(
        f"{program.name} ended with status {program.ended()}: {words}", fix=f"See all of its log: {program.log}", code=ExitCode.FAILED
    )
