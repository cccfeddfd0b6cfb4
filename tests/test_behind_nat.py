"""Volunteers whom nobody can dial, each behind a router of its own, and one public peer that assists: real processes in namespaces."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.churn.checks import read_rounds
from swarm.run_config import RunConfig
from tests import natted
from tests.warm import Warm

ROOT = Path(__file__).resolve().parent.parent
RUN = RunConfig(model="x", target_batch_size=256, wire="fp32")
"""Of 3 s for one volunteer alone: a round of 64 samples is over before its record is read by the other one."""
WAIT_SECONDS = 240.0

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(900)]


class Process:
    """A program on one host of the network, and what it logged."""

    def __init__(self, namespace: str, *words: object, folder: Path):
        self.folder, self._log = folder, folder.with_suffix(".log")
        self.process = Warm(words, ROOT, self._log, namespace=namespace)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def story(self) -> str:
        """Of its log what tells why it averaged with nobody, and the end."""
        told = [line for line in self.log.splitlines() if re.search("leaving out|not averaged|not led|closed without|no answer|dial this", line)]
        return "\n".join([*told[:30], "...", self.log[-1000:]])

    def rounds(self) -> list[dict]:
        return read_rounds(self.folder)

    def round(self) -> int:
        return max((line["round"] for line in self.rounds()), default=0)

    def stop(self) -> None:
        """Ask it to leave in order."""
        self.process.send_signal(signal.SIGTERM)

    def status(self) -> int:
        """How it ended, once it has."""
        return self.process.wait(WAIT_SECONDS)

    def end(self) -> list[psutil.Process]:
        """Kill what is left; returns it with its family."""
        family = []
        if self.process.poll() is None:
            family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
            self.process.kill()
            self.status()
        return family


@pytest.fixture
def network():
    """Two homes and one public host."""
    if reason := natted.missing():
        pytest.skip(reason)
    with natted.NattedNetwork(homes=2) as network:
        yield network


@pytest.fixture
def start(network, tmp_path):
    """`start(host, name, *words)`: a program of ours on a host; all that it started has ended afterwards."""
    started: list[Process] = []

    def run(host: str, name: str, *words: object) -> Process:
        started.append(Process(network.namespace(host), *words, folder=tmp_path / name))
        return started[-1]

    yield run
    family = [child for process in started for child in process.end()]
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, f"orphans: {[child.cmdline() for child in alive]}"


@pytest.fixture
def address(network, tmp_path):
    """Of the host's own node, which knows the run."""
    command, log = [*network.prefix("public"), sys.executable, "-m", "datasetserver.bootstrap"], tmp_path / "bootstrap.log"
    with log.open("w") as output:
        host = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=output, text=True)
    options = {"host_maddrs": ["/ip4/0.0.0.0/tcp/31337"], "announce_maddrs": [], "identity_path": str(tmp_path / "bootstrap.key")}
    pattern = re.compile(rf"/ip4/{re.escape(natted.PUBLIC)}/tcp/31337/p2p/\w+")
    with host:
        host.stdin.write(json.dumps({**options, "run_id": RUN.run_id, "run": RUN.to_mapping(), "url": ""}) + "\n")
        host.stdin.flush()
        until(lambda: pattern.search(log.read_text()))
        yield pattern.search(log.read_text())[0]
        host.terminate()


def until(true, *processes: Process) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, "waited in vain\n" + "\n".join(process.story() for process in processes)
        time.sleep(0.05)


def test_volunteers_behind_nat_average_through_one_who_assists_and_find_their_state_again(start, address, tmp_path):
    def volunteer(home: str, name: str) -> Process:
        options = "--host=/ip4/0.0.0.0/tcp/0", f"--target={RUN.target_batch_size}"
        return start(home, name, "-m", "tests.peer.sync.toy_peer", tmp_path / name, "parameters", address, *options)

    one, two = volunteer("home1", "one"), volunteer("home2", "two")

    def assistant(host: str, name: str) -> Process:
        options = "--peers", address, "--output_dir", tmp_path / name, "--host_maddrs", "/ip4/0.0.0.0/tcp/0"
        return start(host, name, "peer/finetune.py", "--assist", *options)

    helper, undialled = assistant("public", "helper"), assistant("home1", "undialled")

    def together(peer: Process) -> int:
        return sum(len(line["members"]) == 2 and line["how"] == "averaged" for line in peer.rounds())

    until(lambda: min(together(one), together(two)) >= 2, one, two, helper)
    for peer in (one, two):
        assert "client mode, because others cannot dial this peer: " in peer.log
    for peer in (one, two):
        peer.stop()
    for peer in (one, two):
        assert peer.status() == 0, peer.log
    assert all(helper.process.poll() is None and '"ended"' in peer.log for peer in (one, two))
    last = max((line for peer in (one, two) for line in peer.rounds()), key=lambda line: line["samples"])
    # It may commit a moment after those who left.
    until(lambda: any(line["digest"] == last["digest"] for line in helper.rounds()[-1:]), helper)
    until(lambda: list((helper.folder / "settled").glob(f"round-{last['round']:08d}-*-{last['digest'][:12]}.state")), helper)

    new = volunteer("home1", "new")  # it brings no state, and nobody else is there
    until(lambda: new.round() >= last["round"] + 2, new, helper)
    first = new.rounds()[0]
    assert (first["how"], first["round"], first["digest"]) == ("fetched", last["round"], last["digest"])
    assert all(line["how"] == "averaged" and len(line["members"]) == 1 for line in new.rounds()[1:])
    for peer in (new, helper):
        peer.stop()
        assert peer.status() == 0, peer.log

    digests = {}
    for peer in (one, two, new, helper):
        for line in peer.rounds():
            group = (line["parent"], json.dumps(line["members"]))
            assert digests.setdefault(group, line["digest"]) == line["digest"]
    assert not any(line["peer"] in [member[0] for member in line["members"]] for line in helper.rounds())

    assert undialled.status() == 6, "who cannot be dialled cannot assist"
    assert "error: An assisting peer must be one that others can dial; they cannot dial this one." in undialled.log
