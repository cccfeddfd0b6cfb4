"""dd-status against a real dataset server, a real DHT, and servers that are something else."""

import asyncio
import contextlib
import http.server
import io
import json
import socket
import threading
import time

import pytest
from rich.console import Console

from swarm import status
from swarm.errors import ExitCode, UserError
from swarm.records import PeerRecord, RunRecord
from swarm.run_config import RunConfig
from swarm.tasks import end_tasks
from tests.datasetserver.hosting import Host


@contextlib.contextmanager
def answering(code: int, body: bytes):
    """The URL of an HTTP server on loopback that gives every GET this answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def shown(seen: dict, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(status.screen(seen))
    return console.file.getvalue()


def a_peer(**values) -> PeerRecord:
    known = {"peer_id": "QmPeer1", "config": "c", "schema": "s", "round": 3, "samples": 6144, "digest": "ab" * 32, "time": 100.0}
    return PeerRecord(**{**known, **values})


def a_run(**values) -> RunRecord:
    run = {"run_name": "digits", "total_samples": 65536, "target_batch_size": 2048}
    return RunRecord(**{"run_id": "0123456789abcdef", "run": run, **values})


def test_a_dataset_server_is_shown_on_one_screen_and_as_json(tmp_path, capsys):
    host = Host(tmp_path, "--run_name", "my cats", "--total_samples", "400", samples=40)
    try:
        url = host.start().url
        assert status.cli([url]) == ExitCode.OK
        screen = capsys.readouterr().out
        assert status.cli([url, "--json"]) == ExitCode.OK
        seen = json.loads(capsys.readouterr().out)
    finally:
        host.stop()
    assert "my cats" in screen and "0 of 400 (0%)" in screen and "No live peers." in screen
    assert seen["run_name"] == "my cats" and seen["dataset_samples"] == 40 and not seen["finished"]


def test_a_refusing_server_is_one_line_that_says_so(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refuses
        code = status.cli([f"http://127.0.0.1:{taken.getsockname()[1]}"])
    error = capsys.readouterr().err
    assert code == ExitCode.NETWORK and "does not answer: Connection refused" in error and error.count("\n") == 1


@pytest.mark.parametrize(("code", "body"), [(200, b"<html>hello</html>"), (200, b'{"run_id": 5}'), (404, b""), (500, b"oops")])
def test_a_server_that_is_something_else_is_one_line_that_says_so(code, body, capsys):
    with answering(code, body) as url:
        assert status.cli([url]) == ExitCode.NETWORK
    error = capsys.readouterr().err
    assert "it is no dataset server" in error and error.count("\n") == 1


@pytest.mark.parametrize("where", ["example", "ftp://host/x", "http://", "http://host:99999", "http://host:0"])
def test_what_is_neither_a_url_nor_a_multiaddr_is_refused(where):
    with pytest.raises(UserError, match="neither a URL nor a multiaddr"):
        status.fetch(where)


def test_a_bad_multiaddr_is_refused_with_an_example():
    with pytest.raises(UserError, match="It looks like /ip4/"):
        status.fetch("/ip4/127.0.0.1/tcp/31337")


def test_peers_alone_tell_how_the_swarm_is_doing():
    peers = [a_peer(waiting_samples=100, samples_per_second=30.0, loss=0.2), a_peer(peer_id="QmPeer2", round=2, samples=4096, loss=0.4)]
    seen = status.summarize(a_run(), peers, now=123.0)
    assert (seen["round"], seen["samples"], seen["waiting_samples"]) == (3, 6144, 100)
    assert seen["loss"] == pytest.approx(0.3) and seen["samples_per_second"] == 30.0 and seen["ledger"] is None
    screen = shown(seen)
    assert "6,144 of 65,536" in screen and "QmPeer2" in screen and "left" in screen


def test_a_run_whose_peers_are_gone_still_shows_its_last_known_head():
    head = {"digest": "ab" * 32, "round": 32, "samples": 65536, "peers": ["QmPeer1"]}
    seen = status.summarize(a_run(head=head), [], now=123.0)
    assert seen["round"] == 32 and seen["finished"]
    assert "All peers have left." in shown(seen)


@pytest.mark.swarm
def test_a_peers_multiaddr_is_enough_to_see_the_swarm(tmp_path):
    from swarm.dht import SwarmNode

    run = RunConfig(run_name="digits", model="base", total_samples=65536)

    async def scenario():
        node = await SwarmNode.join(identity_path=tmp_path / "identity.key", deadline_seconds=60)
        try:
            assert await node.publish_run(RunRecord(run_id=run.run_id, run={"run_name": "digits", "total_samples": 65536}))

            async def live():
                while True:  # as peers do: a record is old after 20 s, and so long the visitor may need to come
                    await node.publish(run.run_id, a_peer(peer_id=node.peer_id, config=run.digest, time=time.time()))
                    await asyncio.sleep(2)

            living = asyncio.create_task(live())
            try:
                return await asyncio.to_thread(status.fetch, (await node.maddrs())[0], seconds=60), node.peer_id
            finally:
                await end_tasks(living)
        finally:
            await node.close()

    seen, peer_id = asyncio.run(scenario())
    assert seen["run_name"] == "digits" and seen["round"] == 3
    assert [peer["peer_id"] for peer in seen["peers"]] == [peer_id]


def test_a_server_without_a_run_says_so(tmp_path):
    host = Host(tmp_path, founds=False).start()
    try:
        with pytest.raises(UserError, match="no run yet"):
            status.fetch(host.url)
    finally:
        host.stop()


def test_the_screen_says_what_averaging_costs_and_how_large_a_round_should_be():
    slow = a_peer(samples_per_second=8.0, sent_bytes=983_000_000, received_bytes=983_000_000, transfer_seconds=100.0, share_lost=0.125)
    fast = a_peer(peer_id="QmPeer2", samples_per_second=8.0, sent_bytes=983_000_000, received_bytes=983_000_000, transfer_seconds=10.0)
    screen = shown(status.summarize(a_run(), [slow, fast], now=1e9))
    assert "a transfer takes 2 min; smallest target batch for 95% training: 30,400, with --overlap 1,520" in " ".join(screen.split())
    rows = [line.split() for line in screen.splitlines() if "983 MB" in line]
    assert rows == [
        ["...QmPeer1", "983", "MB", "79", "983", "MB", "79", "100.0", "12.5%"],
        ["...QmPeer2", "983", "MB", "786", "983", "MB", "786", "10.0", "0.0%"],
    ]


def test_nothing_of_a_peer_is_cut_off_in_a_terminal_of_80_columns():
    many = a_peer(
        peer_id="QmPeerTwelve", round=12_345, waiting_samples=1_234_567, samples_per_second=1234.5, loss=0.1234, sent_bytes=983_000_000,
        received_bytes=983_000_000, transfer_seconds=1234.5, share_lost=0.125, phase="assist",
    )  # fmt: skip
    seen = {**status.summarize(a_run(), [many], now=1e9), "samples_by_peer": {"QmPeerTwelve": 123_456_789}}
    rows = [line.split() for line in shown(seen, width=80).splitlines() if "...erTwelve" in line]
    assert rows == [
        ["...erTwelve", "12345", "1,234,567", "1,234.5", "0.1234", "123,456,789", "abababab", "assists"],
        ["...erTwelve", "983", "MB", "6", "983", "MB", "6", "1,234.5", "12.5%"],
    ]


def test_before_the_first_averaged_round_the_screen_promises_nothing():
    screen = shown(status.summarize(a_run(), [a_peer(samples_per_second=8.0)], now=1e9))
    assert "links" not in screen


def test_a_peer_that_assists_is_shown_as_such_and_trains_nothing():
    helper = a_peer(peer_id="QmHelper", phase="assist")
    seen = status.summarize(a_run(), [a_peer(waiting_samples=7, samples_per_second=3.0, loss=0.5), helper], now=101.0)
    lines = shown(seen).splitlines()
    (line,) = [line for line in lines if "QmHelper" in line]
    assert "assists" in line and not any("assists" in other for other in lines if other != line)
    assert (seen["waiting_samples"], seen["samples_per_second"], seen["loss"]) == (7, 3.0, 0.5)
