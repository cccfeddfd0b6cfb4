"""What befalls the machines. A fault strikes now and then until the world is calm, or when a list of strikes says; then it is undone.

What is drawn for a strike is drawn before it and from the fault's own dice: so a world's strikes can be written down, and played again without
some of them (`shrink.py`), and what happened to real peers is a list of strikes too (`replay.py`).
"""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peer.sync.engine.failpoints import FAILPOINTS
from simulation.assistant import Assistant
from simulation.network import SERVER

if TYPE_CHECKING:
    from simulation.machine import Machine, Process
    from simulation.world import World


_RELIEF_SECONDS, _NEWCOMER_SECONDS = 120.0, 30.0
"""How long a server is away at most before a newcomer comes, and how long newcomers have at most to fetch the others' state."""
_HELPERS_ALONE = 0.3
"""Of the partitions of a world with several assistants, those in which they are one side, and all who train the other."""
_WITH_SERVER, _LONG, _LONG_SECONDS = 0.3, 0.1, 300.0
"""Of all partitions, those in which the dataset server is with the drawn side, most often the smaller one; and those that last five minutes."""
_LEAVING_SECONDS = 60.0
"""How long after it was asked to leave a guest is killed: one that is stopped, say. Without faults it takes up to 20 s."""


@dataclass(frozen=True)
class Strike:
    """at: virtual seconds; peer: the machine that it hits, by the order in which they were born, from 1; 0: it hits the net."""

    at: float
    fault: str
    peer: int = 0
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        values = ",".join(f"{name}={_written(value)}" for name, value in self.values.items())
        return f"{self.fault}@{_written(self.at)}/{self.peer}" + (f"({values})" if values else "")


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


_STRIKE = re.compile(r"(?P<fault>[a-z]+)@(?P<at>[0-9.]+)/(?P<peer>\d+)(?:\((?P<values>[^()]*)\))?")


def parse_strikes(text: str) -> tuple[Strike, ...]:
    """`kill@12.5/3(seconds=10,back=True);partition@40/0(peers=1+3,seconds=15)`. Raises ValueError."""
    strikes = []
    for word in filter(None, (word.strip() for word in re.split(r"[;\n]", text))):
        found = _STRIKE.fullmatch(word)
        if found is None or found["fault"] not in FAULTS:
            raise ValueError(f"'{word}' is not a strike; one is like kill@12.5/3(seconds=10,back=True), the faults are {', '.join(FAULTS)}")
        values = dict(pair.split("=") for pair in (found["values"] or "").split(",") if "=" in pair)
        strikes.append(Strike(float(found["at"]), found["fault"], int(found["peer"]), _read(found["fault"], values, word)))
    return tuple(sorted(strikes, key=lambda strike: strike.at))


def _read(fault: str, values: Mapping[str, str], word: str) -> dict[str, Any]:
    kinds = FAULTS[fault].values
    if kinds.keys() != values.keys():
        raise ValueError(f"'{word}': {fault} needs {', '.join(kinds) or 'no values'}")
    return {name: kinds[name](value) for name, value in values.items()}


def written(strikes: Iterable[Strike]) -> str:
    """As `parse_strikes` reads it."""
    return ";".join(map(str, strikes))


# ------------------------------------------------------------- when they strike


async def strike_at_random(world: "World", name: str) -> None:
    """The fault `name`, one strike after the other, each when the last one is undone."""
    fault, rng = FAULTS[name], random.Random(f"{world.scenario.seed} {name}")
    while not world.calm:
        at = round(world.loop.time() + rng.expovariate(1 / (world.scenario.fault_seconds * fault.as_rare)), 3)
        await _until(world, at)
        if world.calm or not world.live:
            continue
        machine = rng.choice(world.live) if fault.hits_a_peer else None
        await _strike(world, Strike(at, name, machine.number if machine else 0, fault.draw(rng, world)))


async def strike_as_told(world: "World", strike: Strike) -> None:
    await _until(world, strike.at)
    if not world.calm:
        await _strike(world, strike)


async def _strike(world: "World", strike: Strike) -> None:
    machine = next((machine for machine in world.live if machine.number == strike.peer), None)
    if FAULTS[strike.fault].hits_a_peer and machine is None:
        return  # another world than the one in which this was drawn: there it does not live at this moment
    await FAULTS[strike.fault].befall(world, machine, strike)


async def _until(world: "World", when: float) -> None:
    while world.loop.time() < when and not world.calm:
        await asyncio.sleep(min(1.0, when - world.loop.time()))


async def _for(world: "World", seconds: float) -> None:
    await _until(world, world.loop.time() + seconds)


# ------------------------------------------------------------- what they do


async def kill(world: "World", machine: "Machine", strike: Strike) -> None:
    """A peer is killed and comes back on its disk, or another comes in its place."""
    world.struck(strike, machine)
    machine.kill()
    await _for(world, strike.values["seconds"])
    if strike.values["back"]:
        machine.boot()
    else:
        _gone(world, machine)
        world.add_peer()


def _gone(world: "World", machine: "Machine") -> None:
    """For good."""
    world.machines.remove(machine)
    world.gone.append(machine)


async def sidecar(world: "World", machine: "Machine", strike: Strike) -> None:
    """A sidecar is killed; its trainer starts another."""
    if machine.sidecar is not None and not machine.sidecar.dead and machine.host:
        world.struck(strike, machine)
        machine.kill_sidecar()


async def handover(world: "World", machine: "Machine", strike: Strike) -> None:
    """A sidecar is killed as its trainer is rebased next: the state that the trainer hands to another one is on nobody's disk."""
    armed = world.failpoints.arm("rebased", "kill", machine)
    world.struck(strike, machine)
    await _for(world, strike.values["seconds"])
    world.failpoints.disarm(armed)


async def power(world: "World", machine: "Machine", strike: Strike) -> None:
    """A machine loses power, and with it what its disk had not flushed; others hear nothing of it."""
    world.struck(strike, machine)
    machine.kill(power=True)
    await _for(world, strike.values["seconds"])
    machine.boot()


async def stop(world: "World", machine: "Machine", strike: Strike) -> None:
    """A process, or the whole machine, is stopped for a while: a debugger, a busy disk, a lid that was closed."""
    which = {"both": ("trainer", "sidecar")}.get(strike.values["what"], (strike.values["what"],))
    world.struck(strike, machine)
    await _stopped(world, [process for process in (machine.trainer, machine.sidecar) if process is not None and process.name in which], strike)


async def sleep(world: "World", machine: "Machine", strike: Strike) -> None:
    """A machine sleeps for an hour."""
    world.struck(strike, machine)
    await _stopped(world, [process for process in (machine.trainer, machine.sidecar) if process is not None], strike)


async def _stopped(world: "World", processes: list["Process"], strike: Strike) -> None:
    for process in processes:
        process.stop()
    await _for(world, strike.values["seconds"])
    for process in processes:
        if not process.dead:
            process.go_on()


async def partition(world: "World", machine: None, strike: Strike) -> None:
    """The net falls apart in two, and heals. Peer 0 is the dataset server."""
    numbers = strike.values["peers"]
    side = world.network.part([machine.peer for machine in world.machines if machine.number in numbers] + [SERVER] * (0 in numbers))
    world.struck(strike)
    await _for(world, strike.values["seconds"])
    world.network.heal(side)


def _one_side(rng: random.Random, world: "World") -> tuple[int, ...]:
    size = rng.choice([1, max(1, len(world.machines) // 3), len(world.machines) // 2])
    side = rng.sample(world.machines, min(size, len(world.machines)))
    helpers = [machine for machine in world.machines if isinstance(machine, Assistant)]
    if len(helpers) > 1 and world.dice("helpers alone").random() < _HELPERS_ALONE:
        side = helpers
    server = [0] if world.dice("server's side").random() < _WITH_SERVER else []
    return tuple(sorted([*server, *(machine.number for machine in side)]))


def _parted_seconds(rng: random.Random, world: "World") -> float:
    seconds = rng.choice([3.0, 15.0, 60.0])
    return _LONG_SECONDS if world.dice("long partition").random() < _LONG else seconds


async def reset(world: "World", machine: None, strike: Strike) -> None:
    """For a minute every hundredth message breaks its stream."""
    world.struck(strike)
    world.network.reset_share = 0.01
    await _for(world, strike.values["seconds"])
    world.network.reset_share = 0.0


async def disk(world: "World", machine: "Machine", strike: Strike) -> None:
    """A disk is full for a while."""
    world.struck(strike, machine)
    machine.disk.full = True
    await _for(world, strike.values["seconds"])
    machine.disk.full = False


async def rot(world: "World", machine: "Machine", strike: Strike) -> None:
    """A machine is killed, and comes back with a damaged file: its newest state, a round's mean, its list of peers met or the host's words."""
    world.struck(strike, machine)
    machine.kill()
    found = [path for path in sorted(machine.disk.names) if path.endswith(strike.values["what"])]
    if found:
        machine.disk.rot(found[-1], strike.values["how"])
        world.checks.rotted(machine, found[-1])
    await _for(world, strike.values["seconds"])
    machine.boot()


async def discard(world: "World", machine: None, strike: Strike) -> None:
    """The host names the newest state as forged. Whoever stands on it ends as it hears of that, and is started again."""
    if forged := world.tip():
        world.struck(strike)
        world.server.discard(forged)


async def extend(world: "World", machine: None, strike: Strike) -> None:
    """The host puts the run's end off by a number of rounds; not any more where somebody has ended, and may have left with the last state, nor once
    the server has counted the run's samples: it tells peers that the run is over, and who hears that leaves (docs/decisions/0008)."""
    if world.run.total_samples and world.server.book.state != "ended" and not any(machine.over for machine in world.machines):
        world.struck(strike)
        world.server.orders.total = max(world.server.orders.total, world.run.total_samples) + strike.values["rounds"] * world.run.target_batch_size


async def slow(world: "World", machine: "Machine", strike: Strike) -> None:
    """A link has a fiftieth of its bandwidth and twenty times its latency, or a machine computes twenty times slower, for a while."""
    world.struck(strike, machine)
    link, (up, latency) = machine.link, (machine.link.up_mbit, machine.link.latency)
    if strike.values["what"] == "link":
        link.up_mbit, link.latency = up / 50, latency * 20
    else:
        machine.slowness = 20.0
    await _for(world, strike.values["seconds"])
    link.up_mbit, link.latency, machine.slowness = up, latency, 1.0


async def clock(world: "World", machine: "Machine", strike: Strike) -> None:
    """A machine's clock is set, by up to 1.5 s."""
    world.struck(strike, machine)
    machine.skew = strike.values["skew"]


async def server(world: "World", machine: None, strike: Strike) -> None:
    """The dataset server is killed, and is away for a second or for minutes."""
    world.struck(strike)
    world.server.crash()
    await _for(world, strike.values["seconds"])
    _back(world)


async def answers(world: "World", machine: None, strike: Strike) -> None:
    """For a minute the dataset server is slow, or every fifth of its answers is lost on the way: what was asked is asked again."""
    world.struck(strike)
    world.server.slow_seconds, world.server.lost = (40.0, 0.0) if strike.values["what"] == "slow" else (0.0, 0.2)
    await _for(world, strike.values["seconds"])
    world.server.slow_seconds = world.server.lost = 0.0


async def ledger(world: "World", machine: None, strike: Strike) -> None:
    """The dataset server's disk is full for a while."""
    world.struck(strike)
    world.server.full(True)
    await _for(world, strike.values["seconds"])
    world.server.full(False)


async def pause(world: "World", machine: None, strike: Strike) -> None:
    """The host pauses the run for a quarter of a minute."""
    world.struck(strike)
    world.server.orders.state = "paused"
    await _for(world, strike.values["seconds"])
    world.server.orders.state = "running"


async def exodus(world: "World", machine: None, strike: Strike) -> None:
    """The dataset server is away for many rounds, and all who were there leave for good, one after the other, each after another has come."""
    world.struck(strike)
    world.server.crash()
    await _for(world, strike.values["alone"])
    for leaving in world.live:
        if world.calm:
            break
        world.add_peer()
        await _for(world, strike.values["seconds"])
        if leaving.alive and not world.calm:
            leaving.kill()
            _gone(world, leaving)
    _back(world)


async def guests(world: "World", machine: None, strike: Strike) -> None:
    """Some come at once, as where a link to the run was posted, and are stopped by their owners after a while: they leave in order, for good.
    One that something else kills meanwhile comes back, and stays."""
    world.struck(strike)
    came = [world.add_peer() for _ in range(strike.values["peers"])]
    await _for(world, strike.values["seconds"])
    leaving, until = [guest for guest in came if guest.alive], world.loop.time() + _LEAVING_SECONDS
    for guest in leaving:
        guest.leave()
    while any(guest.alive for guest in leaving) and world.loop.time() < until:
        await asyncio.sleep(0.5)
    for guest in leaving:
        if guest.alive:
            guest.kill()
            _gone(world, guest)
        elif guest.over:
            _gone(world, guest)


async def relief(world: "World", machine: None, strike: Strike) -> None:
    """The dataset server is away for more rounds than a state names, and a newcomer relieves all who made them as soon as it has their state.
    It goes on beside a gap in what the server knows, until the others come back and tell of it."""
    world.struck(strike)
    world.server.crash()
    last, until = world.checks.round + strike.values["rounds"], world.loop.time() + _RELIEF_SECONDS
    while world.checks.round < last and world.loop.time() < until and not world.calm:
        await asyncio.sleep(1.0)
    here, newcomer, until = world.live, world.add_peer(), world.loop.time() + _NEWCOMER_SECONDS
    while not world.checks.stands(newcomer) and world.loop.time() < until and not world.calm:
        await asyncio.sleep(0.05)
    relieved = [leaving for leaving in here if leaving.alive]
    for leaving in relieved:
        leaving.kill()
    _back(world)
    await _for(world, strike.values["seconds"])
    for leaving in relieved:
        leaving.boot()


async def crowd(world: "World", machine: None, strike: Strike) -> None:
    """Some come at once, and as soon as each of them has a state, all who were there before are killed, one after the other: who is left has met
    few of those who made it, or nobody. They are started again after a while, or never."""
    world.struck(strike)
    here, came = world.live, [world.add_peer() for _ in range(strike.values["peers"])]
    until, killed = world.loop.time() + _NEWCOMER_SECONDS, []
    while not all(map(world.checks.stands, came)) and world.loop.time() < until and not world.calm:
        await asyncio.sleep(0.05)
    for maker in here:
        if not maker.alive or world.calm:
            continue
        maker.kill()
        if strike.values["back"]:
            killed.append(maker)
        else:
            _gone(world, maker)
        await _for(world, strike.values["apart"])
    await _for(world, strike.values["seconds"])
    for maker in killed:
        maker.boot()


def _back(world: "World") -> None:
    """The dataset server is there again, unless another strike has ended meanwhile that had it killed as well."""
    if world.server.away:
        world.server.boot()


async def failpoint(world: "World", machine: "Machine", strike: Strike) -> None:
    """A peer dies, is stopped or cut off, or loses the other end, at one named point of a round (`peer/sync/engine/failpoints.py`): when it comes there next."""
    armed = world.failpoints.arm(strike.values["name"], strike.values["action"], machine)
    world.struck(strike, machine)
    await _for(world, strike.values["seconds"])
    if world.failpoints.disarm(armed):
        machine.boot()


# ------------------------------------------------------------- what there is

Draw = Callable[[random.Random, "World"], Any]


def _of(*values: Any) -> Draw:
    return lambda rng, world: rng.choice(values)


def _yes(value: str) -> bool:
    return value == "True"


def _numbers(value: str) -> tuple[int, ...]:
    return tuple(int(number) for number in value.split("+") if number)


@dataclass(frozen=True)
class Fault:
    """befall: strikes, waits, undoes. values: what a strike of it is described by, and how each is read. dice: how each is drawn.

    as_rare: how many times as long as between other faults' strikes.
    """

    befall: Callable[..., Awaitable[None]]
    values: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)
    dice: Mapping[str, Draw] = field(default_factory=dict)
    hits_a_peer: bool = True
    as_rare: float = 1.0

    def draw(self, rng: random.Random, world: "World") -> dict[str, Any]:
        return {name: self.dice[name](rng, world) for name in self.values}


FAULTS = {
    "kill": Fault(
        kill, {"seconds": float, "back": _yes}, {"seconds": _of(1.0, 10.0, 60.0), "back": lambda rng, world: rng.random() < 0.7}
    ),
    "sidecar": Fault(sidecar),
    "handover": Fault(handover, {"seconds": float}, {"seconds": _of(30.0)}),
    "power": Fault(power, {"seconds": float}, {"seconds": _of(5.0, 30.0, 300.0)}),
    "stop": Fault(
        stop, {"what": str, "seconds": float}, {"what": _of("sidecar", "trainer", "both"), "seconds": _of(2.0, 8.0, 25.0, 90.0)}
    ),
    "sleep": Fault(sleep, {"seconds": float}, {"seconds": _of(3600.0)}),
    "partition": Fault(partition, {"peers": _numbers, "seconds": float}, {"peers": _one_side, "seconds": _parted_seconds}, hits_a_peer=False),
    "reset": Fault(reset, {"seconds": float}, {"seconds": _of(60.0)}, hits_a_peer=False),
    "disk": Fault(disk, {"seconds": float}, {"seconds": _of(2.0, 20.0)}),
    "slow": Fault(slow, {"what": str, "seconds": float}, {"what": _of("link", "machine"), "seconds": _of(60.0)}),
    "clock": Fault(clock, {"skew": float}, {"skew": lambda rng, world: round(rng.uniform(-1.5, 1.5), 3)}),
    "server": Fault(server, {"seconds": float}, {"seconds": _of(1.0, 20.0, 180.0)}, hits_a_peer=False),
    "answers": Fault(answers, {"what": str, "seconds": float}, {"what": _of("slow", "lost"), "seconds": _of(60.0)}, hits_a_peer=False),
    "ledger": Fault(ledger, {"seconds": float}, {"seconds": _of(2.0, 20.0)}, hits_a_peer=False),
    "pause": Fault(pause, {"seconds": float}, {"seconds": _of(15.0)}, hits_a_peer=False),
    "failpoint": Fault(
        failpoint,
        {"name": str, "action": str, "seconds": float},
        {"name": _of(*FAILPOINTS), "action": _of("kill", "peer", "power", "fail", "stop", "cut"), "seconds": _of(10.0, 30.0)},
    ),
    "exodus": Fault(
        exodus, {"alone": float, "seconds": float}, {"alone": _of(10.0, 60.0), "seconds": _of(10.0, 20.0)}, hits_a_peer=False, as_rare=10.0
    ),
    "rot": Fault(
        rot,
        {"what": str, "how": str, "seconds": float},
        {"what": _of(".state", ".state", ".mean", "/met.json", "/bans.json"), "how": _of("bit", "line", "end"), "seconds": _of(1.0, 10.0)},
        as_rare=4.0,
    ),
    "discard": Fault(discard, hits_a_peer=False, as_rare=12.0),
    "extend": Fault(extend, {"rounds": int}, {"rounds": _of(1, 4)}, hits_a_peer=False, as_rare=2.0),
    "guests": Fault(
        guests, {"peers": int, "seconds": float}, {"peers": _of(1, 3, 6), "seconds": _of(20.0, 60.0)}, hits_a_peer=False, as_rare=4.0
    ),
    "relief": Fault(
        relief, {"rounds": int, "seconds": float}, {"rounds": _of(10, 14), "seconds": _of(20.0, 40.0)}, hits_a_peer=False, as_rare=4.0
    ),
    "crowd": Fault(
        crowd,
        {"peers": int, "apart": float, "seconds": float, "back": _yes},
        {
            "peers": _of(1, 2, 4), "apart": lambda rng, world: round(rng.uniform(0, 3), 1), "seconds": _of(10.0, 40.0, 120.0),
            "back": lambda rng, world: rng.random() < 0.5,
        },
        hits_a_peer=False,
        as_rare=8.0,
    ),
}
