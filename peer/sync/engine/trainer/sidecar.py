"""The process that takes part in the swarm for a training process: a fresh interpreter, one asyncio loop, no CUDA.

It owns the DHT node, p2pd and the replica; the trainer may be busy in a step, or stopped in a debugger, and the swarm is served
all the same. It dies with its parent, and p2pd with it. Started by `SwarmSync`: `python -m peer.sync.engine.trainer.sidecar FD`.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from peer.contracts import Member, Settlement
from peer.sync.engine.codec import Wire
from peer.sync.engine.net.bucket import Bucket
from peer.sync.engine.outer import load_strategy
from peer.sync.engine.replica import Replica
from peer.sync.engine.round.plausible import NUMBER_FILE
from peer.sync.engine.state import Head, Header, State, better
from peer.sync.engine.trainer.port import Port, PortClosed, inherited
from peer.sync.engine.trainer.trainer import Offer, Progress
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.engine.vectors import SharedBuffer
from swarm.dht import SwarmNode, parse_maddrs
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.files import raise_open_limit
from swarm.life import answer_with_stacks
from swarm.lifeline import die_with_parent
from swarm.logs import setup_logging
from swarm.run_config import RunConfig

log = logging.getLogger("peer.sync.engine.trainer.sidecar")  # __name__ is "__main__" here, whose lines nobody sees
_OURS = [Path(__file__).resolve().parents[4] / part for part in ("peer", "swarm")]

START_SECONDS = 60.0
JOIN_SECONDS = 60.0
REJOIN_SECONDS = 10.0
HOUSEKEEPING_SECONDS = 1.0
SEEN_SECONDS = 1.0


class TrainerPort:
    """The replica's view of the trainer. Nothing here blocks: what a busy trainer has no room for is sent later, in order."""

    def __init__(self, port: Port):
        self._port, self._last_news, self._last_seen = port, "", 0.0
        self._queue: deque[tuple[str, tuple[SharedBuffer, ...], dict[str, Any]]] = deque()

    def send(self, kind: str, *buffers: SharedBuffer, **values: Any) -> None:
        self._queue.append((kind, buffers, values))
        self.flush()

    def flush(self) -> None:
        """Send what there is room for. Raises PortClosed."""
        while self._queue and self._port.has_room():
            kind, buffers, values = self._queue.popleft()
            self._port.send(kind, *buffers, **values)

    def pulse(self) -> None:
        """A sign of life, for a trainer that listens: one that is busy finds enough of them."""
        if not self._queue:
            self.send("pulse")

    def freeze(self) -> None:
        self.send("freeze")

    def train(self) -> None:
        self.send("train")

    def landed(self, state: State) -> None:
        self.send("landed", state.buffer, digest=state.digest, header=state.header.to_json())

    def settled(self, settlements: list[Settlement]) -> None:
        for settlement in settlements:
            self.send("settled", settlement=_settlement_values(settlement))

    def news(self, text: str) -> None:
        if text != self._last_news:
            self._last_news = text
            self.send("news", text=text)

    def extended(self, extension: Mapping[str, Any]) -> None:
        self.send("extended", extension=dict(extension))

    def seen(self, what: Callable[[], dict[str, Any]], now: float) -> None:
        """Once a second, and only as an answer: what a busy trainer does not read must not pile up."""
        if now - self._last_seen >= SEEN_SECONDS:
            self._last_seen = now
            self.send("seen", seen=what())

    def done(self) -> None:
        self.send("done")

    def failed(self, error: UserError) -> None:
        self.send("failed", message=error.message, fix=error.fix, code=int(error.code))


def main(descriptor: int) -> int:
    die_with_parent(signal.SIGTERM)
    answer_with_stacks()
    torch.set_num_threads(1)
    raise_open_limit()  # every other peer may have 16 streams here, and 1,024 files are all that many systems allow at first
    port = inherited(descriptor)
    try:
        kind, values, buffers = port.receive(START_SECONDS) or ("", {}, [])
        if kind != "start":
            return ExitCode.FAILED
        setup_logging(debug=values["debug"], name=values["name"], log_format=values["log_format"])
        asyncio.run(_serve(port, values, buffers))
    except (PortClosed, asyncio.CancelledError):
        return ExitCode.OK
    except UserError as error:
        with contextlib.suppress(PortClosed):
            TrainerPort(port).failed(error)
        return error.code
    except Exception as error:  # the trainer starts another one
        log.error("the swarm process ends: %s", error or repr(error), exc_info=log.isEnabledFor(logging.DEBUG))
        return ExitCode.NETWORK
    return ExitCode.OK


def _tell_of(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An error that nobody waited for: of our own code aloud, of hivemind's tasks, which p2pd's end leaves behind, with --debug."""
    error = context.get("exception")
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)] if error is not None else []
    ours = any(file.is_relative_to(part) for file in frames for part in _OURS) and "hivemind" not in frames[-1].parts
    log.log(logging.ERROR if ours else logging.DEBUG, "%s: %r", context["message"], error, exc_info=error if ours else None)


async def _serve(port: Port, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    # hivemind leaves tasks behind when p2pd or a stream goes away; what matters of that, the watchdog and PeerLost tell.
    loop.set_exception_handler(_tell_of)
    with _ends_this_task_with_its_trainer(port):
        node = await _join(values)
    gc.collect()
    gc.freeze()  # else our many modules are looked through every minute or so, and nobody is answered meanwhile
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        await take_part(port, values, buffers, node, stop, Path(values["folder"]))
    finally:
        await node.close()


async def take_part(
    port: Port,
    values: dict[str, Any],
    buffers: list[SharedBuffer],
    node: SwarmNode,
    stop: asyncio.Event,
    folder: Path,
    wall: Callable[[], float] = time.time,
    rng: random.Random | None = None,
) -> None:
    """The sidecar's life on a node, until `stop` or the run's end; values: what the trainer opened with. Raises UserError, PortClosed.

    buffers: the state to begin with, which is taken out: nobody else may hold its memory for as long as the process lives.
    """
    trainer = TrainerPort(port)
    replica = _replica(trainer, values, buffers.pop(), node, folder, wall, rng)
    trainer.send("ready", peer_id=node.peer_id, maddrs=await node.maddrs())
    await replica.start()
    # A stranger's record ends nobody that has taken part already.
    if replica.neighbours.of_other_tensors() and not replica.state.header.round:
        raise UserError(
            "The peers of this run train other tensors than this peer (names, shapes or dtypes differ).",
            fix="Use the same versions of diffusers and transformers, and the run's model and method.",
        )
    await _until_stopped(replica, trainer, port, stop, folder)


@contextlib.contextmanager
def _ends_this_task_with_its_trainer(port: Port) -> Iterator[None]:
    """Joining may take a minute, in which nobody reads the port; a trainer that dies must take us along all the same."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _join(values: dict[str, Any]) -> SwarmNode:
    """Join by the addresses given, and by those of the peers met before: whoever founded the run has no others."""
    remembered = [maddr for maddrs in _remembered(Path(values["folder"])) for maddr in maddrs]
    options = {name: values[name] for name in ("host_maddrs", "announce_maddrs", "client_mode")}
    options["identity_path"] = Path(values["identity_path"])
    newcomer = values["peers"] and not values["has_landed"]
    try:
        return await SwarmNode.join(
            initial_peers=[*values["peers"], *remembered], deadline_seconds=JOIN_SECONDS if newcomer else REJOIN_SECONDS, **options
        )
    except UserError as error:
        if newcomer or not (values["peers"] or remembered) or error.code != ExitCode.NETWORK:
            raise
        log.info("none of the peers met before answers; waiting for others to come")
        node = await SwarmNode.join(initial_peers=[], **options)
        node.keep_meeting([*values["peers"], *remembered])
        return node


def _remembered(folder: Path) -> list[list[str]]:
    """Addresses of peers met before, one list per peer."""
    try:
        return [parse_maddrs(maddrs, need_peer_id=True) for maddrs in json.loads((folder / "peers_met.json").read_text())]
    except (OSError, ValueError, TypeError, UserError):
        return []


def _remember(folder: Path, addresses: Collection[tuple[str, ...]]) -> None:
    if addresses:
        temporary = folder / "peers_met.tmp"
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(list(addresses)))
            os.replace(temporary, folder / "peers_met.json")


def _replica(
    trainer: TrainerPort,
    values: dict[str, Any],
    buffer: SharedBuffer,
    node: SwarmNode,
    folder: Path,
    wall: Callable[[], float],
    rng: random.Random | None,
) -> Replica:
    run = RunConfig.from_mapping(values["run"], where="the trainer")
    state = State(Header.from_json(values["header"]), buffer)
    loop = asyncio.get_running_loop()
    store = StateStore(folder / "state")
    stored = store.load(state.header.run, state.header.schema, buffer.num_bytes, run.target_batch_size)
    if stored is not None and better(Head.of(stored), Head.of(state)):
        log.info("going on from round=%d state=%s on disk", stored.header.round, stored.digest[:8])
        state = stored
    known = values["last_known"]
    replica = Replica(
        run=run,
        state=state,
        wire=Wire(run.wire, *values["sizes"]),
        strategy=load_strategy(values["strategy"], run),
        node=node,
        store=store,
        rounds_path=folder / "rounds.jsonl",
        trainer=trainer,
        server_url=values["server_url"],
        name=values["peer_name"],
        hardware=values["hardware"],
        last_known=Head(known["digest"], known["samples"]) if known else None,
        last_holders=tuple(values["last_holders"]),
        min_peers=values["min_peers"],
        last_number=_last_number(folder),
        end=End(run, values["host_key"], values["extension"]),
        upload=Bucket(values["max_upload_mbit"]) if values["max_upload_mbit"] else None,
        clock=loop.time,
        wall=wall,
        rng=rng,
    )
    return replica


def _last_number(folder: Path) -> int | None:
    """The number of the last contribution that this peer ever made, as the trainer wrote it; None: of none that is known."""
    try:
        return int((folder / NUMBER_FILE).read_text())
    except (OSError, ValueError):
        return None


async def _until_stopped(replica: Replica, trainer: TrainerPort, port: Port, stop: asyncio.Event, folder: Path) -> None:
    loop = asyncio.get_running_loop()

    def on_message() -> None:
        try:
            trainer.flush()
            while (message := port.receive(0)) is not None:
                _handle(replica, stop, *message)
                if message[0] == "progress":
                    trainer.seen(replica.seen, loop.time())
        except PortClosed:
            port.unwatch()
            stop.set()

    async def housekeeping() -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            trainer.flush()
            trainer.pulse()
            _remember(folder, replica.book.addresses.values())

    port.watch(on_message)
    try:
        await replica.live_until(stop.wait(), housekeeping())
        trainer.flush()
    finally:
        port.unwatch()
        _remember(folder, replica.book.addresses.values())


def _handle(replica: Replica, stop: asyncio.Event, kind: str, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
    if kind == "progress":
        landed = values.pop("landed")
        replica.progressed(Progress(**values), landed)
    elif kind == "offer":
        member = Member(replica.node.peer_id, values["number"], values["samples"])
        replica.offered(Offer(member, buffers[0].bytes(), values["parent"]))
    elif kind == "nothing":
        replica.nothing_to_freeze()
    elif kind == "extend":
        replica.extend(values["extension"])
    elif kind == "leave":
        replica.leaving = True
        replica.wake()
    elif kind == "close":
        replica.failed(values["reason"])
        stop.set()


def _settlement_values(s: Settlement) -> dict[str, Any]:
    members = [[m.peer, m.number, m.samples] for m in s.members]
    return {"digest": s.digest, "parent": s.parent, "round": s.round, "samples": s.samples, "members": members}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
