"""`dd-peer --assist` as a program, and what it tells a real dataset server. What it does in a swarm: tests/peer/sync/test_assistant.py."""

import asyncio
import contextlib
import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peer import assist
from peer.config import PeerConfig
from peer.contracts import CommittedRound, Member
from peer.data.client.runs import fetch_run
from peer.finetune import main
from peer.launch.joining import Joined
from peer.sync.engine.assistant import Known
from peer.sync.engine.state import Head
from swarm.errors import ExitCode, UserError
from swarm.identity import Identity
from swarm.ports import free_port
from swarm.run_config import RunConfig
from swarm.tasks import end_tasks
from tests.datasetserver.hosting import Host
from tests.identities import id_of, key
from tests.peer.figures.test_audience import scraped
from tests.warm import Warm

ROOT = Path(__file__).resolve().parent.parent.parent


def test_help_says_what_it_is_for_what_it_needs_and_how_to_get_the_result(capsys):
    assert main(["--assist", "--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    for word in ("trains nothing", "--datasetserver", "--host_maddrs", "--announce_maddrs", "--states_total_limit", "dd-export"):
        assert word in text


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--assist"], "--assist needs a run that exists already"),
        (["--assist", "--peers", "/ip4/127.0.0.1/tcp/1/p2p/x", "--found"], "--assist needs a run that exists already"),
        (["--assist", "--datasetserver", "http://x", "--states_total_limit", "-1"], "states_total_limit is -1"),
        (["--audit", "1", "--datasetserver", "http://x"], "--audit is for a helper"),
        (["--assist", "--datasetserver", "http://x", "--audit", "65"], "audit is 65"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(flags, reason):
    with pytest.raises(UserError, match=reason):
        main(flags)


def test_a_run_that_averages_nothing_needs_no_help(tmp_path, monkeypatch):
    joined = Joined(RunConfig(model="x", sync="none"))
    with pytest.raises(UserError, match="its peers average nothing"):
        assist.assist(config(tmp_path), lambda: joined)


def test_an_audit_needs_the_pictures_of_a_dataset_server(tmp_path):
    with pytest.raises(UserError, match="this run has none") as refused:
        assist.assist(dataclasses.replace(config(tmp_path), audit=1), lambda: Joined(RunConfig(model="x", sync="parameters")))
    assert "--datasetserver" in refused.value.fix


def test_a_helper_that_audits_is_not_told_that_its_cache_does_nothing(tmp_path, caplog):
    peer = dataclasses.replace(config(tmp_path), cache_dir=str(tmp_path), cache_gib=5.0, lease_samples=8)
    assist.warn_of_unused(dataclasses.replace(peer, audit=1, datasetserver="http://127.0.0.1:1"))
    assert "no use for --lease_samples" in caplog.text and "cache" not in caplog.text
    assist.warn_of_unused(peer)
    assert "--cache_dir, --cache_gib" in caplog.text


def config(folder):
    return PeerConfig(assist=True, peers=("/ip4/127.0.0.1/tcp/1/p2p/x",), output_dir=str(folder))


RUNS_HERE = [ROOT / "peer" / name for name in ("assist.py", "drawing", "figures/audience.py", "launch/joining.py", "launch/membership.py")]
"""All of a helper's own way."""
BESIDE = [ROOT / "peer" / name for name in ("finetune.py", "supervise.py", "launch/resolving.py")]
"""Of it and of peers that train."""


def read_in(paths):
    """The options that these files ask a peer's configuration for."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return {name for file in files for name in re.findall(r"\bpeer\.([a-z_]+)\b", file.read_text(encoding="utf-8").replace("_peer.", "peer."))}


def test_an_option_does_something_for_a_helper_or_is_in_the_list_of_those_that_do_nothing():
    listed, here = {*assist._OF_TRAINING}, read_in(RUNS_HERE)
    elsewhere = {"check", "identity_path", "blocks_to_swap"}  # its own program, `identity_file`, refused
    assert not listed & here
    assert {field.name for field in dataclasses.fields(PeerConfig)} - listed - elsewhere <= here | read_in(BESIDE)


def test_options_that_do_nothing_for_a_helper_are_named_in_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(assist, "setup_logging", lambda **_: None)
    monkeypatch.setattr(assist, "_assist_in", lambda *_: ExitCode.OK)
    for options in ({}, {"offload": True}, {"base_precision": "int8", "cache_text": True}):
        assist.assist(dataclasses.replace(config(tmp_path), **options), lambda: None)
    assert [told for told in caplog.messages if "trains nothing" in told] == ["--assist trains nothing, and has no use for --base_precision, --cache_text"]


def test_a_helper_that_is_told_to_stop_speaks_of_no_step(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(assist, "setup_logging", lambda **_: None)
    monkeypatch.setattr(assist.Stop, "listen", lambda self: self)
    monkeypatch.setattr(assist, "_assist_in", lambda *given: given[-1].hear(signal.SIGINT))
    assist.assist(config(tmp_path), lambda: None)
    assert "stopping; once more to stop at once." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("over", "kept", "said"),
    [
        (True, True, "the run is over; dd-export --state {} --out model makes a model of the newest final state"),
        (False, True, "stopped as asked (the same command goes on); dd-export --state {} --out model makes a model of the newest final state"),
        (False, False, "stopped as asked (the same command goes on); this helper has no final state"),
    ],
)
def test_a_helper_that_ends_says_why_and_what_to_do_with_what_it_keeps(tmp_path, monkeypatch, caplog, over, kept, said):
    """Before, the log of a helper whose run was over just ended."""

    class Node:
        peer_id = "QmHelper"

        async def maddrs(self):
            return []

        async def close(self):
            pass

    async def take_part(*, stop, **_):
        if not over:
            stop.set()
        if kept:
            (tmp_path / "settled").mkdir()
            (tmp_path / "settled" / "round-00000001.state").touch()

    monkeypatch.setattr(assist, "take_part", take_part)
    monkeypatch.setattr(assist, "show", lambda *_: None)
    peer, joined = config(tmp_path), Joined(RunConfig(model="x", target_batch_size=64))
    Identity(peer.identity_file).close()

    async def scenario():
        with contextlib.ExitStack() as shown:
            await assist._assist(peer, {}, tmp_path, joined, Node(), None, asyncio.Event(), shown)

    with caplog.at_level("INFO"):
        asyncio.run(scenario())
    assert said.format(tmp_path) in caplog.messages


def test_the_run_known_from_before_is_gone_on_with_when_nobody_answers(tmp_path, caplog):
    def nobody():
        raise UserError("nobody answers", fix="wait", code=ExitCode.NETWORK)

    def key_of(run_id):
        return f"the key of {run_id}"

    path = tmp_path / "run.json"
    with pytest.raises(UserError, match="nobody answers"):
        assist._run(path, nobody, key_of)
    joined = Joined(RunConfig(model="x", target_batch_size=64), "http://host", ("/ip4/1.2.3.4/tcp/5/p2p/x",))
    assert assist._run(path, lambda: joined, key_of) == (joined, False)
    again = dataclasses.replace(joined, host_key=f"the key of {joined.run.run_id}", known=True)  # whose words count while it is away, too
    assert assist._run(path, nobody, key_of) == (again, True)
    assert "going on with the run known from before: nobody answers" in caplog.text


def test_final_rounds_reach_a_server_that_was_away(tmp_path, monkeypatch):
    monkeypatch.setattr(assist, "_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(assist, "_ANSWER_SECONDS", 2.0)
    host = Host(tmp_path).start()
    try:
        run = RunConfig.from_mapping(fetch_run(host.url, 20).run, where=host.url)
        final = CommittedRound("1" * 64, "0" * 64, 1, 8, (Member("QmA", 1, 8),))
        host.stop()

        async def scenario():
            reports = assist.Reports(Joined(run, host.url), key("helper"))
            delivering = asyncio.create_task(reports.deliver_forever())
            reports.add([final])
            await asyncio.sleep(0)
            restarted = await asyncio.get_running_loop().run_in_executor(None, host.start)
            await asyncio.wait_for(reports.delivered(), 200)
            await end_tasks(delivering)
            return restarted

        asyncio.run(scenario())
        head = fetch_run(host.url, 20).head
        assert (head.digest, head.round, head.samples, head.reporters) == ("1" * 64, 1, 8, [id_of("helper")])
        peer, joined = dataclasses.replace(config(tmp_path), peers=(), datasetserver=host.url), Joined(run, host.url)
        assert asyncio.run(assist._ask(peer, joined)) == Known(Head("1" * 64, 8), [id_of("helper")])
        host.stop()
        assert asyncio.run(assist._ask(peer, joined)) is None
    finally:
        host.stop()


@pytest.mark.swarm
def test_a_helper_that_waits_for_the_first_peer_ends_in_order_when_told_to(tmp_path):
    """dd-peer hears SIGINT here, its own program SIGTERM; that dd-peer passes SIGTERM on is said in test_finetune.py."""
    run = RunConfig(model="x", target_batch_size=64)
    bootstrap = subprocess.Popen(
        [sys.executable, "-m", "datasetserver.bootstrap"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    helper, port = None, free_port()
    try:
        options = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "announce_maddrs": [], "identity_path": str(tmp_path / "bootstrap.key")}
        bootstrap.stdin.write(json.dumps({**options, "run_id": run.run_id, "run": run.to_mapping(), "url": ""}) + "\n")
        bootstrap.stdin.flush()
        address = json.loads(bootstrap.stdout.readline())["maddrs"][0]
        words = ["-m", "peer.supervise", "--assist", "--peers", address, "--output_dir", tmp_path / "helper"]
        words += ["--host_maddrs", "/ip4/127.0.0.1/tcp/0", "--metrics_port", port]
        helper = Warm(words, ROOT, tmp_path / "log", forks=True)
        deadline = time.monotonic() + 240
        while "waiting for the first peer that trains" not in (tmp_path / "log").read_text():
            assert helper.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        assert scraped(port)["dd_peer_phase", ("dd_peer_phase", "assist")] == 1
        helper.send_signal(signal.SIGINT)
        assert helper.wait(200) == 0 and "Traceback" not in (tmp_path / "log").read_text()
    finally:
        for process in filter(None, (helper, bootstrap)):
            process.kill()
            process.wait()
        bootstrap.stdin.close()
        bootstrap.stdout.close()
