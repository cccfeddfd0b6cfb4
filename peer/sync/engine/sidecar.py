"""The process that takes part in the swarm for a training process: a fresh interpreter, one asyncio loop, no CUDA.

It owns the DHT node, p2pd and the replica; the trainer may be busy in a step, or stopped in a debugger, and the swarm is served
all the same. It dies with its parent, and p2pd with it. Started by `SwarmSync`: `python -m peer.sync.engine.sidecar FD`.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from peer.contracts import Member, Settlement
from peer.sync.engine.disk import StateStore
from peer.sync.engine.outer import load_strategy
from peer.sync.engine.port import Port, PortClosed, inherited
from peer.sync.engine.replica import Offer, Progress, Replica
from peer.sync.engine.state import Head, Header, State, better
from peer.sync.engine.vectors import SharedBuffer
from swarm.dht import SwarmNode, die_with_parent
from swarm.errors import ExitCode, UserError
from swarm.logs import setup_logging
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)

START_SECONDS = 60.0


class TrainerPort:
    """The replica's view of the trainer."""

    def __init__(self, port: Port):
        self._port, self._last_news = port, ""

    def freeze(self) -> None:
        self._port.send("freeze")

    def train(self) -> None:
        self._port.send("train")

    def landed(self, state: State) -> None:
        self._port.send("landed", state.buffer, digest=state.digest, header=state.header.to_json())

    def settled(self, settlements: list[Settlement]) -> None:
        self._port.send("settled", settlements=[_settlement_values(s) for s in settlements])

    def news(self, text: str) -> None:
        if text != self._last_news:
            self._last_news = text
            self._port.send("news", text=text)

    def done(self) -> None:
        self._port.send("done")

    def failed(self, error: UserError) -> None:
        self._port.send("failed", message=error.message, fix=error.fix, code=int(error.code))


def main(descriptor: int) -> int:
    die_with_parent(signal.SIGTERM)
    torch.set_num_threads(1)
    port = inherited(descriptor)
    try:
        message = port.receive(START_SECONDS)
        if message is None or message[0] != "start":
            return ExitCode.FAILED
        _, values, buffers = message
        setup_logging(debug=values["debug"], name=values["name"])
        asyncio.run(_serve(port, values, buffers[0]))
    except PortClosed:
        return ExitCode.OK
    except UserError as error:
        with contextlib.suppress(PortClosed):
            TrainerPort(port).failed(error)
        return error.code
    return ExitCode.OK


async def _serve(port: Port, values: dict[str, Any], buffer: SharedBuffer) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # hivemind leaves tasks behind when p2pd or a stream goes away; what matters of that, the watchdog and PeerLost tell.
    loop.set_exception_handler(lambda _, context: log.debug("%s: %r", context["message"], context.get("exception")))
    node = await SwarmNode.join(
        initial_peers=values["peers"],
        host_maddrs=values["host_maddrs"],
        announce_maddrs=values["announce_maddrs"],
        identity_path=Path(values["identity_path"]),
        client_mode=values["client_mode"],
    )
    try:
        replica = _replica(port, values, buffer, node)
        port.send("ready", peer_id=node.peer_id, maddrs=await node.maddrs())
        await replica.start()
        if replica.schema_conflict():
            raise UserError(
                "The peers of this run train other tensors than this peer (names, shapes or dtypes differ).",
                fix="Use the same versions of diffusers and transformers, and the run's model and method.",
            )
        await _until_stopped(replica, port, stop)
    finally:
        await node.close()


def _replica(port: Port, values: dict[str, Any], buffer: SharedBuffer, node: SwarmNode) -> Replica:
    run = RunConfig.from_mapping(values["run"], where="the trainer")
    state = State(Header.from_json(values["header"]), buffer)
    folder = Path(values["folder"])
    store = StateStore(folder / "state")
    stored = store.load(state.header.run, state.header.schema, buffer.num_bytes)
    if stored is not None and better(Head.of(stored), Head.of(state)):
        log.info("going on from round=%d state=%s on disk", stored.header.round, stored.digest[:8])
        state = stored
    known = values["last_known"]
    return Replica(
        run=run,
        state=state,
        size=values["size"],
        strategy=load_strategy(values["strategy"], run),
        node=node,
        store=store,
        rounds_path=folder / "rounds.jsonl",
        trainer=TrainerPort(port),
        server_url=values["server_url"],
        last_known=Head(known["digest"], known["samples"]) if known else None,
        last_holders=tuple(values["last_holders"]),
    )


async def _until_stopped(replica: Replica, port: Port, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def on_message() -> None:
        try:
            while (message := port.receive(0)) is not None:
                _handle(replica, stop, *message)
        except PortClosed:
            loop.remove_reader(port.socket)
            stop.set()

    loop.add_reader(port.socket, on_message)
    living = asyncio.create_task(replica.live())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({living, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            living.result()
        replica.close()
        await asyncio.wait({living}, timeout=5)
        await replica.save_last()
    finally:
        loop.remove_reader(port.socket)
        for task in (living, stopping):
            task.cancel()
        ended.cancel()


def _handle(replica: Replica, stop: asyncio.Event, kind: str, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
    if kind == "progress":
        landed = values.pop("landed")
        replica.progressed(Progress(**values), landed)
    elif kind == "offer":
        member = Member(replica.node.peer_id, values["number"], values["samples"])
        replica.offered(Offer(member, buffers[0].bytes(), values["parent"]))
    elif kind == "nothing":
        replica.nothing_to_freeze()
    elif kind == "leave":
        replica.leaving = True
        replica.wake()
    elif kind == "close":
        stop.set()


def _settlement_values(s: Settlement) -> dict[str, Any]:
    members = [[m.peer, m.number, m.samples] for m in s.members]
    return {"digest": s.digest, "parent": s.parent, "round": s.round, "samples": s.samples, "members": members}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
