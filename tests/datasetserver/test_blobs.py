"""What a request asks of a file (RFC 9110, sections 13 and 14), and the bytes that a real server then sends."""

import asyncio
import http.client
import os
import ssl
import subprocess
import time
from contextlib import asynccontextmanager

import pytest
import uvloop
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from datasetserver import blobs
from datasetserver.blobs import Selected, select, send

DIGEST = "d" * 64
MINE, OTHER = f'"{DIGEST}"', f'"{"e" * 64}"'
SIZE = 1000
WHOLE = Selected(200, 0, SIZE)


def asked(method="GET", **headers):
    return select(method, {name.replace("_", "-"): value for name, value in headers.items()}, digest=DIGEST, size=SIZE)


@pytest.mark.parametrize(
    ("field", "selected"),
    [
        ("bytes=0-0", Selected(206, 0, 1)),
        ("bytes=0-", Selected(206, 0, SIZE)),
        ("bytes=10-19", Selected(206, 10, 10)),
        ("BYTES=10-19", Selected(206, 10, 10)),
        ("bytes=990-5000", Selected(206, 990, 10)),
        ("bytes=990-" + "9" * 5000, Selected(206, 990, 10)),
        ("bytes=-10", Selected(206, 990, 10)),
        ("bytes=-5000", Selected(206, 0, SIZE)),
        ("bytes=1000-", Selected(416)),
        ("bytes=" + "9" * 5000 + "-", Selected(416)),
        ("bytes=-0", Selected(416)),
        ("bytes=20-10", WHOLE),
        ("bytes=0-9,20-29", WHOLE),
        ("bytes=0-9, bytes=20-29", WHOLE),
        ("bytes=a-b", WHOLE),
        ("bytes=--5", WHOLE),
        ("bytes=-", WHOLE),
        ("bytes=+1-2", WHOLE),
        ("bytes=١-٢", WHOLE),
        ("rows=0-9", WHOLE),
        ("", WHOLE),
    ],
)
def test_a_range_gets_what_rfc_9110_says(field, selected):
    assert asked(Range=field) == selected


def test_a_range_counts_only_with_get():
    assert asked("HEAD", Range="bytes=10-19") == WHOLE


@pytest.mark.parametrize("field", [OTHER, f"W/{MINE}", "Sat, 29 Oct 1994 19:43:31 GMT", DIGEST, "*"])
def test_a_range_of_another_version_gets_the_whole_file(field):
    assert asked(Range="bytes=10-19", If_Range=MINE) == Selected(206, 10, 10)
    assert asked(Range="bytes=10-19", If_Range=field) == WHOLE
    assert asked(Range="bytes=5000-", If_Range=field) == WHOLE


def test_preconditions_come_before_ranges_and_in_order():
    assert asked(If_None_Match=MINE) == asked(If_None_Match=f"{OTHER}, W/{MINE}") == asked(If_None_Match="*") == Selected(304)
    assert asked(If_None_Match=MINE, Range="bytes=5000-") == Selected(304)
    assert asked(If_None_Match=OTHER, Range="bytes=0-9") == Selected(206, 0, 10)
    assert asked(If_Match=MINE) == asked(If_Match="*") == asked("HEAD", If_Match=f"{OTHER},{MINE}") == WHOLE
    assert asked(If_Match=OTHER) == asked(If_Match=f"W/{MINE}") == asked(If_Match=OTHER, If_None_Match=MINE) == Selected(412)
    assert asked(If_Match="") == Selected(412)
    assert asked(If_Modified_Since="Sat, 29 Oct 2099 19:43:31 GMT", If_Unmodified_Since="Sat, 29 Oct 1994 19:43:31 GMT") == WHOLE


FIELD = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=40)


@given(st.sampled_from(["GET", "HEAD"]), st.dictionaries(st.sampled_from(["Range", "If-Range", "If-Match", "If-None-Match"]), FIELD))
def test_no_header_asks_for_bytes_that_are_not_there(method, headers):
    selected = select(method, headers, digest=DIGEST, size=SIZE)
    assert selected.status in (200, 206, 304, 412, 416)
    assert 0 <= selected.start <= selected.start + selected.count <= SIZE
    assert (selected.count > 0) == (selected.status in (200, 206))


# -- bytes


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("blob") / "file"
    path.write_bytes(os.urandom(5_000_000))
    return path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"
    )
    subprocess.run([*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], cwd=folder, check=True, capture_output=True)
    return folder


@asynccontextmanager
async def serving(file, selected, *, tls=None):
    """(port, list of bytes sent per request) of a server of one file."""
    counts = []

    async def handler(request):
        return await send(request, file, selected, {"ETag": MINE}, counts.append)

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield runner.addresses[0][1], counts
    finally:
        await runner.cleanup()


def fetch(port, times, tls):
    """The same request `times` times over one connection."""
    context = ssl.create_default_context(cafile=tls / "cert.pem") if tls else None
    kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
    connection = kind("127.0.0.1", port, timeout=30, **({"context": context} if tls else {}))
    try:
        for _ in range(times):
            connection.request("GET", "/")
            yield connection.getresponse().read()
    finally:
        connection.close()


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(("start", "count"), [(0, 5_000_000), (1, 1), (4_000_001, 999_999)])
def test_exactly_the_bytes_asked_for_arrive_again_and_again_on_one_connection(file, certificate, loop, encrypted, start, count):
    tls = certificate if encrypted else None

    async def main():
        async with serving(file, Selected(206, start, count), tls=tls) as (port, counts):
            return await asyncio.to_thread(lambda: list(fetch(port, 3, tls))), counts

    runner = loop()
    try:
        bodies, counts = runner.run_until_complete(main())
    finally:
        runner.close()
    assert bodies == [file.read_bytes()[start : start + count]] * 3
    assert counts == [count] * 3


def test_a_client_that_leaves_in_the_middle_leaves_no_descriptor_behind(file):
    async def main():
        before = len(os.listdir("/proc/self/fd"))
        async with serving(file, Selected(200, 0, 5_000_000)) as (port, counts):
            for _ in range(20):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await reader.readexactly(1000)
                writer.transport.abort()
            deadline = time.monotonic() + 20
            while len(counts) < 20 and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
        assert len(counts) == 20
        assert all(count < 5_000_000 for count in counts)
        return before, len(os.listdir("/proc/self/fd"))

    runner = uvloop.new_event_loop()
    try:
        before, after = runner.run_until_complete(main())
    finally:
        runner.close()
    assert after <= before + 2  # what the loop itself keeps


def test_a_file_that_shrinks_while_it_is_sent_ends_the_connection(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64_000_000))

    async def main():
        async with serving(path, Selected(200, 0, 64_000_000)) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readexactly(1000)
            os.truncate(path, 1_000_000)
            got = 1000 + len(await asyncio.wait_for(reader.read(), 20))
            writer.close()
            return got

    runner = uvloop.new_event_loop()
    try:
        assert runner.run_until_complete(main()) < 64_000_000
    finally:
        runner.close()


def test_a_socket_that_uvloop_has_closed_counts_as_a_client_that_is_gone():
    class Closing:
        def __init__(self, calls: int):
            self.calls = calls

        def setsockopt(self, *_):
            if not self.calls:
                raise ValueError("negative file descriptor")
            self.calls -= 1

    with pytest.raises(ConnectionResetError, match="the client is gone"), blobs._corked(Closing(0)):
        raise AssertionError("nothing can be sent")
    with blobs._corked(Closing(1)):
        pass  # closed while bytes were sent: there is nothing left to uncork
