"""A file that never changes, sent by HTTP: preconditions and ranges as RFC 9110 has them, the bytes by the kernel's sendfile.

aiohttp's FileResponse takes its ETag from the file's time, which differs between servers of one shard, and ignores an ETag in If-Range;
under uvloop, which has no sendfile, it copies through a thread: 3 to 4 times nginx's CPU per GB. Here it is about nginx's.
"""

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

_AT_ONCE_BYTES = 1 << 20  # one sendfile: then other connections have their turn
_TLS_BYTES = 7 << 14  # a whole number of TLS records, and below the 128 KiB from which malloc maps memory anew for every piece
_ETAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')
_RANGE = re.compile(r"bytes=\s*(?:([0-9]+)-([0-9]*)|-([0-9]+))\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Selected:
    """What a request asks of a file: status 200, 206, 304, 412 or 416, and for the first two which bytes."""

    status: int
    start: int = 0
    count: int = 0


def select(method: str, headers: Mapping[str, str], *, digest: str, size: int) -> Selected:
    """What to answer about a file of `size` bytes whose strong ETag is its digest, in the order of RFC 9110, section 13.2.2.

    Dates are ignored, for such a file has none (13.1.3, 13.1.4, 13.1.5); so is a Range that is malformed, in another unit or with HEAD
    (14.2). More than one range gets the whole file: 14.2 allows it, and a 416 would deny ranges that exist.
    """
    if "If-Match" in headers and not _matches(headers["If-Match"], digest, weak=False):
        return Selected(412)
    if "If-None-Match" in headers and _matches(headers["If-None-Match"], digest, weak=True):
        return Selected(304)
    asked = _RANGE.fullmatch(headers.get("Range", ""))
    if method != "GET" or not asked or ("If-Range" in headers and headers["If-Range"].strip() != f'"{digest}"'):
        return Selected(200, 0, size)
    first, last, tail = (None if text in (None, "") else _bounded(text) for text in asked.groups())
    if first is None:
        return Selected(206, max(0, size - tail), min(tail, size)) if tail else Selected(416)
    if last is not None and last < first:
        return Selected(200, 0, size)
    return Selected(206, first, min(size, size if last is None else last + 1) - first) if first < size else Selected(416)


def _matches(field: str, digest: str, *, weak: bool) -> bool:
    if field.strip() == "*":
        return True
    return any(tag[2] == digest and (weak or not tag[1]) for tag in _ETAG.finditer(field))


def _bounded(digits: str) -> int:
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= 18 else 10**18  # beyond every file, and int() refuses thousands of digits


async def send(
    request: web.Request, path: Path, selected: Selected, headers: Mapping[str, str], sent: Callable[[int], None]
) -> web.StreamResponse:
    """Answer 200 or 206 with these bytes of the file at `path`; sent(bytes) is told how many left, also when it ends early.

    Raises OSError before anything is sent when the file is not there or too short, ConnectionError when the client is gone.
    """
    response = web.StreamResponse(status=selected.status, headers=headers)
    response.content_length = selected.count
    if request.method == "HEAD":
        return response
    # In the loop: it takes microseconds, a thread and back a twentieth of what sending a shard takes on a fast link.
    file = _open(path, selected)
    try:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        if transport.get_extra_info("ssl_object"):
            await response.prepare(request)
            await _send_encrypted(response.write, file, selected, sent)
        else:
            transport.set_write_buffer_limits(0)  # draining then waits until nothing is left before our bytes
            with _corked(transport.get_extra_info("socket")):
                writer = await response.prepare(request)
                await writer.drain()
                await _send_plain(transport, file, selected, sent)
    finally:
        os.close(file)
    return response


def _open(path: Path, selected: Selected) -> int:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size < selected.start + selected.count:
            raise OSError(f"{path} is too short")
        os.posix_fadvise(file, selected.start, selected.count, os.POSIX_FADV_WILLNEED)  # so that sendfile seldom waits for the disk
    except BaseException:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def _corked(connection: socket.socket) -> Iterator[None]:
    """Only full segments meanwhile: each that arrives wakes its receiver, which costs more than the bytes."""
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
    except ValueError as error:  # uvloop's word for a socket that is closed
        raise ConnectionResetError(f"the client is gone: {error}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # it is gone
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)


async def _send_plain(transport: asyncio.Transport, file: int, selected: Selected, sent: Callable[[int], None]) -> None:
    """sendfile whenever the socket has room. The event loop forbids watching a transport's own socket, so a copy of it is watched."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    copy = os.dup(transport.get_extra_info("socket").fileno())
    position, end = selected.start, selected.start + selected.count

    def advance() -> None:
        nonlocal position
        try:
            if transport.is_closing():
                raise ConnectionResetError("the client is gone")
            count = os.sendfile(copy, file, position, min(end - position, _AT_ONCE_BYTES))
            if not count:
                raise ConnectionAbortedError("the file became shorter while it was sent")
        except BlockingIOError:
            return
        except OSError as error:
            gone = error if isinstance(error, ConnectionError) else ConnectionAbortedError(str(error))
            finish(gone)
            return
        position += count
        if position == end:
            finish(None)

    def finish(error: ConnectionError | None) -> None:
        loop.remove_writer(copy)
        if not done.done():
            done.set_exception(error) if error else done.set_result(None)

    try:
        loop.add_writer(copy, advance)
        await done
    finally:
        loop.remove_writer(copy)
        os.close(copy)
        sent(position - selected.start)


async def _send_encrypted(write: Callable[[bytes], Awaitable[None]], file: int, selected: Selected, sent: Callable[[int], None]) -> None:
    """Read by pieces into the TLS layer. Not from mapped memory, which is 5 % faster: a disk's error would then kill the server."""
    position, end = selected.start, selected.start + selected.count
    try:
        while position < end:
            piece = os.pread(file, min(end - position, _TLS_BYTES), position)
            if not piece:
                raise ConnectionAbortedError("the file became shorter while it was sent")
            await write(piece)
            position += len(piece)
    except OSError as error:
        raise error if isinstance(error, ConnectionError) else ConnectionAbortedError(str(error)) from None
    finally:
        sent(position - selected.start)
