"""The running server: one socket, one ledger, one DHT node; ends in order on SIGTERM and SIGINT."""

import asyncio
import contextlib
import fcntl
import importlib.util
import logging
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from aiohttp import web

from datasetserver.app import Service, make_app
from datasetserver.book import Book
from datasetserver.config import ServerConfig
from datasetserver.ingest import Ingested
from datasetserver.ledger import Ledger
from datasetserver.rendezvous import Rendezvous
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)
LEDGER = "ledger.sqlite"
_BOOTSTRAP_SECONDS = 60.0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before anything slow is done. Raises UserError when the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise UserError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}.",
            fix="Choose another --port (0: any free one), or stop the program that uses it.",
            code=ExitCode.NETWORK,
        ) from None
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def own_work_dir(folder: Path) -> Iterator[None]:
    """Make the folder and keep it ours: two servers with one ledger would lease every sample twice. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise UserError(f"Cannot write in {folder}: {error.strerror}.", fix="Choose another --work_dir.", code=ExitCode.DISK) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another server is using {folder}.", fix="Stop that one, or choose another --work_dir.") from None
        yield


def open_ledger(work_dir: Path, data: Ingested, run: RunConfig, *, lease_seconds: float, grace_seconds: float) -> Ledger:
    """The run's ledger in `work_dir`; raises UserError when it belongs to another run."""
    shards = [shard.samples for shard in data.manifest.shards]

    def make_book(db) -> Book:
        return Book(
            db,
            shards=shards,
            seed=run.seed,
            total_samples=run.total_samples,
            lease_seconds=lease_seconds,
            grace_seconds=grace_seconds,
            clock=time.monotonic,
        )

    return Ledger(work_dir / LEDGER, run=run, make_book=make_book)


async def serve(config: ServerConfig, run: RunConfig | None, data: Ingested, work_dir: Path, sock: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; prints one line when ready. Without a run, the first peer that founds one gives it."""
    stop = _stop_event()
    url = config.public_url or url_of(sock)
    rendezvous = _rendezvous(config, work_dir, url)
    open_ = partial(open_ledger, work_dir, data, lease_seconds=config.lease_seconds, grace_seconds=config.grace_seconds)
    service = Service(data, work_dir, url, open_, rendezvous)
    runner = web.AppRunner(make_app(service), access_log=None, shutdown_timeout=5)
    try:
        if run:
            service.begin(run)
        await runner.setup()
        if rendezvous:
            rendezvous.start()
            await _first_sign(rendezvous, stop)
        await web.SockSite(runner, sock).start()
        if not stop.is_set():
            which = f"run={run.run_id}" if run else "run=none, waiting for a peer that founds one;"
            print(f"serving {url_of(sock)} {which} samples={data.manifest.total} shards={len(data.manifest.shards)}", flush=True)
        await stop.wait()
        log.info("leaving")
    finally:
        if rendezvous:
            await rendezvous.stop()
        await runner.cleanup()
        if service.ledger:
            service.ledger.close()


def _rendezvous(config: ServerConfig, work_dir: Path, url: str) -> Rendezvous | None:
    if not config.dht:
        return None
    if importlib.util.find_spec("hivemind") is None:
        log.warning(
            "hivemind is not installed, so this server runs no DHT node: peers need --peers. To have one: pip install hivemind==1.1.12"
        )
        return None
    return Rendezvous(
        {
            "run_id": "",  # told later
            "url": url,
            "host_maddrs": config.listen_maddrs(),
            "announce_maddrs": list(config.announce_maddrs),
            "identity_path": config.identity_path or str(work_dir / "identity.key"),
        }
    )


async def _first_sign(rendezvous: Rendezvous, stop: asyncio.Event) -> None:
    """Wait until the DHT node has addresses, so that the first peer that asks gets them. Raises UserError when it cannot start."""
    waits = [asyncio.create_task(rendezvous.ready.wait()), asyncio.create_task(stop.wait())]
    await asyncio.wait(waits, timeout=_BOOTSTRAP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if rendezvous.error:
        error = rendezvous.error
        raise UserError(error["message"], fix=error["fix"], code=ExitCode(error["code"]))
    if not rendezvous.ready.is_set() and not stop.is_set():
        log.warning("the DHT node is not up after %.0f s; serving without it for now", _BOOTSTRAP_SECONDS)


def _stop_event() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
