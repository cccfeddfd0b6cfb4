"""scripts/launch_cluster on hosts of this machine: without ssh, and over an sshd of our own on two loopback addresses."""

import importlib.machinery
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from swarm.ports import free_port
from tests.conftest import ROOT

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else "")
PATIENCE_SECONDS = 240

RANK = """
import os, subprocess, sys, time
what = sys.argv[1]
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "local", os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"], os.environ.get("DD_X"))
print("threads", os.environ["OMP_NUM_THREADS"], flush=True)
if what == "fail" and os.environ["RANK"] == "1":
    sys.exit(7)
if what != "end":
    child = subprocess.Popen(["sleep", sys.argv[2]])
    print("sleeping", flush=True)
    child.wait()
"""


@pytest.fixture(scope="module")
def launch_cluster():
    loader = importlib.machinery.SourceFileLoader("launch_cluster", str(ROOT / "scripts" / "launch_cluster"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def start(tmp_path):
    """`start(hosts, *arguments, ssh="ssh")`: the launcher as a process, with a rank's program that does as told."""
    started = []

    def start(hosts, *arguments, ssh="ssh", program=None, flags=()):
        (tmp_path / "hosts").write_text("\n".join(hosts), encoding="utf-8")
        (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
        command = [sys.executable, ROOT / "scripts" / "launch_cluster", tmp_path / "hosts", "--python", sys.executable, "--ssh", ssh]
        command += ["--program", program or tmp_path / "rank.py", *arguments, "--", *flags]
        env = {**os.environ, "DD_X": "passed on", "LD_PRELOAD": ""}
        started.append(subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.stdout.close()
        process.wait()


def told(process) -> str:
    return process.communicate(timeout=PATIENCE_SECONDS)[0]


def wait_until(true, what):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def sleepers(mark: str) -> list[psutil.Process]:
    """Processes whose command line ends in `mark`: the ranks, their watchers and what they started."""
    return [process for process in psutil.process_iter(["cmdline"]) if (process.info["cmdline"] or [""])[-1] == mark]


@pytest.fixture
def mark():
    """Seconds that nobody else sleeps, to find the processes of this test."""
    mark = f"98{os.getpid()}.{time.monotonic_ns() % 1_000_000_000}"
    yield mark
    for process in sleepers(mark):
        process.kill()


def test_a_host_file_is_read_as_each_mpirun_writes_it(launch_cluster, tmp_path):
    (tmp_path / "hosts").write_text("localhost  # rank 0\n\nubuntu@node1:2\nnode2 slots=4 max_slots=8\nnode3\nnode3\n")
    assert launch_cluster.read_hosts(tmp_path / "hosts") == [("localhost", 1), ("ubuntu@node1", 2), ("node2", 4), ("node3", 2)]
    for bad in ("# nothing", "-oProxyCommand=x", "node1 two"):
        (tmp_path / "hosts").write_text(bad)
        with pytest.raises(launch_cluster.Refused):
            launch_cluster.read_hosts(tmp_path / "hosts")
    with pytest.raises(launch_cluster.Refused, match="cannot be read"):
        launch_cluster.read_hosts(tmp_path / "missing")


def test_rank_0_is_met_at_the_address_that_ssh_used(launch_cluster):
    there = {"ssh": ["10.0.0.1", "50000", "10.0.0.2", "22"]}
    assert launch_cluster.master_address([("node1", 1)], {"node1": there}) == "10.0.0.2"
    assert launch_cluster.master_address([("localhost", 1), ("node1", 1)], {"localhost": {"ssh": []}, "node1": there}) == "10.0.0.1"
    assert launch_cluster.master_address([("localhost", 2)], {"localhost": {"ssh": []}}) == "127.0.0.1"


def test_ranks_run_with_their_environment_and_a_prefix(start):
    process = start(["localhost"], "--ppn", "2", flags=["end"])
    words = told(process)
    assert process.returncode == 0, words
    for rank in range(2):
        assert f"localhost:{rank} | rank {rank} of 2 local {rank} 127.0.0.1 passed on\n" in words
    assert "threads" in words


def test_a_rank_that_fails_ends_the_others_and_what_they_started(start, mark):
    process = start(["localhost:2"], flags=["fail", mark])
    words = told(process)
    assert process.returncode == 7 and "localhost:1 ended with exit status 7; ending the others" in words
    wait_until(lambda: not sleepers(mark), "no orphan")


@pytest.mark.parametrize("deadly", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_launcher_ends_no_rank_outlives_it(start, mark, deadly):
    process = start(["localhost:2"], flags=["sleep", mark])
    for line in process.stdout:
        if "sleeping" in line:
            break
    assert sleepers(mark)
    process.send_signal(deadly)
    assert process.wait(PATIENCE_SECONDS) == (-deadly if deadly == signal.SIGKILL else 130)
    wait_until(lambda: not sleepers(mark), "no orphan")


def test_a_signal_between_a_lock_of_popens_and_its_release_ends_the_ranks_too(launch_cluster, monkeypatch):
    """Seen once: an exception that was raised there left the lock taken, and the launcher waited for ever for a rank that had ended."""
    ours, poll = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], subprocess.Popen._internal_poll
    before, sent = [signal.getsignal(number) for number in ours], []

    def interrupted(self, *args, **options):
        if not sent:
            sent.append(self._waitpid_lock.acquire())
            os.kill(os.getpid(), signal.SIGTERM)
            self._waitpid_lock.release()
        return poll(self, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "_internal_poll", interrupted)
    try:
        assert launch_cluster.run([("localhost", ["sh", "-c", "cat > /dev/null"])]) == 130 and sent
    finally:
        for number, handler in zip(ours, before, strict=True):
            signal.signal(number, handler)


def test_a_host_without_our_python_is_named(start):
    process = start(["localhost"], "--python", "/nowhere/python", flags=["end"])
    words = told(process)
    assert (
        process.returncode == 2 and words.startswith(f"error: localhost lacks what is needed at {ROOT} (") and len(words.splitlines()) == 1
    )


@pytest.fixture
def ssh(tmp_path):
    """The command of an ssh client for our own sshd on 127.0.0.1 and 127.0.0.2."""
    if not SSHD:
        pytest.skip("no sshd on this machine")
    for key in ("host", "own"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / key], check=True)
    port = free_port()
    options = [
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        "ListenAddress 127.0.0.2",
        f"HostKey {tmp_path}/host",
        "StrictModes no",
        "UsePAM no",
    ]
    options += [f"AuthorizedKeysFile {tmp_path}/own.pub", "PidFile none", "PasswordAuthentication no"]
    (tmp_path / "sshd_config").write_text("\n".join([*options, ""]))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd started by root insists on it
    with (tmp_path / "sshd.log").open("w") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", tmp_path / "sshd_config"], stderr=log)
    flags = (
        f"-p {port} -i {tmp_path}/own -o StrictHostKeyChecking=no -o UserKnownHostsFile={tmp_path}/known -o LogLevel=ERROR -o BatchMode=yes"
    )
    client = f"ssh -F none {flags}"
    try:
        wait_until(lambda: subprocess.run([*client.split(), "127.0.0.2", "true"]).returncode == 0, (tmp_path / "sshd.log").read_text())
        yield client
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
def test_hosts_are_reached_over_ssh_and_the_smoke_passes_on_them(start, ssh):
    port = free_port()
    process = start(["127.0.0.1", "127.0.0.2"], "--master_port", port, ssh=ssh, program="scripts/smoke")
    words = told(process)
    assert process.returncode == 0 and "smoke: passed, 2 ranks as one" in words, words
    assert "127.0.0.1 | rank 1 of 2: " in words


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_is_named_before_anything_starts(start, ssh):
    process = start(["127.0.0.1", "127.0.0.9"], ssh=ssh, flags=["end"])
    words = told(process)
    assert process.returncode == 2 and words.startswith("error: 127.0.0.9 cannot be reached by ssh (ssh: connect to host 127.0.0.9")


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["launcher", "connection"])
def test_over_ssh_no_rank_outlives_the_launcher_or_its_connection(start, ssh, mark, lost):
    process = start(["127.0.0.1", "127.0.0.2"], ssh=ssh, flags=["sleep", mark])
    seen = 0
    for line in process.stdout:
        seen += "sleeping" in line
        if seen == 2:
            break
    assert sleepers(mark)
    if lost == "launcher":
        process.kill()
    else:
        next(child for child in psutil.Process(process.pid).children() if "127.0.0.2" in child.cmdline()).kill()
        assert process.wait(PATIENCE_SECONDS) == 1
    wait_until(lambda: not sleepers(mark), "no orphan")
