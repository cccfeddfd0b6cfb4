"""Real servers as the open internet meets them: tokens, TLS, limits, slow and broken clients, metrics, and an orderly end."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import struct
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import uvloop
from aiohttp import web
from multidict import CIMultiDict
from PIL import Image

from datasetserver.__main__ import cli
from datasetserver.connections import AT_ONCE_OF_ONE, Open, accept, drain
from datasetserver.gate import caller
from datasetserver.metrics import Metrics
from datasetserver.tokens import add, remove
from swarm.errors import ExitCode, UserError
from swarm.protocol import ErrorAnswer, Manifest
from tests.datasetserver.hosting import write_dataset
from tests.datasetserver.test_blobs import certificate  # noqa: F401 (a fixture)
from tests.datasetserver.test_http import call, envelope, refused, signed
from tests.looking import fetch

JSON_POST = b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
STRANGER = {"X-Forwarded-For": "198.51.100.7"}  # believed from this machine, as from a proxy on it


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def connect(host):
    netloc = urlsplit(host.url)
    return socket.create_connection((netloc.hostname, netloc.port), timeout=20)


def answer(connection):
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_who_watches_is_cut_off_once_his_token_is_removed(serve, tmp_path):
    alice, _ = add(tmp_path / "tokens", "alice"), add(tmp_path / "tokens", "bob")
    host = serve("--tokens", str(tmp_path / "tokens"))
    with urllib.request.urlopen(urllib.request.Request(host.url + "/v1/events", headers=bearer(alice)), timeout=60) as stream:
        assert stream.readline().startswith(b"data: ")
        remove(tmp_path / "tokens", "alice")
        while stream.readline():  # until it ends
            pass


def test_with_tokens_nobody_else_gets_in(serve, tmp_path):
    alice = add(tmp_path / "tokens", "alice")
    host = serve("--tokens", str(tmp_path / "tokens"))
    described = json.loads(call(host, "/v1/openapi.json")[2])
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            url = path.replace("{digest}", "0" * 64).replace("{lease}", "0" * 32).replace("{asset}", "page.js").replace("{peer}", "QmA").replace("{number}", "1")
            body = {} if method in ("post", "put") else None
            public = path in ("/healthz", "/v1/openapi.json", "/", "/page/{asset}")
            assert ("security" in operation) == (not public)
            if public:
                assert call(host, url, method=method.upper())[0] == 200
                continue
            strange = call(host, url, body, method=method.upper())
            refused(strange, 401, "token_needed")
            assert strange[1]["WWW-Authenticate"] == "Bearer"
            for wrong in (bearer("x"), bearer(alice + "x"), {"Authorization": f"Basic {alice}"}, {"Authorization": alice}):
                assert call(host, url, body, method=method.upper(), headers=wrong)[0] == 401
            if path != "/v1/events":  # it would never end; tests/page reads it
                assert call(host, url, body, method=method.upper(), headers=bearer(alice))[0] != 401
    run = json.loads(call(host, "/v1/run", headers=bearer(alice))[2])
    manifest = Manifest.model_validate_json(call(host, f"/v1/manifest/{run['manifest']}", headers=bearer(alice))[2])
    blob = f"/v1/blobs/{manifest.shards[0].digest}.tar"
    assert call(host, blob, method="HEAD")[0] == 401
    assert call(host, blob, headers={"Authorization": f"bearer {alice}"})[0] == 200
    assert fetch(host.url, token=alice)["run_id"] == run["run_id"]
    with pytest.raises(UserError, match="token") as error:
        fetch(host.url)
    assert error.value.code == ExitCode.AUTH
    remove(tmp_path / "tokens", "alice")
    deadline = time.monotonic() + 20
    while call(host, "/v1/run", headers=bearer(alice))[0] == 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    refused(call(host, "/v1/run", headers=bearer(alice)), 401, "token_wrong")


def test_a_server_for_other_machines_must_say_for_whom(tmp_path, capsys, certificate):  # noqa: F811
    data = str(write_dataset(tmp_path / "data", 1))
    add(tmp_path / "tokens", "alice")
    for flags, what in [
        (["--host", "0.0.0.0"], "--open"),
        (["--host", "::"], "--tokens FILE"),
        (["--host", "192.0.2.1"], "--open"),
        (["--host", "0.0.0.0", "--open", "--tokens", str(tmp_path / "tokens")], "Give one of them"),
        (["--tokens", str(tmp_path / "nothing")], "token add NAME"),
        (["--tls_cert", str(certificate / "cert.pem")], "--tls_key"),
        (["--tls_cert", str(certificate / "cert.pem"), "--tls_key", str(tmp_path / "nothing")], "--tls_key"),
        (["--tls_cert", str(certificate / "cert.pem"), "--tls_key", str(certificate / "cert.pem")], "not a certificate and its key"),
        (["--max_requests_per_second", "-1"], "max_requests_per_second"),
    ]:
        assert cli(["--dataset", data, "--port", "0", *flags]) == ExitCode.CONFIG, flags
        line = capsys.readouterr().err
        assert line.startswith("error: ") and what in line and line.count("\n") == 1, line


def test_an_open_server_listens_on_all_addresses_and_says_so(serve):
    host = serve("--host", "0.0.0.0", "--open")
    assert call(host, "/v1/run")[0] == 200
    host.stop()
    assert "anyone who can reach" in host.stderr


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_serves_shards_and_refuses_the_rest(serve, certificate):  # noqa: F811
    host = serve("--tls_cert", str(certificate / "cert.pem"), "--tls_key", str(certificate / "key.pem"))
    assert host.url.startswith("https://")
    context = ssl.create_default_context(cafile=certificate / "cert.pem")

    def get(path):
        with urllib.request.urlopen(host.url + path, timeout=20, context=context) as response:
            return response.read()

    run = json.loads(get("/v1/run"))
    assert run["url"] == host.url
    shard = Manifest.model_validate_json(get(f"/v1/manifest/{run['manifest']}")).shards[0]
    assert len(get(f"/v1/blobs/{shard.digest}.tar")) == shard.bytes
    with pytest.raises(urllib.error.URLError, match="certificate"):
        call(host, "/v1/run")
    with connect(host) as connection:
        connection.sendall(b"GET /v1/run HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"run_id" not in answer(connection)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with connect(host) as connection, pytest.raises((ssl.SSLError, ConnectionError)):
        old.wrap_socket(connection)
    assert json.loads(get("/healthz")) == {"status": "ok"}


def test_one_address_is_slowed_down_and_told_when_to_come_back(serve):
    host = serve("--max_requests_per_second", "0.1")
    answers = [call(host, "/healthz", headers=STRANGER) for _ in range(30)]
    statuses = [status for status, *_ in answers]
    assert statuses.count(200) >= 1 and statuses.count(429) >= 5 and set(statuses) == {200, 429}
    late = next(one for one in answers if one[0] == 429)
    refused(late, 429, "too_many_requests")
    assert int(late[1]["Retry-After"]) >= 1
    assert call(host, "/healthz", headers={"X-Forwarded-For": "198.51.100.8"})[0] == 200
    assert call(host, "/healthz")[0] == 200


def test_bodies_that_are_late_compressed_or_broken_are_the_callers_fault(serve):
    host = serve()
    good = json.dumps(envelope(host, want_samples=1)).encode()
    refused(call(host, "/v1/leases", raw=good, headers={"Content-Encoding": "gzip"}), 415, "unsupported_media_type")
    # Both at once: the server closes each 5 s after its answer.
    with connect(host) as huge, connect(host) as large:
        for connection, length in ((huge, 9_000_000_000), (large, 8_388_609)):
            connection.sendall(JSON_POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n{" % length)
        for connection in (huge, large):
            assert b" 413 " in answer(connection).splitlines()[0]
    with connect(host) as connection:
        connection.sendall(
            JSON_POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\nzz\r\n"
        )
        assert b" 400 " in answer(connection).splitlines()[0]
    assert call(host, "/v1/leases", raw=good)[0] == 201


def test_who_asks_for_the_head_alone_gets_no_more_and_whatever_is_expected_the_gate_is_passed(serve):
    """Behind the head of /v1/events came the events, for ever; what a server cannot expect was answered before any limit was charged."""
    host = serve()
    paths = ("/healthz", "/v1/events", "/v1/history", "/v1/run")
    with connect(host) as connection:
        for path in paths:
            connection.sendall(f"HEAD {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: the unexpected\r\n\r\n".encode())
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        parts = answer(connection).split(b"HTTP/1.1 ")
    assert [part[:3] for part in parts[1:]] == [b"200"] * 5 and all(part.endswith(b"\r\n\r\n") for part in parts[1:-1])


def test_what_is_no_http_is_answered_in_the_form_of_every_error(serve):
    host = serve()
    for sent, status in [
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
    ]:
        with connect(host) as connection:
            connection.sendall(sent)
            head, _, body = answer(connection).partition(b"\r\n\r\n")
        assert f" {status} ".encode() in head.splitlines()[0], head
        ErrorAnswer.model_validate_json(body)
    assert host.stop() == 0
    assert "Traceback" not in host.stderr


def test_metrics_count_what_happened_without_naming_anybody(serve):
    host = serve()
    shard = Manifest.model_validate_json(call(host, f"/v1/manifest/{envelope_manifest(host)}")[2]).shards[0]
    call(host, f"/v1/blobs/{shard.digest}.tar", headers={"Range": "bytes=0-99"})
    call(host, "/nowhere/at/all")
    call(host, "/v1/leases", envelope(host, "carol", want_samples=8))
    status, headers, body = call(host, "/metrics")
    text = body.decode()
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
    assert "dd_shard_bytes_total 100.0" in text
    assert 'dd_http_requests_total{endpoint="/v1/blobs/{digest}.tar",method="GET",status="206"} 1.0' in text
    assert 'dd_http_requests_total{endpoint="none",method="GET",status="404"} 1.0' in text
    assert 'dd_ledger_samples{state="leased"} 8.0' in text
    assert "process_resident_memory_bytes" in text
    assert "dd_run_loss NaN" in text and "dd_run_waiting_samples 0.0" in text and 'dd_peers_by_phase{phase="train"} 0.0' in text
    assert "carol" not in text and "nowhere" not in text and shard.digest not in text


def envelope_manifest(host):
    return json.loads(call(host, "/v1/run")[2])["manifest"]


def test_peers_addresses_are_for_token_holders_and_for_this_machine(serve, tmp_path):
    from datasetserver.app import _shown
    from swarm.protocol import PeerInfo

    token = add(tmp_path / "tokens", "alice")
    peer = PeerInfo(peer_id="p", maddrs=["/ip4/203.0.113.7/tcp/1"])

    class Asked(dict):
        remote, headers = "198.51.100.9", {}

    class AskedHere(Asked):
        remote = "127.0.0.1"

    assert _shown(peer, Asked()).maddrs == []
    assert _shown(peer, Asked(holder="alice")).maddrs == _shown(peer, AskedHere()).maddrs == peer.maddrs
    host = serve("--tokens", str(tmp_path / "tokens"))
    refused(call(host, "/v1/peers"), 401, "token_needed")
    assert call(host, "/v1/peers", headers=bearer(token))[0] == 200


def test_on_sigterm_answers_on_their_way_arrive_and_nobody_new_gets_in(serve):
    host = serve(samples=400, shard_samples=400)
    body = json.dumps(envelope(host, want_samples=1)).encode()
    with connect(host) as idle, connect(host) as busy:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in idle.recv(65536)
        by = "".join(f"{name}: {value}\r\n" for name, value in signed("/v1/leases", body).items())
        busy.sendall(JSON_POST + f"{by}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
        deadline = time.monotonic() + 60
        while "dd_http_active_requests 2.0" not in call(host, "/metrics")[2].decode() and time.monotonic() < deadline:
            time.sleep(0.01)  # until the server has begun to read
        host.process.send_signal(signal.SIGTERM)
        assert idle.recv(65536) == b"", "idle connections are closed at once"
        with pytest.raises(OSError), connect(host) as late:
            late.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if not late.recv(100):
                raise ConnectionResetError
        busy.sendall(body[5:])
        assert b" 201 " in answer(busy).splitlines()[0]
    assert host.stop() == 0
    assert "Traceback" not in host.stderr


def test_a_client_that_never_takes_its_shard_does_not_keep_the_server_from_ending(serve, tmp_path):
    data = write_dataset(tmp_path / "host0" / "data", 1)
    for number in range(12):
        Image.frombytes("RGB", (1024, 1024), os.urandom(3 << 20)).save(data / f"noise{number}.png", compress_level=0)
        (data / f"noise{number}.txt").write_text("noise")
    host = serve(samples=1, shard_samples=100)
    shard = Manifest.model_validate_json(call(host, f"/v1/manifest/{envelope_manifest(host)}")[2]).shards[0]
    assert shard.bytes > 24 << 20, "more than sockets hold"
    with connect(host) as stuck:
        stuck.sendall(f"GET /v1/blobs/{shard.digest}.tar HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert stuck.recv(100)
        assert host.stop() == 0
    assert "Traceback" not in host.stderr


@contextlib.contextmanager
def serving(**limits):
    """Port and metrics of an application without endpoints behind `accept`, in a loop of its own as the server's is."""
    loop, metrics, sock = uvloop.new_event_loop(), Metrics(), socket.create_server(("127.0.0.1", 0))
    runner = web.AppRunner(web.Application())

    async def begin():
        await runner.setup()
        return await accept(runner, sock, metrics, None, **limits)

    async def end(server):
        await drain(server, runner, 5.0)
        await runner.cleanup()

    server = loop.run_until_complete(begin())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield sock.getsockname()[1], metrics
    finally:
        asyncio.run_coroutine_threadsafe(end(server), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("first", [b"", b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_connection_without_a_whole_request_is_closed(first):
    with serving(head_seconds=0.3) as (port, _), socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(first)
        with contextlib.suppress(ConnectionResetError):  # it had not even read that yet
            answer(connection)  # ends; else the socket's own limit does


def test_a_head_that_trickles_for_ever_is_cut_off():
    with serving(head_seconds=0.3) as (port, _), socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(600):
                connection.sendall(b"X: y\r\n")
                time.sleep(0.1)


def test_connections_beyond_what_there_is_room_for_are_closed_and_the_next_gets_in_when_one_leaves():
    def reaches(port):
        """The connection, if a request on it is answered."""
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        try:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if connection.recv(1000):
                return connection
        except ConnectionError:
            pass
        connection.close()
        return None

    with serving(most=3) as (port, metrics), contextlib.ExitStack() as closing:
        kept = [closing.enter_context(reaches(port)) for _ in range(3)]
        assert reaches(port) is None
        assert b"dd_http_refused_connections_total 1.0" in metrics.text(peers=0, progress=None)
        kept[0].close()
        deadline = time.monotonic() + 60
        while (again := reaches(port)) is None and time.monotonic() < deadline:
            time.sleep(0.02)  # until the server has seen that the other is gone
        assert again is not None
        again.close()


def test_one_address_has_so_many_connections_and_leaves_room_for_others():
    metrics = Metrics()
    connections = Open(1000, metrics)
    leave = [connections.enter("203.0.113.7") for _ in range(AT_ONCE_OF_ONE)]
    assert None not in leave and connections.enter("203.0.113.7") is None
    assert connections.enter("203.0.113.8") and connections.enter("127.0.0.1")
    leave[0]()
    assert connections.enter("203.0.113.7")
    assert f"dd_http_connections {AT_ONCE_OF_ONE + 2.0}".encode() in metrics.text(peers=0, progress=None)


def test_a_download_that_its_client_breaks_off_is_no_error_of_ours(serve, tmp_path):
    """It counted as 500, and whoever watches a server's errors was called at night for a volunteer's Ctrl-C."""
    data = write_dataset(tmp_path / "host0" / "data", 1)
    for number in range(12):
        Image.frombytes("RGB", (1024, 1024), os.urandom(3 << 20)).save(data / f"noise{number}.png", compress_level=0)
        (data / f"noise{number}.txt").write_text("noise")
    host = serve(samples=1, shard_samples=100)
    shard = Manifest.model_validate_json(call(host, f"/v1/manifest/{envelope_manifest(host)}")[2]).shards[0]
    for _ in range(3):
        with connect(host) as broken:
            broken.sendall(f"GET /v1/blobs/{shard.digest}.tar HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert broken.recv(100)
            broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed with a reset, as by a kill
    line = 'dd_http_requests_total{endpoint="/v1/blobs/{digest}.tar",method="GET",status="499"} 3.0'
    deadline = time.monotonic() + 20
    while line not in (text := call(host, "/metrics")[2].decode()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert line in text and 'status="500"' not in text
    assert host.stop() == 0
    assert "Traceback" not in host.stderr


def test_a_handler_that_is_cancelled_counts_as_left_by_its_client():
    metrics = Metrics()
    with pytest.raises(asyncio.CancelledError), metrics.watch("/v1/run", "GET"):
        raise asyncio.CancelledError
    assert b'status="499"' in metrics.text(peers=0, progress=None)


def test_of_several_lines_that_name_the_caller_the_last_counts():
    """The first is the caller's own, as if it were on this machine, which has no limits; HAProxy adds a second."""
    lines = CIMultiDict([("X-Forwarded-For", "127.0.0.1"), ("x-forwarded-for", "127.0.0.1, 198.51.100.7")])
    assert caller(SimpleNamespace(remote="127.0.0.1", headers=lines)) == "198.51.100.7"
    assert caller(SimpleNamespace(remote="127.0.0.1", headers=CIMultiDict())) == "127.0.0.1"


def test_a_proxy_that_does_not_say_whom_it_speaks_for_is_pointed_out_once(serve):
    host = serve()
    call(host, "/v1/run", headers={"Host": "train.example.org", **STRANGER})
    call(host, "/v1/run")
    for _ in range(3):
        call(host, "/v1/run", headers={"Host": "train.example.org"})
    for name in ("a:b", "x:99999", "["):  # a stranger's, asked before anything else: no traceback each
        assert call(host, "/healthz", headers={"Host": name})[0] == 421
    assert host.stop() == 0
    warnings = [line for line in host.stderr.splitlines() if "without X-Forwarded-For" in line]
    assert len(warnings) == 1 and "asks for train.example.org" in warnings[0] and "Traceback" not in host.stderr
