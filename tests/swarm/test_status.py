"""dd-status against a real dataset server, a real DHT, and servers that are something else."""

import asyncio
import codecs
import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from swarm import status
from swarm.errors import ExitCode, UserError
from swarm.page import monitor
from swarm.records import PeerRecord, RunRecord
from swarm.run_config import RunConfig
from swarm.tasks import end_tasks
from swarm.urls import check_url
from tests.datasetserver.hosting import Host
from tests.looking import fetch
from tests.serving import Answer, serving


def answering(code: int, body: bytes):
    """The URL of an HTTP server on loopback that gives every GET this answer."""

    class Handler(Answer):
        def do_GET(self):
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return serving(Handler)


def shown(seen: dict, width: int = 120, **view) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(status.screen(seen, **view))
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


@pytest.mark.parametrize(("code", "says"), [(200, "no whole answer within 0.5 s"), (500, "answers 500")])
def test_an_answer_that_drips_is_waited_for_no_longer_than_was_asked(code, says, capsys):
    class Drips(Answer):
        def do_GET(self):
            self.send_response(code)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)

    with serving(Drips) as url:
        assert status.cli([url, "--timeout", "0.5"]) == ExitCode.NETWORK
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "argv", "what"), [(status, ["u", "--every", "0"], "--every: use 0.1"), (status, ["u", "--timeout", "x"], "--timeout: use 0.1"), (monitor, ["--peers", "/x", "--timeout", "nan"], "--timeout: use 0.1"), (monitor, [], "required: --peers")]
)
def test_a_wrong_argument_is_one_line(program, argv, what, capsys):
    assert program.cli(argv) == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert what in error and error.count("\n") == 1


@pytest.mark.parametrize(("code", "body"), [(200, b"<html>hello</html>"), (200, b'{"run_id": 5}'), (404, b""), (500, b"oops")])
def test_a_server_that_is_something_else_is_one_line_that_says_so(code, body, capsys):
    with answering(code, body) as url:
        assert status.cli([url]) == ExitCode.NETWORK
    error = capsys.readouterr().err
    assert "it is not a dataset server" in error and error.count("\n") == 1


def test_a_password_in_a_url_is_refused_for_all_peers_read_it():
    with pytest.raises(UserError, match="a name or a password in it"):
        check_url("https://alice:secret@example.org")


@pytest.mark.parametrize("where", ["example", "ftp://host/x", "http://", "http://host:99999", "http://host:0"])
def test_what_is_neither_a_url_nor_a_multiaddr_is_refused(where):
    with pytest.raises(UserError, match=r"is not a URL|does not say http or https"):
        fetch(where)


def test_a_bad_multiaddr_is_refused_with_an_example():
    with pytest.raises(UserError, match="It looks like /ip4/"):
        fetch("/ip4/127.0.0.1/tcp/31337")


def test_peers_alone_tell_how_the_swarm_is_doing():
    peers = [
        a_peer(waiting_samples=100, samples_per_second=30.0, loss=0.2),
        a_peer(peer_id="QmPeer2", round=2, samples=4096, samples_per_second=10.0, loss=0.4),
    ]
    seen = status.summarize(a_run(), peers, now=123.0)
    assert (seen["round"], seen["samples"], seen["waiting_samples"]) == (3, 6144, 100)
    assert seen["loss"] == pytest.approx(0.25) and seen["samples_per_second"] == 40.0 and seen["ledger"] is None
    screen = shown(seen)
    assert "6,144 of 65,536" in screen and "QmPeer2" in screen and "left" in screen


def test_a_run_that_its_host_has_extended_goes_on_to_the_new_end():
    extension = {"total_samples": 131_072, "host_key": "a" * 64, "signature": "b" * 128}
    seen = status.summarize(a_run(extension=extension), [a_peer(samples=65536, samples_per_second=30.0)], now=123.0)
    assert seen["total_samples"] == 131_072 and not seen["finished"] and "65,536 of 131,072 (50%), about" in shown(seen)


@pytest.mark.parametrize("value", ["many", None, True, -1, 1.5, 10**400, [1]])
def test_numbers_that_a_stranger_made_up_are_taken_for_unknown(value):
    run = {"run_name": value, "total_samples": value, "target_batch_size": value, "resolution": value}
    seen = status.summarize(a_run(run=run), [a_peer(samples_per_second=1.0)], now=123.0)
    assert (seen["total_samples"], seen["target_batch_size"], seen["resolution"]) == (0, 0, 0)
    assert "samples/s" in shown(seen)


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
            assert await node.publish_run(RunRecord(run_id=run.run_id, run=run.to_mapping()))

            async def live():
                while True:  # as peers do: a record is old after 20 s, and so long the visitor may need to come
                    await node.publish(run.run_id, a_peer(peer_id=node.peer_id, config=run.digest, time=time.time()))
                    await asyncio.sleep(2)

            living = asyncio.create_task(live())
            try:
                return await asyncio.to_thread(fetch, (await node.maddrs())[0], seconds=60), node.peer_id
            finally:
                await end_tasks(living)
        finally:
            await node.close()

    seen, peer_id = asyncio.run(scenario())
    assert seen["run_name"] == "digits" and seen["round"] == 3
    assert [peer["peer_id"] for peer in seen["peers"]] == [peer_id]


def test_one_record_that_claims_the_end_of_the_run_does_not_end_it_for_who_looks():
    peers = [a_peer(peer_id=f"QmPeer{number}") for number in range(3)]
    lie = a_peer(peer_id="QmLiar", samples=2**53, round=10**6, digest="f" * 64)
    seen = status.summarize(a_run(), [*peers, lie], now=123.0)
    assert (seen["round"], seen["samples"], seen["finished"]) == (3, 6144, False)


def test_a_server_without_a_run_says_so(tmp_path):
    host = Host(tmp_path, founds=False).start()
    try:
        with pytest.raises(UserError, match="no run yet"):
            fetch(host.url)
    finally:
        host.stop()


def test_the_screen_says_what_averaging_costs_and_how_large_a_round_should_be():
    slow = a_peer(samples_per_second=8.0, sent_bytes=983_000_000, received_bytes=983_000_000, transfer_seconds=100.0, share_lost=0.125)
    fast = a_peer(peer_id="QmPeer2", samples_per_second=8.0, sent_bytes=983_000_000, received_bytes=983_000_000, transfer_seconds=10.0)
    screen = shown(status.summarize(a_run(), [slow, fast], now=1e9))
    assert "a transfer takes 2 min; smallest target batch for 95% training: 30,400 (1,520 with --overlap)" in " ".join(screen.split())
    rows = [line.split() for line in screen.splitlines() if "983 MB" in line]
    assert rows == [
        ["...QmPeer1", "983", "MB", "79", "983", "MB", "79", "100.0", "12.5%"],
        ["...QmPeer2", "983", "MB", "786", "983", "MB", "786", "10.0", "0.0%"],
    ]
    assert "1.97 GB sent, 1.97 GB received in the last round" in " ".join(screen.split())


def test_what_is_counted_and_what_was_trained_twice_add_up_to_what_is_in_the_state():
    ledger = {"available": 0, "leased": 0, "pending": 0, "counted": 1926}
    server = {"samples": 2030, "repeated_samples": 104, "ledger": ledger, "epoch": 29, "epoch_samples": 61, "dataset_samples": 65}
    text = shown({**status.summarize(a_run(), [a_peer()], now=1e9), **server}, width=80)
    assert "1,926 once each + 104 repeated = 2,030 in the state" in text and "A100" not in text


def test_nothing_of_a_peer_is_cut_off_in_a_terminal_of_80_columns():
    many = a_peer(
        peer_id="QmPeerTwelve", round=123_456, waiting_samples=1_234_567, samples_per_second=1234.5, loss=0.1234, sent_bytes=983_000_000,
        received_bytes=983_000_000, transfer_seconds=1234.5, share_lost=0.125, phase="catching_up", hardware="NVIDIA A40", client_mode=True,
        time=1e9 - 50,
    )  # fmt: skip
    seen = {**status.summarize(a_run(), [many], now=1e9), "samples_by_peer": {"QmPeerTwelve": 6144}}
    lines = shown(seen, width=80).splitlines()
    rows = [line.split() for line in lines if "...erTwelve" in line]
    assert rows == [
        ["...erTwelve", "NVIDIA", "A40", "catching", "up", "123456", "1,234.5", "0.1234", "100%", "50", "s"],
        ["...erTwelve", "983", "MB", "6", "983", "MB", "6", "1,234.5", "12.5%", "client"],
    ]
    assert max(map(len, lines)) <= 80


def test_a_thousand_peers_fit_on_a_screen_those_in_trouble_first():
    peers = [a_peer(peer_id=f"QmPeer{number:04}", samples_per_second=float(number), transfer_seconds=1.0) for number in range(998)]
    peers += [a_peer(peer_id="QmLost", note="out of memory", phase="leaving"), a_peer(peer_id="QmLate", phase="catching_up")]
    lines = shown(status.summarize(a_run(), peers, now=1e9), width=80, height=24).splitlines()
    assert len(lines) <= 24
    first, second = next((lines[n + 1], lines[n + 2]) for n, line in enumerate(lines) if line.startswith("peer"))
    assert "...QmLost" in first and "leaving" in first and "0997" in second
    assert "...QmLost: out of memory" in lines
    assert "more: 9" in lines[-1] and "1 catching up" in lines[-1]


def test_words_of_strangers_neither_move_the_cursor_nor_change_the_colours():
    rude = a_peer(name="\x1b[2Jalice\u202e", hardware="[red]x[/red]", note="[link=http://x]here\x07[/link]")
    seen = status.summarize(a_run(run={"run_name": "[bold]cats\x1b]0;owned\x07"}), [rude], now=1e9)
    console = Console(width=120, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(status.screen(seen, trouble="[red]gone\x1b[2J", age=3))
    ours = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())  # the colours that we gave
    assert not set(ours) & {"\x1b", "\x07", "\u202e"}
    for words in (
        r"\x1b[2Jalice\u202e",
        "[red]x[/red]",
        r"[link=http://x]here\x07[/link]",
        r"[bold]cats\x1b]0;owned\x07",
        r"[red]gone\x1b[2J",
    ):
        assert words in ours


def test_the_screen_says_whom_the_host_keeps_out():
    seen = status.summarize(a_run(), [a_peer()], now=1.0) | {"banned": {"QmAAAAAAother1": "spam\x1b[2J", "QmBBBBBBother2": "late"}}
    text = shown(seen)
    assert "banned by the host: 2: ...other1 (spam\\x1b[2J), ...other2 (late)" in text
    assert "banned" not in shown({**seen, "banned": {}}) and "banned" not in shown({name: seen[name] for name in seen if name != "banned"})
    assert "banned by a proof: 1: ...Liar01 (it lies)" in shown({**seen, "proven": {"QmLiar01": "it lies"}})


def test_the_screen_says_whom_the_host_trusts_and_how_many_of_them_are_here():
    one = a_peer()
    seen = status.summarize(a_run(), [one], now=1.0)
    assert "trusted" not in shown(seen)
    assert "trusted to average: 1 of 2 are here: " + (seen["peers"][0]["name"] or "...") in shown({**seen, "trusted": [seen["peers"][0]["peer_id"], "QmAway"]})
    assert "trusted to average: 0 of 1 are here\n" in shown({**seen, "trusted": ["QmAway"]})


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


def looks(*results):
    """A look that gives these, one after the other, and then Ctrl-C; an exception among them is raised."""
    left = iter(results)

    def look():
        result = next(left, KeyboardInterrupt())
        if isinstance(result, BaseException):
            raise result
        return result

    return look


def watched(*results, as_json: bool) -> str:
    console = Console(width=80, file=io.StringIO())
    before = signal.getsignal(signal.SIGTERM)
    try:
        status.watch(looks(*results), every=0.001, console=console, as_json=as_json)
    finally:
        signal.signal(signal.SIGTERM, before)
    return console.file.getvalue()


def test_watching_for_programs_is_a_line_of_json_for_each_update_also_while_nobody_answers():
    one, two = (status.summarize(a_run(), [a_peer(samples=samples)], now=1e9) for samples in (6144, 8192))
    away = UserError("http://x does not answer.", fix="Wait.", code=ExitCode.NETWORK)
    lines = [json.loads(line) for line in watched(one, away, two, as_json=True).splitlines()]
    assert [line["samples"] for line in lines] == [6144, 6144, 8192]
    assert [line.get("error") for line in lines] == [None, "http://x does not answer.", None]
    assert lines[1]["stale_seconds"] >= 0 and lines[2]["figures"]["share"] == 8192 / 65536


def test_watching_into_a_file_is_one_screen_after_another():
    one = status.summarize(a_run(), [], now=1e9)
    text = watched(one, UserError("it is away.", fix="Wait."), as_json=False)
    assert text.count("6,144 of") == 0 and text.count("samples/s") == 2 and text.count("old: it is away.") == 1 and "\x1b" not in text


def test_watching_what_was_never_there_is_one_line_that_says_so():
    with pytest.raises(UserError, match="does not answer"):
        watched(UserError("http://x does not answer.", fix="Wait."), as_json=False)


class Terminal:
    """A program of ours on a terminal of 80 x 24."""

    def __init__(self, *argv: str):
        self.fd, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True)
        os.close(theirs)
        self.text, self._decode = "", codecs.getincrementaldecoder("utf-8")().decode  # a read may end within a letter
        self.poll = select.poll()  # select() takes no descriptor beyond 1,023
        self.poll.register(self.fd, select.POLLIN)

    def until(self, words: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < deadline, f"no {words!r} in {self.text[-2000:]!r}"
            if self.poll.poll(200):
                with contextlib.suppress(OSError):  # the other end is closed
                    self.text += self._decode(os.read(self.fd, 65536))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


def test_watching_survives_the_server_and_ends_by_ctrl_c_or_with_its_reader(tmp_path):
    host = Host(tmp_path, "--run_name", "my cats", samples=10).start()
    terminal = Terminal(sys.executable, "-m", "swarm.status", host.url, "--watch", "--every", "0.2", "--timeout", "5")
    try:
        terminal.until("my cats")
        host.stop()
        terminal.until("old: http://127.0.0.1")
        host.start()
        terminal.text = ""
        terminal.until("my cats")
        command = [sys.executable, "-m", "swarm.status", host.url, "--watch", "--json", "--every", "0.1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
            assert json.loads(reader.stdout.readline())["run_name"] == "my cats"
            reader.stdout.close()  # as `| head -1` does
            assert (reader.wait(60), reader.stderr.read()) == (0, "")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("\x1b[?25h")  # the cursor is back
        assert terminal.process.wait(30) == 0 and "Traceback" not in terminal.text
    finally:
        terminal.close()
        host.stop()


@pytest.mark.swarm
def test_a_visitor_of_the_dht_looks_again_and_says_when_nobody_is_there_any_more(tmp_path):
    from swarm.dht import SwarmNode

    loop, digits = asyncio.new_event_loop(), RunConfig(run_name="digits", model="base")
    run = RunRecord(run_id=digits.run_id, run=digits.to_mapping())
    node = loop.run_until_complete(SwarmNode.join(identity_path=tmp_path / "identity.key", deadline_seconds=60))
    living = threading.Thread(target=loop.run_forever)
    living.start()

    def there(what):
        return asyncio.run_coroutine_threadsafe(what, loop).result(60)

    try:
        assert there(node.publish_run(run))
        maddr = there(node.maddrs())[0]
        nobody = "/ip4/127.0.0.1/tcp/1/p2p/QmNnooDu7bfjPFoTZYxMNLWUQJyrVwtbZg5gBMjTezGAJN"
        with status.asking([nobody, maddr], seconds=5) as look:
            assert look()["run_id"] == look()["run_id"] == run.run_id
            there(node.close())
            with pytest.raises(UserError) as away:
                look()
            with pytest.raises(UserError) as gone:
                look()
        assert {away.value.code, gone.value.code} == {ExitCode.NETWORK}
    finally:
        loop.call_soon_threadsafe(loop.stop)
        living.join(10)
        loop.close()


def test_a_visitor_that_leaves_ends_what_a_library_left_in_its_loop():
    """Else the last words of dd-status are Python's: "Task was destroyed but it is pending!"."""
    visitor = status._Visitor(["/ip4/127.0.0.1/tcp/1/p2p/QmPeer"], "", 1)
    left = visitor._loop.create_task(asyncio.sleep(1000))
    visitor.close()
    assert left.cancelled() and visitor._loop.is_closed()
