"""The running server: one socket, one ledger, one DHT node; ends in order on SIGTERM and SIGINT."""

import asyncio
import contextlib
import importlib.util
import logging
import socket
import sqlite3
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiohttp import web

from datasetserver import connections
from datasetserver.app import make_app
from datasetserver.book import Book
from datasetserver.config import ServerConfig
from datasetserver.holdings import Allowance
from datasetserver.invite import Serving
from datasetserver.ledger import Ledger
from datasetserver.limits import Limits
from datasetserver.orders import Orders
from datasetserver.origins import Names
from datasetserver.prepared import Ingested
from datasetserver.rendezvous import Rendezvous
from datasetserver.service import Service
from datasetserver.states import States
from datasetserver.tokens import Tokens
from datasetserver.work_folder import LEDGER, unwritable
from swarm.errors import ExitCode, UserError
from swarm.files import lock_folder
from swarm.interrupts import stop_event
from swarm.listening import url_of
from swarm.protocol import Manifest
from swarm.run_config import RunConfig
from swarm.signing import HostKey

log = logging.getLogger(__name__)
DRAIN_SECONDS = 8.0
"""For answers on their way when the server is told to end; a shard that takes longer is resumed by its peer."""
_LAST_SECONDS = 1.0  # for what is then still on its way to notice that it was cut off
_BOOTSTRAP_SECONDS = 60.0


@contextlib.contextmanager
def own_work_dir(folder: Path) -> Iterator[None]:
    """Make the folder and keep it ours: two servers with one ledger would lease every sample twice. Raises UserError."""
    try:
        lock = lock_folder(folder)
    except BlockingIOError:
        raise UserError(f"Another server is using {folder}.", fix="Stop that one, or choose another --work_dir.") from None
    except OSError as error:
        raise unwritable(folder, error, "Choose another --work_dir.") from None
    with lock:
        yield


def open_ledger(work_dir: Path, data: Ingested, run: RunConfig, config: ServerConfig, orders: Orders) -> Ledger:
    """The run's ledger in `work_dir`; raises UserError when it belongs to another run."""
    return Ledger(work_dir / LEDGER, run=run, make_book=lambda db: make_book(db, data.manifest, run, config, orders))


def make_book(
    db: sqlite3.Connection,
    manifest: Manifest,
    run: RunConfig,
    config: ServerConfig,
    orders: Orders,
    clock: Callable[[], float] = time.monotonic,
    names: Iterator[str] | None = None,
) -> Book:
    """The ledger in `db`, by the rules of this run, server and host."""
    return Book(
        db,
        shards=[shard.samples for shard in manifest.shards],
        generations=[(generation.from_epoch, generation.shards) for generation in manifest.generations],
        seed=run.seed,
        total_samples=run.total_samples,
        lease_seconds=config.lease_seconds,
        grace_seconds=config.grace_seconds,
        copy_seconds=config.copy_seconds,
        allowance=Allowance.of(run.target_batch_size),
        vouches=bool(run.members_of),
        most_of_one=2 * run.target_batch_size,
        order=orders,
        extended=orders.extended,
        discarded=orders.discarded,
        clock=clock,
        names=names,
    )


@dataclass(frozen=True)
class Guard:
    """Who may come in, and how: both None for everybody in the clear."""

    tokens: Tokens | None
    tls: ssl.SSLContext | None


def guard(config: ServerConfig) -> Guard:
    """Read tokens and certificate, before anything slow is done. Raises UserError for those that are not there or not right."""
    tls = connections.tls(config.tls_cert, config.tls_key) if config.tls_cert else None
    if config.tokens and not (tls or config.is_local):
        log.warning("tokens travel unencrypted, so anyone on the way can read them: give --tls_cert and --tls_key, or have a proxy do TLS")
    if config.open and not config.is_local:
        log.warning("open: anyone who can reach %s:%d can read the pictures and take part in the run", config.host, config.port)
    return Guard(Tokens(Path(config.tokens)) if config.tokens else None, tls)


async def serve(
    config: ServerConfig,
    run: RunConfig | None,
    data: Ingested,
    work_dir: Path,
    sock: socket.socket,
    guard: Guard,
    key: HostKey,
) -> None:
    """Serve until SIGTERM or SIGINT; prints one line when ready. Without a run, the first peer that founds one gives it."""
    stop = stop_event()
    here = url_of(sock, "https" if guard.tls else "http")
    url = config.public_url or here
    rendezvous = _rendezvous(config, work_dir, url)
    orders = Orders(work_dir)
    open_ = partial(open_ledger, work_dir, data, config=config, orders=orders)
    Serving(url, str(Path(config.tokens).resolve()) if config.tokens else "").write(work_dir)
    service = Service(
        data, work_dir, url, key, open_, rendezvous,
        tokens=guard.tokens, limits=Limits(config.max_requests_per_second), pictures_from=config.pictures_from,
        extended=orders.extended, banned=orders.banned, states=States(Path(config.states) if config.states else None),
        names=Names([here, config.public_url], [config.host, *config.server_names]), for_members=config.for_members,
    )  # fmt: skip
    runner = web.AppRunner(make_app(service), access_log=None, shutdown_timeout=_LAST_SECONDS)
    server: asyncio.AbstractServer | None = None
    try:
        if run:
            service.begin(run)
        await runner.setup()
        if rendezvous:
            rendezvous.start()
            await _first_sign(rendezvous, stop)
        key.keep()  # from here on peers see it
        server = await connections.accept(runner, sock, service.metrics, guard.tls)
        if not stop.is_set():
            print(f"host key {key.public} (a peer with this --host_key accepts no other host)", flush=True)
            which = f"run={run.run_id}" if run else "run=none, waiting for a peer that founds one;"
            print(f"serving {here} {which} samples={data.manifest.total} shards={len(data.manifest.shards)}", flush=True)
        await stop.wait()
        log.info("leaving")
    finally:
        service.watch.close()
        if server:
            await connections.drain(server, runner, DRAIN_SECONDS)
        try:
            await asyncio.gather(runner.cleanup(), *([rendezvous.stop()] if rendezvous else []))
        finally:
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
            "log_format": config.log_format,
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
