"""`dd-monitor --peers MULTIADDR ...`: the page of a run for anyone who knows a peer of it, without the dataset server.

It knows what peers tell each other through the DHT: no epochs, no samples per peer, no pictures. Only this machine can open it by default.
"""

import argparse
import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from swarm import status
from swarm.arguments import ArgumentParser, seconds
from swarm.errors import UserError, run_program
from swarm.interrupts import stop_event
from swarm.listening import listen, url_of
from swarm.logs import setup_logging
from swarm.page import assets
from swarm.page.history import History
from swarm.page.watch import MOST_WATCHERS, Watch
from swarm.tasks import end_tasks

READ_SECONDS = 2.0
"""Peers renew their records seldom more often."""
WATCH = web.AppKey("watch", Watch)


def cli(argv: Sequence[str] | None = None) -> int:
    """The console script `dd-monitor`; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return run_program(lambda: _main(_parse(argv)), debug="--debug" in argv)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ArgumentParser(
        "dd-monitor",
        description="Show a run as a live page, by what its peers tell each other.",
        examples=["dd-monitor --peers /ip4/203.0.113.7/tcp/31337/p2p/Qm..."],
    )
    parser.add_argument("--peers", nargs="+", action="extend", required=True, metavar="MULTIADDR", help="peers of the run: /ip4/.../p2p/...")
    parser.add_argument("--run_id", default="", help="which run, when these peers serve several")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 shows the page to anyone who reaches it [127.0.0.1]"
    )
    parser.add_argument("--port", type=int, default=9091, help="port to listen on; 0: any free one [9091]")
    parser.add_argument("--history", default="", metavar="FILE", help="keep the charts in this file across restarts; default: forget them")
    parser.add_argument("--timeout", type=seconds, default=15.0, metavar="SECONDS", help="longest wait for an answer [15]")
    parser.add_argument("--debug", action="store_true", help="log more, and show tracebacks")
    return parser.parse_args(argv)


def _main(args: argparse.Namespace) -> None:
    setup_logging(debug=args.debug)
    for maddr in args.peers:
        if not maddr.startswith("/"):
            raise UserError(f"'{maddr}' is not a multiaddr.", fix="It looks like /ip4/203.0.113.7/tcp/31337/p2p/Qm...; copy it whole.")
    with listen(args.host, args.port) as sock:
        asyncio.run(_serve(args, sock))


async def _serve(args: argparse.Namespace, sock: socket.socket) -> None:
    stop = stop_event()
    eyes = Eyes(args.peers, args.run_id, args.timeout)
    try:
        first = asyncio.create_task(eyes.look())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({first, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await end_tasks(stopping)
        if stop.is_set():
            return await end_tasks(first)
        first.result()
        watch = Watch(eyes.look, History(Path(args.history) if args.history else None))
        runner = web.AppRunner(make_app(watch), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, sock).start()
            print(f"watching at {url_of(sock)}", flush=True)
            await stop.wait()
        finally:
            watch.close()
            await runner.cleanup()
    finally:
        await eyes.close()


class Eyes:
    """A visitor in the DHT, in a thread of its own: whoever of `peers` answers is asked, and those met through them."""

    def __init__(self, peers: Sequence[str], run_id: str, seconds: float):
        self._thread = ThreadPoolExecutor(1, "dht")
        self._visit = contextlib.ExitStack()
        self._ask = self._visit.enter_context(status.asking(peers, seconds=seconds, run_id=run_id))
        self._last: tuple[float, dict[str, Any]] | None = None

    async def look(self) -> dict[str, Any]:
        """The run, as the fields of `protocol.Progress`, at most READ_SECONDS old. Raises UserError when no peer answers."""
        if self._last is None or time.monotonic() - self._last[0] >= READ_SECONDS:
            seen = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask)
            self._last = (time.monotonic(), seen)
        return self._last[1]

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._visit.close)
        self._thread.shutdown()


def make_app(watch: Watch) -> web.Application:
    """The page at `/` with what it asks for, as a dataset server has it."""
    app = web.Application()
    app[WATCH] = watch
    app.router.add_get("/", _page)
    for name in assets.NAMES:
        app.router.add_get(f"/page/{name}", _asset)
    app.router.add_get("/v1/events", _events)
    app.router.add_get("/v1/history", _history)
    app.router.add_get("/v1/pictures", _no_pictures)
    app.cleanup_ctx.append(watch.running)
    return app


async def _page(request: web.Request) -> web.Response:
    return assets.respond(request, assets.INDEX)


async def _asset(request: web.Request) -> web.Response:
    return assets.respond(request, request.path.rpartition("/")[2])


async def _events(request: web.Request) -> web.StreamResponse:
    watch, who = request.app[WATCH], request.remote or ""
    if not watch.has_room(who):
        raise web.HTTPServiceUnavailable(text=f"{MOST_WATCHERS} watch already.")
    return await watch.events(request, who)


async def _history(request: web.Request) -> web.Response:
    return web.json_response(request.app[WATCH].history.columns())


async def _no_pictures(request: web.Request) -> web.Response:
    return web.json_response({"pictures": []})


if __name__ == "__main__":
    sys.exit(cli())
