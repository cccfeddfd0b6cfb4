"""The process that takes part in the swarm for a training process: a fresh interpreter, one asyncio loop, no CUDA.

It owns the DHT node, p2pd and the replica; the trainer may be busy in a step, or stopped in a debugger, and the swarm is served
all the same. It dies with its parent, and p2pd with it. Started by `SwarmSync`: `python -m peer.sync.engine.trainer.sidecar FD`.
"""

import asyncio
import contextlib
import gc
import logging
import random
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from peer.sync.engine.buffers import buffers_on
from peer.sync.engine.codec import Wire
from peer.sync.engine.net.bucket import Bucket
from peer.sync.engine.net.messages import read_header
from peer.sync.engine.net.peers_met import PeersMet
from peer.sync.engine.outer import load_strategy
from peer.sync.engine.replica import Replica
from peer.sync.engine.round.plausible import NUMBER_FILE
from peer.sync.engine.state import Head, State, better
from peer.sync.engine.trainer.messages import Admitted, Banned, Close, Extend, Failed, Message, Progress, Proven, Pulse, Ready, Seen, Start
from peer.sync.engine.trainer.port import Port, PortClosed, inherited
from peer.sync.engine.transfer.disk import StateStore
from swarm.bans import Bans, words_of
from swarm.dht import SwarmNode
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.files import raise_open_limit
from swarm.life import answer_with_stacks
from swarm.lifeline import die_with_parent
from swarm.logs import setup_logging
from swarm.members import Members, read_membership
from swarm.proofs import Proof
from swarm.run_config import RunConfig
from swarm.wrong_states import MOST_BEHIND, Accusation

log = logging.getLogger("peer.sync.engine.trainer.sidecar")  # __name__ is "__main__" here, whose lines nobody sees
_OURS = [Path(__file__).resolve().parents[4] / part for part in ("peer", "swarm")]

START_SECONDS = 60.0
JOIN_SECONDS = 60.0
REJOIN_SECONDS = 10.0
HOUSEKEEPING_SECONDS = 1.0
SEEN_SECONDS = 1.0
_PROOFS_AT_ONCE = 16
"""To the trainer, every second: 128 of them are more than one message holds."""


class TrainerLine:
    """What is said to the trainer. Nothing here blocks: what a busy trainer has no room for is sent later, in order."""

    def __init__(self, port: Port):
        self._port, self._last_seen, self._has_spoken = port, 0.0, False
        self._accused: set[tuple[type, str]] = set()
        """Of whom the trainer has a proof, and a state."""
        self._queue: deque[Message] = deque()

    def send(self, message: Message) -> None:
        """Raises PortClosed."""
        self._queue.append(message)
        self.flush()

    def flush(self) -> None:
        """Send what there is room for. Raises PortClosed."""
        while self._queue and self._port.has_room():
            self._port.send(self._queue.popleft())
            self._has_spoken = True

    def pulse(self) -> None:
        """A sign of life, unless something was said since the last: a word wakes a trainer that waits, and is one itself."""
        if not self._queue and not self._has_spoken:
            self.send(Pulse())
        self._has_spoken = False

    def seen(self, values: Callable[[], dict[str, Any]], now: float) -> None:
        """Once a second, and only as an answer: what a busy trainer does not read must not pile up."""
        if now - self._last_seen >= SEEN_SECONDS:
            self._last_seen = now
            self.send(Seen(values()))

    def proven(self, accusations: Collection[Accusation]) -> None:
        """One of a kind of each accused, once: each start tells of those on the disk as well."""
        news = [each for each in accusations if (type(each), each.accused) not in self._accused]
        # One of a wrong mean, or of a state, takes as much room as a message has.
        if news := [each for each in news if isinstance(each, Proof)][:_PROOFS_AT_ONCE] or news[:1]:
            self._accused |= {(type(each), each.accused) for each in news}
            self.send(Proven([asdict(each) for each in news]))


def main(descriptor: int) -> int:
    die_with_parent(signal.SIGTERM)
    answer_with_stacks()
    torch.set_num_threads(1)
    raise_open_limit()  # every other peer may have 16 streams here, and 1,024 files are all that many systems allow at first
    port = inherited(descriptor)
    try:
        opening = [port.receive(START_SECONDS)]
        if not isinstance(opening[0], Start):
            return ExitCode.FAILED
        setup_logging(debug=opening[0].debug, name=opening[0].name, log_format=opening[0].log_format)
        asyncio.run(_serve(port, opening))
    except (PortClosed, asyncio.CancelledError):
        return ExitCode.OK
    except UserError as error:
        with contextlib.suppress(PortClosed):
            TrainerLine(port).send(Failed.of(error))
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


async def _serve(port: Port, opening: list[Start]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    # hivemind leaves tasks behind when p2pd or a stream goes away; what matters of that, the watchdog and PeerLost tell.
    loop.set_exception_handler(_tell_of)
    with _ends_this_task_with_its_trainer(port):
        node = await _join(opening[0])
    gc.collect()
    gc.freeze()  # else our many modules are looked through every minute or so, and nobody is answered meanwhile
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        await take_part(port, opening, node, stop, Path(opening[0].folder))
    finally:
        await node.close()


async def take_part(
    port: Port,
    opening: list[Start],
    node: SwarmNode,
    stop: asyncio.Event,
    folder: Path,
    wall: Callable[[], float] = time.time,
    rng: random.Random | None = None,
) -> None:
    """The sidecar's life on a node, until `stop` or the run's end. Raises UserError, PortClosed.

    opening: what the trainer began with; it is taken out, since nobody else may hold that state's memory for as long as the process lives.
    """
    line = TrainerLine(port)
    replica = _replica(line, opening.pop(), node, folder, wall, rng)
    line.send(Ready(node.peer_id, list(await node.maddrs())))
    await replica.start()
    # A stranger's record ends nobody that has taken part already.
    if replica.neighbours.of_other_tensors() and not replica.state.value.header.round:
        raise UserError(
            "The peers of this run train other tensors than this peer (names, shapes or dtypes differ).",
            fix="Use the same versions of diffusers and transformers, and the run's model and method.",
        )
    await _until_stopped(replica, line, port, stop, folder)


@contextlib.contextmanager
def _ends_this_task_with_its_trainer(port: Port) -> Iterator[None]:
    """Joining may take a minute, in which nobody reads the port; a trainer that dies must take us along all the same."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _join(start: Start) -> SwarmNode:
    """Join by the addresses given, and by those of the peers met before: whoever founded the run has no others."""
    remembered = [maddr for maddrs in PeersMet(Path(start.folder)).read() for maddr in maddrs]
    options = {
        "host_maddrs": start.host_maddrs, "announce_maddrs": start.announce_maddrs, "client_mode": start.client_mode,
        "identity_path": Path(start.identity_path),
    }  # fmt: skip
    newcomer = start.peers and not start.has_joined
    try:
        return await SwarmNode.join(
            initial_peers=[*start.peers, *remembered], deadline_seconds=JOIN_SECONDS if newcomer else REJOIN_SECONDS, **options
        )
    except UserError as error:
        if newcomer or not (start.peers or remembered) or error.code != ExitCode.NETWORK:
            raise
        log.info("none of the peers met before answers; waiting for others to come")
        node = await SwarmNode.join(initial_peers=[], **options)
        node.keep_meeting([*start.peers, *remembered])
        return node


def _replica(
    line: TrainerLine, start: Start, node: SwarmNode, folder: Path, wall: Callable[[], float], rng: random.Random | None
) -> Replica:
    run = RunConfig.from_mapping(start.run, where="the trainer")
    state = State(read_header(start.header), start.state)
    clock = asyncio.get_running_loop().time
    bans = Bans(run, start.host_key, words_of(start.bans), path=folder / "state" / "bans.json", clock=clock, rng=rng)
    recent = MOST_BEHIND if run.members_of else 0  # elsewhere no mean is proven wrong
    store = StateStore(folder / "state", bans=bans, recent=recent, wall=wall, buffers=buffers_on(start.state_on, folder / "state"))
    stored = store.load(state.header.run, state.header.schema, start.state.num_bytes, run.target_batch_size)
    if stored is not None and better(Head.of(stored), Head.of(state)):
        log.info("going on from round=%d state=%s on disk", stored.header.round, stored.digest[:8])
        state = stored
    known = start.last_known
    return Replica(
        run=run,
        state=state,
        wire=Wire(run.wire, *start.sizes),
        strategy=load_strategy(start.strategy, run),
        node=node,
        store=store,
        rounds_path=folder / "rounds.jsonl",
        line=line,
        server_url=start.server_url,
        name=start.peer_name,
        hardware=start.hardware,
        last_known=Head(known["digest"], known["samples"]) if known else None,
        last_holders=tuple(start.last_holders),
        min_peers=start.min_peers,
        last_number=_last_number(folder),
        end=End(run, start.host_key, start.extension),
        members=Members(run, bans, read_membership(start.membership), wall),
        upload=Bucket(start.max_upload_mbit) if start.max_upload_mbit else None,
        clock=clock,
        wall=wall,
        rng=rng,
    )


def _last_number(folder: Path) -> int | None:
    """The number of the last contribution that this peer ever made, as the trainer wrote it; None: of none that is known."""
    try:
        return int((folder / NUMBER_FILE).read_text())
    except (OSError, ValueError):
        return None


async def _until_stopped(replica: Replica, line: TrainerLine, port: Port, stop: asyncio.Event, folder: Path) -> None:
    loop, met = asyncio.get_running_loop(), PeersMet(folder)

    def on_message() -> None:
        try:
            line.flush()
            while (message := port.receive(0)) is not None:
                _hear(replica, stop, message)
                if isinstance(message, Progress):
                    line.seen(replica.seen, loop.time())
        except PortClosed:
            port.unwatch()
            stop.set()

    async def housekeeping() -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            line.flush()
            line.proven(replica.accusations())
            line.pulse()
            met.write(replica.book.addresses.values())

    port.watch(on_message)
    try:
        await replica.live_until(stop.wait(), housekeeping())
        line.flush()
    finally:
        port.unwatch()
        met.write(replica.book.addresses.values())


def _hear(replica: Replica, stop: asyncio.Event, message: Message) -> None:
    match message:
        case Extend(extension):
            replica.extend(extension)
        case Banned(words):
            replica.members.bans.hear(words_of(words))
        case Admitted(membership):
            replica.members.own = read_membership(membership)
        case Close(reason):
            replica.failed(reason)
            stop.set()
        case _:
            replica.trainer.hear(message)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
