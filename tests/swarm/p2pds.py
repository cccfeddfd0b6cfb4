"""p2pds that the tests of one process share: each takes 0.6 s of a core to start, and a node of a test seldom needs a new one.

Lent ones are real, with a key and a port that they keep from test to test. Nothing else is kept: whoever gives one back takes its handlers
away and hangs up. A test of how p2pd itself starts, dies or listens has one of its own.
"""

import asyncio
import atexit
import contextlib
import functools
import gc
import threading
import warnings
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from swarm import daemon, dht, sockets
from swarm.daemon import END_SECONDS, Daemon
from swarm.identity import Identity

_MOST_IDLE = 4
"""Between tests; each takes 80 MB."""


class Keeper:
    """Runs p2pds in a loop and a thread of its own, which outlive the loops of the tests: a p2pd ends with the last who speaks to it.

    whose: of which tests, where these share theirs with no others.
    """

    def __init__(self, whose: str = "") -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"p2pds of the tests {whose}", daemon=True).start()
        self._folder = sockets.make_folder()
        self._kept: dict[int, tuple[Path, Daemon]] = {}
        self._idle: list[int] = []
        self._count = 0
        atexit.register(self._end)

    @contextlib.contextmanager
    def lending(self) -> Iterator["Lender"]:
        """Until the end nodes that join with a key of the lender's stand on one of our p2pds."""
        lender = Lender(self)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dht, "Daemon", lender)
            try:
                yield lender
            finally:
                self._idle += lender.lent.values()
                while len(self._idle) > _MOST_IDLE:
                    self._close(self._idle.pop())

    def take(self) -> int:
        """The number of one that nobody has."""
        if self._idle:
            return self._idle.pop()
        self._count += 1
        path = self._folder / f"{self._count}.key"
        Identity(path).close()
        options = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "dht_mode": "server", "force_reachability": "public"}
        self._kept[self._count] = path, self._there(Daemon.start(identity_path=str(path), **options))
        return self._count

    def key(self, number: int) -> bytes:
        return self._kept[number][0].read_bytes()

    def daemon(self, number: int) -> Daemon:
        return self._kept[number][1]

    def _there(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def _close(self, number: int) -> None:
        self._there(self._kept.pop(number)[1].close())

    def _end(self) -> None:
        for number in list(self._kept):
            self._close(number)
        self._loop.call_soon_threadsafe(self._loop.stop)
        sockets.remove_folder(self._folder)


keeper = functools.cache(Keeper)


class Lender:
    """Stands in for `Daemon` where nodes start theirs."""

    def __init__(self, keeper: Keeper):
        self._keeper = keeper
        self.lent: dict[bytes, int] = {}
        self._own = 0

    def write_key(self, identity_path: Path, *, own: bool = False) -> None:
        """Who joins with this key has one of our p2pds, also when it joins again. own: it has a p2pd of its own."""
        if own:
            self._own += 1
            identity_path.write_bytes(spare_key(self._own))
            return
        number = self._keeper.take()
        key = self._keeper.key(number)
        self.lent[key] = number
        identity_path.write_bytes(key)

    async def start(self, *, identity_path: str, initial_peers: list[str] | None, **options: Any) -> Daemon:
        number = self.lent.get(Path(identity_path).read_bytes())
        if number is None:
            return await Daemon.start(identity_path=identity_path, initial_peers=initial_peers, **options)
        return await Lent.join(self._keeper.daemon(number), initial_peers or [])


class Lent(Daemon):
    """A second client of a p2pd that is kept."""

    kept: Daemon

    @classmethod
    async def join(cls, kept: Daemon, initial_peers: list[str]) -> "Lent":
        folder = sockets.make_folder()
        lent = cls(await daemon._private(folder).replicate(kept.p2p.daemon_listen_maddr), folder)
        lent.kept = kept
        try:
            if initial_peers and not any([await lent._meets(Multiaddr(maddr)) for maddr in initial_peers]):
                raise P2PDaemonError("failed to connect to bootstrap peers")
        except BaseException:
            await lent.close()
            raise
        return lent

    async def _meets(self, maddr: Multiaddr) -> bool:
        peer = PeerID.from_base58(maddr["p2p"])
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.p2p._client.connect(peer, [Multiaddr(str(maddr).rpartition("/p2p/")[0])]), 5)
            return True
        return False

    async def ended_within(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        return self.kept.p2p._child.returncode is not None

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._give_back(), END_SECONDS)
        control = self.p2p._client.control
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # hivemind drops its connection, which ends with p2pd where that ends
            await self.p2p.shutdown()
            await asyncio.wait([control._read_task, control._write_task])
        for transport in list(self._connections):
            transport.abort()
        sockets.remove_folder(self._folder)

    async def _give_back(self) -> None:
        control = self.p2p._client.control
        for name in list(control.unary_handlers):
            await self.p2p._client.remove_unary_handler(name)
        for name in list(control.handlers):
            await self.p2p._client.remove_stream_handler(name)
        for other in await self.p2p.list_peers():
            await self.p2p._client.disconnect(other.peer_id)


@functools.cache
def spare_key(number: int) -> bytes:
    """A key for a node with a p2pd of its own: to draw one takes 0.07 s."""
    with contextlib.ExitStack() as stack:
        folder = sockets.make_folder()
        stack.callback(sockets.remove_folder, folder)
        Identity(folder / "key").close()
        return (folder / "key").read_bytes()


def run(scene: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """What the coroutine returns, in a loop of its own; what hivemind leaves to the collector is collected."""
    gc.freeze()  # torch and all else that is imported: to look through it takes 0.2 s
    try:
        return asyncio.run(asyncio.wait_for(scene, seconds))
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # hivemind leaves its connection to p2pd to the collector
            gc.collect()
        gc.unfreeze()
