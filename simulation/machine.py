"""One peer's machine: its disk, its link, and the two processes on it. Both are the product's own code.

The trainer is a lock-step thread around the real `SwarmSync`, as `peer/loop/train.py` is around it; what it trains is a small vector. The
sidecar is the real `take_part` on a simulated node and port.
"""

import asyncio
import contextlib
import contextvars
import itertools
import json
import logging
import random
import subprocess
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import msgpack
import torch
from torch import Tensor, nn

from peer.config import PeerConfig
from peer.contracts import SyncContext, SyncReport
from peer.loop.accounts import Accounts
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.state import State
from peer.sync.engine.trainer import sidecar
from peer.sync.engine.trainer.messages import Failed, Message, Start, pack, unpack
from peer.sync.engine.trainer.port import PortClosed
from peer.sync.engine.trainer.sidecar_process import Processes
from peer.sync.engine.trainer.swarm_sync import SwarmSync
from peer.sync.engine.vectors import BIG_ELEMENTS, SharedBuffer
from simulation.arithmetic import Learned, Taken
from simulation.disk import Disk, Job
from simulation.loop import OWNER
from simulation.network import Host, Link
from simulation.records import SimNode
from simulation.source import Source
from simulation.threads import Killed, LockStepThread
from swarm.bans import Bans
from swarm.end import End
from swarm.errors import UserError
from swarm.members import Members, sign_membership

if TYPE_CHECKING:
    from simulation.world import World

log = logging.getLogger(__name__)

_PORT_MESSAGES = 60
"""A socket's room, in messages of some kB."""
_MANY_TASKS = 64
_EPOCH = 1.7e9
_GRADIENTS = 8
"""That a boot draws; each step takes a multiple of one of them. To draw 1,536 numbers of a normal distribution takes as long as all else in a step."""


class Process:
    """What the loop and the faults know of a process. Everything that it starts carries it in its context."""

    def __init__(self, machine: "Machine", name: str):
        self.machine, self.name = machine, name
        self.stopped = self.dead = False
        self.held: list = []
        self.tasks: list[asyncio.Task] = []
        """Kept for as long as the world lives: what a killed process was in the middle of must not be unwound."""
        self.context = contextvars.copy_context()
        self.context.run(OWNER.set, self)
        self.jobs: list[Job] = []
        """Of its threads, whose results are not there yet."""
        self._many, self._stops = _MANY_TASKS, 0

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        task = self.context.copy().run(asyncio.get_running_loop().create_task, coroutine)
        task._log_destroy_pending = False
        self.tasks.append(task)
        if len(self.tasks) >= self._many:
            self.tasks = [task for task in self.tasks if not task.done()]
            self._many = 2 * len(self.tasks) + _MANY_TASKS
        return task

    def job(self, call: Callable[[], Any]) -> tuple[Any, float, Callable[[], None]]:
        world = self.machine.world
        with self.machine.disk.job() as job:
            result = call()
        self.jobs.append(job)
        used = [value for value in _buffers(call, result)]
        before = [_bytes(value) for value in used]

        def ended() -> None:
            self.jobs = [each for each in self.jobs if each is not job]
            if [_bytes(value) for value in used] != before:
                world.checks.breach("a buffer changed while a thread used it", self.machine)

        return result, world.rng.uniform(0.0005, 0.02) * self.machine.slowness, ended

    def die(self) -> None:
        """Killed: what it was in the middle of stays as it is. Its tasks are held: collected, they would be unwound at some moment, and touch the world."""
        self.dead = True
        self.tasks = [task for task in asyncio.all_tasks(self.machine.world.loop) if task.owner is self]

    def stop(self) -> None:
        """Until it is let go on as often as it was stopped: two strikes may stop it at once."""
        self._stops += 1
        self.stopped = True

    def go_on(self) -> None:
        self._stops -= 1
        self.stopped = self._stops > 0
        if not self.stopped:
            self.machine.world.loop.go_on(self)


def _buffers(call: Callable[[], Any], result: Any) -> list[Any]:
    """The memory that a job read, or gave back."""
    used = []
    for cell in call.__closure__ or ():
        value = cell.cell_contents
        used += value if isinstance(value, tuple) else []
    used.append(result[0])
    return [value for value in used if isinstance(value, (State, SharedBuffer, torch.Tensor))]


def _bytes(value: Any) -> bytes:
    tensor = value.buffer.bytes() if isinstance(value, State) else value.bytes() if isinstance(value, SharedBuffer) else value
    return tensor.numpy().tobytes()


class Port:
    """One end of what trainer and sidecar say to each other; as `port.Port`."""

    other: "Port"

    def __init__(self, process: Process, thread: Callable[[], LockStepThread | None]):
        self._process, self._thread = process, thread
        self._inbox: deque[tuple[bytes, list[SharedBuffer]]] = deque()
        self._changed: Callable[[], None] | None = None
        self.closed = self._notified = False
        self.spy: Callable[[str, dict, list[SharedBuffer]], None] = lambda kind, values, buffers: None

    @classmethod
    def pair(cls, trainer: Process, thread: Callable[[], LockStepThread | None], child: Process) -> tuple["Port", "Port"]:
        ours, theirs = cls(trainer, thread), cls(child, lambda: None)
        ours.other, theirs.other = theirs, ours
        return ours, theirs

    @property
    def _gone(self) -> bool:
        return self.other.closed or self.other._process.dead

    def send(self, message: Message, seconds: float = 30.0) -> None:
        if self.closed or self._gone:
            raise PortClosed("the other process has ended")
        kind, values, buffers = pack(message)
        self.spy(kind, values, buffers)
        self.other._inbox.append((msgpack.packb([kind, values]), buffers))
        self.other._notify()

    def receive(self, seconds: float) -> Message | None:
        if self.closed:
            raise PortClosed("this end is closed")
        if not self._inbox and not self._gone and seconds > 0 and (thread := self._thread()) is not None:
            self._changed = thread.wake
            thread.block(seconds)
            self._changed = None
        if self._inbox:
            data, buffers = self._inbox.popleft()
            return unpack(*msgpack.unpackb(data), buffers)
        if self._gone:
            raise PortClosed("the other process has ended")
        return None

    def has_room(self) -> bool:
        if self.closed:
            raise PortClosed("this end is closed")
        return self._gone or len(self.other._inbox) < _PORT_MESSAGES

    def watch(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._notify()

    def unwatch(self) -> None:
        self._changed = None

    def close(self) -> None:
        self.closed = True
        self.other._notify()

    def _notify(self) -> None:
        if self._changed is not None and not self._notified:
            self._notified = True
            self._process.machine.world.loop.call_soon(self._call, context=self._process.context.copy())

    def _call(self) -> None:
        self._notified = False
        if self._changed is not None:
            self._changed()


class Child:
    """A sidecar as the trainer sees it."""

    def __init__(self, machine: "Machine", process: Process):
        self.machine, self.process, self.pid = machine, process, 0
        self.code: int | None = None

    def poll(self) -> int | None:
        return -9 if self.process.dead and self.code is None else self.code

    def wait(self, timeout: float | None = None) -> int:
        """As `Popen.wait`, but without a timeout for a minute at most. Raises subprocess.TimeoutExpired."""
        clock, until = self.machine.world.loop.time, self.machine.world.loop.time() + (60.0 if timeout is None else timeout)
        while self.poll() is None and clock() < until:
            self.machine.thread.block(0.2)
        if self.poll() is None and timeout is not None:
            raise subprocess.TimeoutExpired("sidecar", timeout)
        return self.poll() or 0


class Machine:
    """A peer from its first start to its end: `boot`, `kill`, `power_cut`, and what goes on in between."""

    def __init__(self, world: "World", peer: str, number: int, link: Link, *, step_seconds: float, batch: int, skew: float):
        self.world, self.peer, self.number, self.link = world, peer, number, link
        self.step_seconds, self.batch, self.skew, self.slowness = step_seconds, batch, skew, 1.0
        self.disk = Disk(random.Random(world.rng.getrandbits(64)), self.wall)
        self.trainer: Process | None = None
        self.sidecar: Process | None = None
        self.thread: LockStepThread | None = None
        self.host: Host | None = None
        self.node: SimNode | None = None
        self.boots = 0
        self.over = self.leaves = False
        self.booted = 0.0
        self.failure: BaseException | None = None
        self.graveyard: list[Process] = []
        self.source: Source | None = None
        self.known: dict[str, Any] | None = None
        """What it was told of the newest state when it started."""
        self.learned: Learned | None = None
        self.taken = Taken()
        self.sync: SwarmSync | None = None
        self._seed = world.rng.getrandbits(48)
        self._random = random.Random(self._seed)

    @property
    def short(self) -> str:
        return self.peer[-6:]

    @property
    def alive(self) -> bool:
        return self.trainer is not None and not self.trainer.dead and not self.over

    @property
    def address(self) -> str:
        number = self.number
        return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"

    def wall(self) -> float:
        return _EPOCH + self.world.loop.time() + self.skew

    def end(self) -> End:
        """Of the run, as the server told it when this peer started."""
        return End(self.world.run, self.world.server.end.host_key, self.world.server.end.extension)

    def members(self) -> Members:
        """The run's members as a peer that starts knows them: its own membership, which the server gives to all, and the host's words."""
        run, key = self.world.run, self.world.server.dataset.key
        own = sign_membership(key, run, self.peer, self.wall) if run.members_of else None
        words = () if self.world.server.away else self.world.server.bans.words
        bans = Bans(run, key.public, words, clock=self.world.loop.time, rng=self.world.dice(f"{self.short} hands on"))
        return Members(run, bans, own, self.wall)

    def met(self) -> list[str]:
        """The peers that it has averaged with, by its disk."""
        path = self.disk.root() / "state" / "met.json"
        try:
            return json.loads(path.read_text())["peers"]
        except (FileNotFoundError, ValueError, LookupError, TypeError):  # a disk may turn any bit of it
            return []

    # ------------------------------------------------------------- power

    def boot(self) -> None:
        self.boots += 1
        self.booted = self.world.loop.time()
        self.failure, self.over, self.leaves = None, False, False
        self.source = self.learned = self.sync = None
        self.known = self.world.last_known()
        self.trainer = Process(self, "trainer")
        self.thread = self.trainer.context.run(LockStepThread, self.world.loop, self._train, self._failed)
        self.trainer.context.run(self.thread.start)

    def leave(self) -> None:
        """In order: what was trained is averaged, what was leased is given back."""
        self.leaves = True
        self.thread.wake()

    def kill(self, *, power: bool = False) -> None:
        """All its processes at once; without power what was not flushed is lost as well."""
        living = [process for process in (self.trainer, self.sidecar) if process is not None and not process.dead]
        for process in living:
            process.die()
        self.graveyard += living
        if self.host is not None:
            self.world.network.die(self.host, power=power)
        self.disk.crash([job for process in living for job in process.jobs], power=power)
        self.world.checks.died(self)
        if self.thread is not None:  # one that assists has none
            self.thread.kill()

    def kill_sidecar(self) -> None:
        self._bury(self.sidecar)
        self.world.network.die(self.host, power=False)

    def _bury(self, process: Process) -> None:
        process.die()
        self.graveyard.append(process)
        self.disk.crash(process.jobs, power=False)
        process.port.other._notify()

    # ------------------------------------------------------------- the sidecar

    def _spawn(self) -> tuple[Child, Port]:
        self.sidecar = process = Process(self, "sidecar")
        child = Child(self, process)
        ours, theirs = Port.pair(self.trainer, lambda: self.thread, process)
        ours.spy = lambda kind, values, buffers: self.world.checks.said(self, kind, values, buffers)
        theirs.spy = lambda kind, values, buffers: self._told(kind, values, buffers)
        if self.sync is not None and self.learned is not None:
            self.learned.restarted(self.sync._work.state.digest)
        process.port = theirs
        process.context.run(self.world.loop.call_soon, lambda: process.spawn(self._live(child, process, theirs)))
        return child, ours

    def _told(self, kind: str, values: dict[str, Any], buffers: list[SharedBuffer]) -> None:
        self.world.checks.told(self, kind, values, buffers)
        if kind == "rebase" and self.learned is not None:
            self.learned.told(values["digest"], self.world.checks.header(values["digest"]), buffers[0].bytes())

    async def _live(self, child: Child, process: Process, port: Port) -> None:
        """As `sidecar.main` and `_serve`."""
        stop = asyncio.Event()
        node = None
        try:
            await asyncio.sleep(self.world.rng.uniform(1.0, 3.0))  # to load its modules
            opening = [port.receive(0)]
            if not isinstance(opening[0], Start):
                return
            node = await self._join(process)
            rng = random.Random(self.world.rng.getrandbits(64))
            await sidecar.take_part(port, opening, node, stop, self.disk.root(), self.wall, rng)
        except PortClosed:
            pass
        except UserError as error:
            with contextlib.suppress(PortClosed):
                sidecar.TrainerLine(port).send(Failed.of(error))
            child.code = int(error.code)
        except PeerLost as error:
            log.warning("the swarm process ends: %s", error)
            child.code = 1
        except Exception as error:
            self.world.checks.breach(f"a sidecar ended with {error!r}", self, error)
        finally:
            if not process.dead:
                child.code = child.code or 0
                if node is not None:
                    await node.close()
                port.close()
                process.die()
                self.graveyard.append(process)

    async def _join(self, process: Process) -> SimNode:
        self.host = host = Host(self.peer, self.link, "a router" if self.link.behind_nat else "", owner=process)
        self.world.network.hosts[self.peer] = host
        await asyncio.sleep(self.world.rng.uniform(0.5, 2.0))
        self.node = SimNode(self.world.network, self.world.records, host, self.wall)
        return self.node

    # ------------------------------------------------------------- the trainer

    def _kill_child(self, child: Child) -> None:
        if not child.process.dead:
            self._bury(child.process)
            if self.host is not None and self.host.owner is child.process:
                self.world.network.die(self.host, power=False)

    def _sleep(self, seconds: float) -> None:
        until = self.world.loop.time() + seconds
        while (left := until - self.world.loop.time()) > 1e-6:
            self.thread.block(left)

    def _train(self) -> None:
        """As `peer/loop/train.py`, with a walk at random in place of learning."""
        generator = torch.Generator().manual_seed(self._seed + self.boots)
        # Two parts, in the run's codec and in the one for small tensors: so that there are two shares to reduce.
        params = {"weight": nn.Parameter(torch.zeros(self.world.scenario.elements)), "bias": nn.Parameter(torch.zeros(BIG_ELEMENTS // 2))}
        processes = Processes(self._spawn, self._kill_child, self.world.loop.time, self._sleep)
        context = SyncContext(
            run=self.world.run,
            peer=PeerConfig(
                client_mode=self.link.behind_nat, peers=(), output_dir=self.short, overlap=self.world.scenario.overlap,
                min_peers=self.world.scenario.min_peers,
            ),
            params=params,
            output_dir=self.disk.root(),
            end=self.end(),
            last_known=self.known,
            members=self.members(),
        )  # fmt: skip
        if self.world.strategy.steps_locally:
            self.learned = Learned(self.world.wire, params, self.peer)
        self.taken = Taken()
        self.sync = sync = SwarmSync(context, f"peer.sync.{self.world.run.sync}:strategy", processes)
        self.source = source = Source(self, context.end, context.members.bans, turn=lambda: self._follow(sync, accounts, sync.step(0)))
        accounts = Accounts(source)
        gradients = itertools.cycle([torch.randn(self.world.wire.size, generator=generator) for _ in range(_GRADIENTS)])
        done = self._follow(sync, accounts, sync.catch_up())
        while not done and not self.leaves and (keys := source.draw(self.batch)):
            self._sleep(self.step_seconds * self.slowness * self.world.rng.uniform(0.9, 1.1))
            if self.world.scenario.broken_steps and self._random.random() < self.world.scenario.broken_steps:
                self._break_off(sync, params, next(gradients), accounts, keys)
                done = self._follow(sync, accounts, sync.step(0))
                continue
            self._step(sync, params, next(gradients), len(keys))
            accounts.trained(keys)
            done = self._follow(sync, accounts, sync.step(len(keys), 1.0))
        report = SyncReport(wait=True)
        while report.wait:
            report = sync.leave(hurry=self.leaves)
            report = self._take(sync, accounts, report, leaves=True)
        waited_until = self.world.loop.time()  # for those behind; what it says last may take seconds more on a slow link
        sync.close()
        accounts.give_back_aside()
        self.world.checks.left(self, accounts, sync._work.included)
        source.close()
        self.over = True
        self.world.verdict.ends(self, waited_until)

    def _step(self, sync: SwarmSync, params: dict[str, nn.Parameter], gradient: Tensor, samples: int) -> None:
        """Some multiple of the gradient, and the optimizer's step where the strategy has one."""
        multiple = (gradient * (self.batch * self._random.uniform(0.5, 1.5))).split([parameter.numel() for parameter in params.values()])
        for parameter, values in zip(params.values(), multiple, strict=True):
            parameter.grad = values
        if sync.before_step():
            before = self.learned.now()
            with torch.no_grad():
                for parameter in params.values():
                    parameter.sub_(parameter.grad, alpha=0.01)
            self.learned.stepped(before)
        else:
            self.taken.stepped(sync._work.state.digest, samples)

    def _break_off(self, sync: SwarmSync, params: dict[str, nn.Parameter], gradient: Tensor, accounts: Accounts, keys: Sequence[str]) -> None:
        """A step that has moved one of the tensors when it is given up, as one that steps them one by one may (--fused_step)."""
        first = next(iter(params.values()))
        first.data.sub_(gradient[: first.numel()])
        accounts.lost(keys)
        report = sync.undo()
        self.learned.undone()
        self._take(sync, accounts, report)

    def _follow(self, sync: SwarmSync, accounts: Accounts, report: SyncReport) -> bool:
        report = self._take(sync, accounts, report)
        while report.wait or report.frozen is not None:
            if report.frozen is None and self.leaves:
                break
            report = self._take(sync, accounts, sync.step(0))
        return report.done

    def _take(self, sync: SwarmSync, accounts: Accounts, report: SyncReport, leaves: bool = False) -> SyncReport:
        self._notice_end(sync, report, leaves)
        if report.frozen is not None:
            self._look(sync)
            if self.learned is None and (wrong := self.taken.check(sync._work.state.digest, sync._work.frozen.samples)):
                self.world.checks.breach(wrong, self)
            receipt = accounts.register(report.frozen)
            if receipt:
                sync.registered(report.frozen, receipt)
            if receipt is None:
                accounts.apply(report)
                report = sync.withdraw(report.frozen)
                if self.learned is not None:
                    self.learned.withdrew()
                self._notice_end(sync, report, leaves)  # what it waited for was the contribution that was refused
        accounts.apply(report)
        for number in report.final:
            self.world.checks.done(self, number)
        for number in report.dropped:
            self.world.checks.lost(self, number, sync.state_dict()["digest"])
        self._look(sync)
        self.world.checks.accounts(self, accounts)
        self.world.checks.books(self, accounts, sync.state_dict()["contributions"])
        return report

    def _notice_end(self, sync: SwarmSync, report: SyncReport, leaves: bool) -> None:
        """Whoever is done, or leaves and need not wait any more, ends on the state itself."""
        if self.learned is not None and (report.done or (leaves and not report.wait)):
            self.learned.gave_up(sync._work.state.digest)

    def _look(self, sync: SwarmSync) -> None:
        """Whether the parameters, and what was just frozen, are what was learned."""
        if self.learned is not None:
            frozen = sync._work.frozen
            wrong = self.learned.check(sync._work.state.digest, frozen and (frozen.number, frozen.encoded.bytes()))
            if wrong:
                self.world.checks.breach(wrong, self)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Killed):
            return
        self.failure = error
        self.world.failed(self, error)
