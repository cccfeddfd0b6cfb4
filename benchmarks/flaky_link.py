"""What a link that drops costs a peer that fetches shards: bytes on the wire over bytes of the shards.

    .venv/bin/python benchmarks/flaky_link.py [--pictures 40] [--shards 2] [--drops 10] [--megabits 100]

A real dataset server, and the peer's own way of fetching a shard into its cache, verified, through a TCP proxy in this process that passes on
`--megabits` Mbit/s and resets the connection, whatever is in flight, after each of `drops` + 1 parts of a shard, which differ in length. Wire
bytes: all that the proxy sent to either side, requests and heads included; what the peer's machine received and the peer did not keep counts twice,
because it comes twice. Pictures are noise of 1 MB, so that shards are as large as they get.
"""

import argparse
import asyncio
import contextlib
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import argument_parser, heed_sigterm, print_result, print_table, start
from benchmarks.hosting import dataset_server, write_noise
from peer.data.client.download import fetch
from peer.data.client.transport import Transport
from peer.data.shards import ShardCache
from swarm.errors import UserError
from swarm.protocol import Manifest, Shard

CHUNK_BYTES = 16 << 10


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--pictures", type=int, default=40, help="of 1 MB in a shard [40]")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--drops", type=int, default=10, help="of the connection, for each shard [10]")
    parser.add_argument("--megabits", type=float, default=100.0, help="a second, that the link carries [100]")
    return start(parser, measure)


def measure(options: argparse.Namespace) -> None:
    if not 1 <= options.pictures <= 40 or options.shards < 1 or options.drops < 0 or options.megabits <= 0:
        raise UserError("A shard has 1 to 40 pictures here, and a link a rate.", fix="See --help.")
    heed_sigterm()
    rows = []
    with tempfile.TemporaryDirectory(prefix="flaky-") as name:
        folder = Path(name)
        write_noise(folder / "data", options.pictures * options.shards)
        with dataset_server(folder, "--shard_samples", str(options.pictures)) as server:
            manifest = Manifest.model_validate_json((folder / "work" / "manifest.json").read_bytes())
            for shard in manifest.shards:
                rows.append(take(server.url, shard, folder / "cache", options.drops, options.megabits))
                print(f"{rows[-1]['wire bytes']} of {shard.bytes} bytes, {rows[-1]['drops']} drops", file=sys.stderr, flush=True)
    print_table(rows)
    wire, size = (sum(row[key] for row in rows) for key in ("wire bytes", "shard bytes"))
    print_result({"ratio_bytes": wire / size, "drops_per_shard": sum(row["drops"] for row in rows) / len(rows), "shard_bytes": size})


def take(url: str, shard: Shard, cache: Path, drops: int, megabits: float) -> dict[str, float]:
    """Fetch one shard through a link that drops so often; what it took. Raises UserError when it does not arrive, or too seldom dropped."""
    rng = random.Random(shard.digest)
    borders = sorted(rng.sample(range(CHUNK_BYTES, max(shard.bytes - CHUNK_BYTES, CHUNK_BYTES + drops)), drops))
    parts = urlsplit(url)
    with FlakyLink((parts.hostname, parts.port), borders, megabits * 1e6 / 8) as link:
        begun = time.perf_counter()
        path = asyncio.run(_fetch(link.url, shard, cache))
        seconds = time.perf_counter() - begun
    if path is None or link.drops != drops:
        raise UserError(f"The shard did not come, or with {link.drops} drops.", fix="Please report this.")
    return {"shard bytes": shard.bytes, "drops": drops, "wire bytes": link.sent, "ratio": link.sent / shard.bytes, "seconds": seconds}


async def _fetch(url: str, shard: Shard, cache: Path) -> Path | None:
    async with Transport(url) as transport:
        return await fetch(transport, ShardCache(cache, 1 << 40), shard.digest, shard.bytes, lambda: True)


class FlakyLink:
    """A proxy to `target` that resets the connection whenever the bytes that it passed on to the client reach the next border.

    sent: bytes passed on in either direction; drops: resets so far.
    """

    def __init__(self, target: tuple[str, int], borders: list[int], bytes_per_second: float):
        self._target, self._borders, self._rate = target, list(borders), bytes_per_second
        self.sent = self.drops = self._down = 0
        self._lock = threading.Lock()

    def __enter__(self) -> "FlakyLink":
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        for link in [self._server, *self._open]:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            server = socket.create_connection(self._target, 10)
            self._open |= {client, server}
            for work in ((self._up, client, server), (self._pass_down, server, client)):
                self._threads.append(threading.Thread(target=work[0], args=work[1:], daemon=True))
                self._threads[-1].start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(CHUNK_BYTES):
                server.sendall(data)
                with self._lock:
                    self.sent += len(data)
            server.shutdown(socket.SHUT_WR)

    def _pass_down(self, server: socket.socket, client: socket.socket) -> None:
        due = time.monotonic()
        with contextlib.suppress(OSError):
            while data := server.recv(CHUNK_BYTES):
                left = self._borders[0] - self._down if self._borders else len(data)
                client.sendall(data[:left])
                with self._lock:
                    self.sent += len(data[:left])
                self._down += len(data[:left])
                due = max(due, time.monotonic() - 0.1) + len(data) / self._rate
                time.sleep(max(0.0, due - time.monotonic()))
                if self._borders and self._down >= self._borders[0]:
                    self._borders.pop(0)
                    self.drops += 1
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
        # A thread that reads from a socket holds it: without these the other side would not hear of its end.
        for link in (client, server):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RD)
            link.close()
            self._open.discard(link)


if __name__ == "__main__":
    sys.exit(main())
