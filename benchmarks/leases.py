"""How many shards per second the dataset server can lease and take back as trained, durably (SQLite, synchronous=FULL).

    .venv/bin/python benchmarks/leases.py [--seconds 20] [--clients 200] [--shard_samples 256]

A pair is a lease of one shard and the registration of all its samples in a contribution; a final round with the
contributions of 50 clients is reported after every 50 registrations, and counts nothing. At the ledger: in one process on one core, from as many asyncio
tasks. Through HTTP: a real server on one core, with the clients in another process on another core, a keep-alive connection each. Each
client asks again as soon as it is answered, so the latencies are those of a server that is busy all the time. To sign a request takes the
clients 0.5 to 1 ms, to check it takes the server 0.05: through HTTP it is the clients' core that is busy. `disk` is what an
fsync of 4 KiB takes where the ledgers lie, in the folder for temporary files.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import uvloop
from PIL import Image

from benchmarks.common import argument_parser, cpu_seconds, heed_sigterm, print_result, print_table, start
from benchmarks.hosting import dataset_server
from datasetserver.book import Book
from datasetserver.ledger import Ledger, collect_seldom
from datasetserver.tree import State
from swarm.errors import UserError
from swarm.peer_key import PeerKey
from swarm.run_config import RunConfig
from swarm.signed_request import Signer

ROUND_CLIENTS = 50
Lease = Callable[[str], Awaitable[list[str]]]
Register = Callable[[str, int, list[str]], Awaitable[None]]
Report = Callable[[dict], Awaitable[None]]


@dataclass
class Load:
    """Clients that each lease a shard and register its samples, again and again, until `seconds` have passed."""

    seconds: float
    shard_samples: int
    begun: float = 0.0
    pairs: int = 0
    latencies: list[float] = field(default_factory=list)
    members: list[tuple[str, int, int]] = field(default_factory=list)
    rounds: int = 0
    samples: int = 0
    cpu_before: float = 0.0

    async def client(self, name: str, lease: Lease, register: Register, report: Report) -> None:
        number = 0
        while time.perf_counter() < self.begun + self.seconds:
            number += 1
            keys = await self._timed(lease(name))
            await self._timed(register(name, number, keys))
            self.pairs += 1
            self.members.append((name, number, self.shard_samples))
            if len({member[0] for member in self.members}) == ROUND_CLIENTS:
                await report(self._round())

    def _round(self) -> dict:
        """The next state: of each client its last contribution."""
        members = list({member[0]: member for member in self.members}.values())
        self.members.clear()
        self.rounds += 1
        self.samples += sum(member[2] for member in members)
        names = {"digest": f"{self.rounds:064x}", "parent": f"{self.rounds - 1:064x}", "round": self.rounds}
        return {**names, "samples": self.samples, "members": members}

    async def _timed(self, request: Awaitable):
        since = time.perf_counter()
        answer = await request
        self.latencies.append(time.perf_counter() - since)
        return answer

    def row(self, where: str, server: psutil.Process) -> dict:
        took, ordered, cpu = time.perf_counter() - self.begun, sorted(self.latencies), cpu_seconds(server) - self.cpu_before
        quantiles = {f"p{q}_ms": round(1000 * ordered[int(q / 100 * (len(ordered) - 1))], 1) for q in (50, 99)}
        rates = {"pairs_per_second": self.pairs / took, "per_cpu_second": self.pairs / cpu}
        return {"where": where, **rates, **quantiles, "pairs": self.pairs, "rounds": self.rounds}


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the two measurements [20]")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--shard_samples", type=int, default=256)
    return start(parser, measure)


def measure(options: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or options.clients < ROUND_CLIENTS or options.shard_samples < 1 or options.seconds <= 0:
        raise UserError(f"This takes two cores, {ROUND_CLIENTS} clients or more, and some seconds.", fix="See --help.")
    heed_sigterm()
    with tempfile.TemporaryDirectory(prefix="leases-") as name:
        folder = Path(name)
        disk = fsync_ms(folder)
        collect_seldom()
        os.sched_setaffinity(0, cores[:1])
        ledger = uvloop.run(at_the_ledger(folder / "ledger.sqlite", options))
        os.sched_setaffinity(0, cores[1:2])
        http = through_http(folder, options, cores[0])
        os.sched_setaffinity(0, cores)
    print_table([ledger, http])
    print(f"disk: an fsync takes {disk:.2f} ms (median)")
    print_result(
        {
            "ledger_pairs_per_second": round(ledger["pairs_per_second"]),
            "http_pairs_per_second": round(http["pairs_per_second"]),
            "http_p99_ms": http["p99_ms"],
            "ledger_p99_ms": ledger["p99_ms"],
            "fsync_ms": round(disk, 3),
            "clients": options.clients,
            "shard_samples": options.shard_samples,
        }
    )


def fsync_ms(folder: Path) -> float:
    times = []
    with (folder / "probe").open("wb") as file:
        for _ in range(50):
            file.write(bytes(4096))
            file.flush()
            since = time.perf_counter()
            os.fsync(file.fileno())
            times.append(1000 * (time.perf_counter() - since))
    return statistics.median(times)


async def run_clients(
    where: str, names: Sequence[str], calls: Callable[[str], tuple[Lease, Register, Report]], server: psutil.Process, options
) -> dict:
    load = Load(options.seconds, options.shard_samples)
    load.begun, load.cpu_before = time.perf_counter(), cpu_seconds(server)
    await asyncio.gather(*(load.client(name, *calls(name)) for name in names))
    return load.row(where, server)


async def at_the_ledger(path: Path, options: argparse.Namespace) -> dict:
    shards = [options.shard_samples] * 100_000
    ledger = Ledger(path, run=RunConfig(), make_book=lambda db: Book(db, shards=shards, seed=1, clock=time.monotonic))
    indices = [f":{index}" for index in range(options.shard_samples)]

    async def lease(peer: str) -> list[str]:
        grant = await ledger.call(lambda book: book.lease(peer, 1))
        shard_epochs = [f"{epoch}:{shard}" for (epoch, shard), _ in grant.shard_epochs]
        return [item + index for item in shard_epochs for index in indices]

    async def register(peer: str, number: int, keys: list[str]) -> None:
        await ledger.call(lambda book: book.contribute(peer, number, keys))

    async def report(said: dict) -> None:
        state = State(said["digest"], said["parent"], said["round"], said["samples"], tuple(said["members"]))
        await ledger.call(lambda book: book.add_final(state, said["members"][0][0]))

    names = [f"peer{n}" for n in range(options.clients)]
    try:
        return await run_clients("ledger", names, lambda name: (lease, register, report), psutil.Process(), options)
    finally:
        ledger.close()


def through_http(folder: Path, options: argparse.Namespace, core: int) -> dict:
    dataset = folder / "data"
    dataset.mkdir()
    for number in range(16 * options.shard_samples):  # 16 shards; the epochs roll over
        (dataset / f"{number}.txt").write_text(f"picture {number}")
        Image.new("L", (8, 8), number % 256).save(dataset / f"{number}.png")
    pinned = ("taskset", "-c", str(core))
    with dataset_server(folder, "--shard_samples", str(options.shard_samples), prefix=pinned) as server:
        return uvloop.run(clients(server.url, server.process, options))


async def clients(url: str, server: psutil.Process, options: argparse.Namespace) -> dict:
    where = urlsplit(url)
    connections: list[Connection] = []

    async def connect() -> "Connection":
        connection = (await asyncio.get_running_loop().create_connection(Connection, where.hostname, where.port))[1]
        connections.append(connection)
        return connection

    run_id = (await (await connect()).ask("GET", "/v1/run"))["run_id"]
    indices = [f":{index}" for index in range(options.shard_samples)]
    by_name = {key.peer_id: (await connect(), key) for key in (PeerKey.draw() for _ in range(options.clients))}

    def calls(name: str) -> tuple[Lease, Register, Report]:
        connection, key = by_name[name]
        ask, envelope = partial(connection.ask, signer=Signer(key)), {"run_id": run_id, "peer": key.peer_id}

        async def lease(peer: str) -> list[str]:
            answer = await ask("POST", "/v1/leases", {**envelope, "want_samples": 1})
            shard_epochs = [f"{item['epoch']}:{item['shard']}" for item in answer["shard_epochs"]]
            return [item + index for item in shard_epochs for index in indices]

        async def register(peer: str, number: int, keys: list[str]) -> None:
            await ask("POST", "/v1/contributions", {**envelope, "number": number, "keys": keys})

        async def report(said: dict) -> None:
            members = [{"peer": peer, "number": number, "samples": samples} for peer, number, samples in said["members"]]
            await ask("POST", "/v1/rounds", {**envelope, **said, "members": members})

        return lease, register, report

    try:
        return await run_clients("HTTP", list(by_name), calls, server, options)
    finally:
        for connection in connections:
            connection.transport.close()


class Connection(asyncio.Protocol):
    """The least HTTP/1.1 client there is, so that it needs less of its core than the server of its own."""

    def __init__(self) -> None:
        self._received, self._answer = b"", None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]):
            self._received = b""
            self._answer.set_result((int(head[9:12]), body))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server closed the connection"))

    async def ask(self, method: str, path: str, body: dict | None = None, *, signer: Signer | None = None) -> dict:
        raw = json.dumps(body).encode() if body else b""
        signed = {"Content-Type": "application/json", **signer.headers(method, path, raw)} if signer else {}
        head = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        status, answer = await self._answer
        if status >= 300:
            raise UserError(f"{method} {path} was answered {status}: {answer.decode()[:500]}", fix="Please report this.")
        return json.loads(answer)


if __name__ == "__main__":
    sys.exit(main())
