"""dd-monitor as a program: the page of a run from what its peers say, without a server; and what it says when it cannot."""

import asyncio
import contextlib
import gc
import os
import re
import signal
import time

import aiohttp
import pytest

from swarm.dht import SwarmNode
from swarm.errors import ExitCode, UserError
from swarm.listening import listen
from swarm.page import monitor
from swarm.records import PeerRecord, RunRecord
from swarm.run_config import RunConfig
from swarm.tasks import end_tasks
from tests.datasetserver.hosting import ROOT
from tests.page.test_watch import news
from tests.warm import Warm

RUN = RunConfig(run_name="my cats", model="base", total_samples=960, target_batch_size=32)
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/QmNnooDu7bfjPFoTZYxMNLWUQJyrVwtbZg5gBMjTezGAJN"


def record(node: SwarmNode, **values) -> PeerRecord:
    known = {"config": RUN.digest, "schema": "s", "digest": "d" * 64, "time": time.time(), "name": "Ada's cellar"}
    return PeerRecord(peer_id=node.peer_id, **{**known, **values})


def test_who_knows_a_peer_sees_the_run(tmp_path):
    async def scenario():
        node = await SwarmNode.join(identity_path=tmp_path / "identity.key")
        process, log, now = None, tmp_path / "log", {"round": 3, "samples": 96}

        async def keep_saying():
            while True:
                await node.publish(RUN.run_id, record(node, **now))
                await asyncio.sleep(1)

        saying = asyncio.create_task(keep_saying())
        try:
            await node.publish_run(RunRecord(run_id=RUN.run_id, run=RUN.to_mapping()))
            words = ["-m", "swarm.page.monitor", "--port", "0", "--timeout", "60", "--peers", NOBODY, (await node.maddrs())[0]]
            process = Warm(words, ROOT, log)
            while not (told := re.search(r"^watching at (\S+)\n", log.read_text(), re.MULTILINE)):
                assert process.poll() is None, log.read_text()
                await asyncio.sleep(0.05)
            url = told[1]
            async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/events") as stream:
                seen = await news(stream)
                assert seen["progress"]["run_name"] == "my cats" and seen["progress"]["epoch"] is None
                assert [peer["name"] for peer in seen["progress"]["peers"]] == ["Ada's cellar"]
                now.update(round=4, samples=128)
                while seen["progress"]["round"] != 4:
                    seen = await news(stream)
                for path in ("/", "/v1/history", "/v1/pictures", "/page/chart.js"):
                    async with session.get(url + path) as answer:
                        assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == ExitCode.OK
        finally:
            await end_tasks(saying)
            if process is not None:
                process.kill()
            await node.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("flags", "words"), [(["--peers", "http://host"], "is not a multiaddr"), (["--peers", "/ip4/1/2"], "multiaddr")])
def test_a_peer_that_is_none_is_one_line_that_says_so(flags, words, capsys):
    assert monitor.cli([*flags, "--port", "0"]) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_peer_that_does_not_answer_ends_it_with_the_reason(capsys):
    assert monitor.cli(["--peers", NOBODY, "--port", "0", "--timeout", "1"]) == ExitCode.NETWORK
    assert "answer" in capsys.readouterr().err


def test_a_stop_while_it_joins_is_no_fault_though_nobody_answers(monkeypatch, capfd):
    @contextlib.contextmanager
    def asking(*args, **options):
        def look():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
            raise UserError("nobody answers.", fix="Ask another.")

        yield look

    monkeypatch.setattr(monitor.status, "asking", asking)
    assert monitor.cli(["--peers", NOBODY, "--port", "0"]) == 0
    gc.collect()
    assert "never retrieved" not in capfd.readouterr().err


def test_a_port_that_is_taken_is_said_before_anybody_is_asked(capsys):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert monitor.cli(["--peers", NOBODY, "--port", str(port), "--timeout", "1"]) == ExitCode.NETWORK
    assert "Cannot listen" in capsys.readouterr().err
