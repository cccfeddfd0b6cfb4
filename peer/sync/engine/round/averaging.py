"""Exact all-reduce: each reducer averages one share of the vector, encodes the average once, and sends the same bytes to all.

All or nothing: a part that is not averaged over ALL members fails the round at whoever misses it. No peer ever adopts a mixed
average, and every peer that finishes holds the same bytes (stock hivemind returns differences, compressed for each sender).

Memory of one round: the encoded contribution and the encoded mean, and at a reducer PARTS_OF_A_SENDER of each sender; no float copy of
more than one part.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from peer.sync.engine import failpoints
from peer.sync.engine.buffers import IN_MEMORY, Buffers
from peer.sync.engine.codec import Part, Wire, add_up
from peer.sync.engine.net.messages import InputPart, M, MeanPart, Share
from peer.sync.engine.net.streams import CONNECT_SECONDS, Broken, Channel, PeerLost, Refused, Streams
from peer.sync.engine.round.clipping import UNCLIPPED, Clipping, ReceivedMeans
from peer.sync.engine.round.excerpts import Auditor, Excerpts, NoAuditor
from peer.sync.engine.round.groups import Group
from peer.sync.engine.round.reduction import COME_SECONDS, PART_SECONDS, SLOWEST_BYTES_PER_SECOND, Reduction, Run, Strangers, Traffic, names
from peer.sync.engine.round.share_seals import Given, SealedShare, ShareSeals, part_hash
from peer.sync.engine.vectors import Reused
from swarm.slices import tree_digest
from swarm.statements import Input
from swarm.tasks import end_tasks, set_within, within

log = logging.getLogger(__name__)

REDUCE = "distributed-diffusion.reduce.5"
_WINDOW = 8
PARTS_OF_A_SENDER = _WINDOW + 1
"""How many of a member's parts a reducer holds at most: those that wait for others', and one on its way."""
_KNOWN_SOON_SECONDS = 10.0
_REMEMBERED_FAILURES = 8
_GROUPS_GIVEN = 2
"""Groups whose means others may still take from us: the one that is averaged, and the one before. Whoever takes a part in just under its 30 s
would have us keep a whole mean for hours, and one more of each round."""
_HEARD_SECONDS = 5.0
_EXPLAINED_SECONDS = 1.0
"""Whoever gives up because of another says so within that, on the streams of its own share."""


class RoundFailed(Exception):
    """The average is incomplete at this peer; whether others have it, their heads tell.

    culprits: whom we saw cause it; slow: those of them that went away without a word, as the honest may; told: a reducer's word about
    others, None if there is none. at_once: whether the next attempt need not wait, since somebody will not be in it. void: whether we know
    that nobody has the whole mean, nor ever will.
    """

    silent: frozenset[str] = frozenset()
    void = False

    def __init__(self, reason: str, culprits: Collection[str] = (), slow: Collection[str] = (), told: "_Told | None" = None):
        super().__init__(reason)
        self.culprits, self.slow, self.told = frozenset(culprits), frozenset(slow), told
        self.at_once = bool(culprits)


class _Told(PeerLost):
    """A reducer failed, and said to whom that is owed: a word against a word."""

    def __init__(self, reason: str, accuser: str, accused: Collection[str], *, hearsay: bool):
        super().__init__(reason, accused, hearsay=hearsay)
        self.accuser = accuser


class _Gone(PeerLost):
    """Somebody's stream ended without a word. It may be dead, or have given up for a reason that it tells on another stream."""


@dataclass(frozen=True)
class Mean:
    """encoded: the weighted mean, (wire.num_bytes,) uint8. square_norm: the sum of squares of its decoded values, as the reducers
    worked it out; the same bits at every member, which no sum over a whole vector at each peer would be."""

    encoded: Tensor
    square_norm: float
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    shares: dict[str, SealedShare] = field(default_factory=dict, compare=False)
    """Reducer -> what it signed for us; in a run for members."""
    sent: dict[str, tuple[bytes, ...]] = field(default_factory=dict, compare=False)
    """Reducer -> the hashes of the parts that we sent for its share, ours included; likewise."""
    group: str = field(default="", compare=False)
    """The name of the group that made it, for the state's header; likewise."""
    excerpts: Excerpts | None = field(default=None, compare=False)
    """What some members sent for our share, where an auditor drew them."""


class Averager:
    """Averages vectors that travel by `wire` within groups. seals: for reducers' signatures; None: nobody asks for any. auditor: draws members."""

    def __init__(
        self,
        peer_id: str,
        streams: Streams,
        wire: Wire,
        clipping: Clipping = UNCLIPPED,
        buffers: Buffers = IN_MEMORY,
        seals: ShareSeals | None = None,
        auditor: Auditor | None = None,
    ):
        self._seals, self._auditor = seals, auditor or NoAuditor()
        self._peer_id, self._streams, self._wire, self._clipping = peer_id, streams, wire, clipping
        self.memory = Reused(wire.num_bytes, buffers.private)
        """Of encoded means."""
        self._reductions: dict[str, Reduction] = {}
        self._failed: dict[str, PeerLost] = {}
        """Groups whose share we have given up, the last few: a member that dials us only now is told why."""
        self._serving: dict[str, dict[asyncio.Task, None]] = {}
        """Group -> the handlers of those who take its means from us."""
        self._announced = asyncio.Condition()

    async def start(self) -> None:
        await self._streams.serve(REDUCE, self._serve, of_round=True)

    async def average(self, group: Group, mine: Tensor | None, strangers: Strangers | None = None) -> Mean:
        """The mean, weighted by samples, of all members' vectors. Raises RoundFailed.

        mine: our vector, encoded, (num_bytes,) uint8; None at a reducer that is no member.
        """
        assert (mine is not None) == any(member.peer == self._peer_id for member in group.members)
        clock = asyncio.get_running_loop().time
        began = clock()
        received = ReceivedMeans(self._clipping.longest_mean(group.weighed, group.norms))
        run = Run(group, mine, self.memory.take(), [0.0] * len(self._wire.parts), strangers or Strangers(), received)
        shares = group.shares(self._wire.parts)
        own, reduction, excerpts, failure = shares.pop(self._peer_id, []), None, None, PeerLost("it left")
        run.missing = {reducer: len(share) for reducer, share in shares.items() if share}
        tasks = exchanges = [asyncio.create_task(self._exchange(reducer, share, run)) for reducer, share in shares.items() if share]
        if own:
            parts = [self._wire.parts[index] for index in own]
            excerpts = Excerpts(parts, partial(self._auditor.draw, group.members))
            reduction = self._reductions[group.id] = Reduction(run, parts, own, self._wire, self._clipping, excerpts)
            jobs = self._reduce_own(reduction, run), reduction.fail_unless_all_come(), self._hurry_strangers(reduction, run)
            tasks = [*(asyncio.create_task(job) for job in jobs), *exchanges]
        try:
            # A peer that reduces nothing waits longer: the reducers then tell it who was late.
            await _all(tasks, longest_seconds(self._wire.num_bytes) + (0 if own else _HEARD_SECONDS))
            failure = None
        except (PeerLost, ValueError, asyncio.TimeoutError) as error:
            failure = await _explanation(self._as_lost(error, run, reduction), exchanges)
            self._give_up(group.id, failure)
            raise self._round_failed(failure, run, reduction) from None
        finally:
            # Whoever still takes averages from us does so in a handler of its own, which this does not end; whoever waits for one
            # that will not be, also because we were cancelled, need not sit out its deadline.
            if failure is not None:
                self._give_up(group.id, failure)
            self._reductions.pop(group.id, None)
            await end_tasks(*tasks)
        run.traffic.seconds = clock() - began
        name = group.id if self._seals is not None else ""
        return Mean(run.result, add_up(run.squares), run.traffic, run.shares, run.sent, name, excerpts)

    def _as_lost(self, error: Exception, run: "Run", reduction: "Reduction | None") -> PeerLost:
        if isinstance(error, PeerLost):
            return error
        if isinstance(error, ValueError):
            return PeerLost(str(error))
        # Reducers whose means we miss may have waited for the same late member as we.
        return PeerLost("it took too long", (reduction.late() if reduction is not None else set()) or run.missing.keys())

    def _round_failed(self, failure: PeerLost, run: "Run", reduction: "Reduction | None") -> RoundFailed:
        culprits = set(failure.culprits) - {self._peer_id}
        if isinstance(failure, _Told):
            failed = RoundFailed(str(failure), told=failure)
        else:
            failed = RoundFailed(str(failure), culprits, culprits if isinstance(failure, _Gone) else ())
        failed.void = run.void or (reduction is not None and reduction.void)
        return failed

    def _give_up(self, group_id: str, failure: PeerLost) -> None:
        """Tell all who take our share of a group, if we have one, why there is none: what we were told or can only guess, as such."""
        reduction = self._reductions.pop(group_id, None)
        if reduction is None:
            return
        # Who says of nobody whose fault it was, is named for that itself.
        named = failure.culprits or ([failure.accuser] if isinstance(failure, _Told) else [])
        lost = PeerLost(f"{self._peer_id[-6:]} gave up: {failure}", named, hearsay=isinstance(failure, _Told | _Gone))
        reduction.fail(lost)
        lost.void = reduction.void
        self._failed[group_id] = lost
        while len(self._failed) > _REMEMBERED_FAILURES:
            del self._failed[next(iter(self._failed))]

    async def _hurry_strangers(self, reduction: "Reduction", run: "Run") -> None:
        """When all members' parts of our own share were there, a reducer that we have not met has them as well: it gives its next mean
        soon, or fails the round. Raises PeerLost."""
        await reduction.whole()
        loop = asyncio.get_running_loop()
        began, seconds = loop.time(), run.strangers.for_part(self._wire, len(run.group.reducers))
        while waited := {peer: max(run.last_mean.get(peer, 0.0), began) for peer in run.missing if peer in run.strangers.peers}:
            if slow := sorted(peer for peer, since in waited.items() if loop.time() >= since + seconds):
                raise PeerLost(f"{names(slow)} gave no mean for {seconds:.0f} s", slow)
            run.news.clear()
            await set_within(min(waited.values()) + seconds - loop.time(), run.news)

    async def _reduce_own(self, reduction: "Reduction", run: "Run") -> None:
        if run.mine is not None:
            reduction.came(self._peer_id)
        async with self._announced:
            self._announced.notify_all()
        if run.mine is not None and self._seals is not None:
            reduction.inputs[self._peer_id] = await self._signed_input(self._peer_id, reduction.parts, run)
        for index, part in enumerate(reduction.parts):
            if run.mine is not None:
                reduction.add(self._peer_id, index, part.bytes_of(run.mine))
            await reduction.mean(index)

    async def _signed_input(self, reducer: str, parts: Sequence[Part], run: "Run") -> Input:
        """Ours for all that we send to `reducer`."""

        def sign() -> Input:  # in a thread: a share of 860 MB takes a third of a second to hash, a signature 1 ms
            run.sent[reducer] = tuple(part_hash(part, part.bytes_of(run.mine)) for part in parts)
            return self._seals.sign_input(run.group.id, reducer, run.sent[reducer])

        return await asyncio.get_running_loop().run_in_executor(None, sign)

    async def _exchange(self, reducer: str, share: Sequence[int], run: "Run") -> None:
        """Send our part of a reducer's share to it, and take the averages back, both at once."""
        try:
            channel = await self._streams.open(reducer, REDUCE)
            with contextlib.closing(channel):
                await self._talk(channel, share, run)
        except Refused as error:
            run.void |= error.void
            accused = [peer for peer in error.culprits if peer != reducer]
            if accused or error.hearsay:
                raise _Told(str(error), reducer, accused, hearsay=error.hearsay) from None
            raise PeerLost(str(error), [reducer]) from None  # it fails its share and names nobody: itself, then
        except Broken as error:
            raise _Gone(str(error), [reducer]) from None
        except PeerLost as error:
            raise PeerLost(str(error), [reducer]) from None

    async def _talk(self, channel: Channel, share: Sequence[int], run: "Run") -> None:
        parts = self._wire.parts

        async def send() -> None:
            for count, index in enumerate(share if run.mine is not None else ()):
                message = InputPart()
                if self._seals is not None and index == share[-1]:
                    signed = await self._signed_input(channel.peer, [parts[index] for index in share], run)
                    message = InputPart(signature=signed.signature, key=signed.key)
                await channel.send(message, memoryview(parts[index].bytes_of(run.mine).numpy()), seconds=PART_SECONDS)
                await failpoints.part_sent(count, len(share), self._peer_id)

        # The reducer gives up before us, and tells us because of whom; a stranger may be believed to wait for a member, but not for long.
        is_stranger = channel.peer in run.strangers.peers
        patience = run.strangers.for_part(self._wire, len(run.group.reducers)) if is_stranger else PART_SECONDS

        async def receive() -> None:
            given = Given()
            for index in share:
                room = parts[index].bytes_of(run.result)
                told = await _receive(channel, MeanPart, parts[index], room, COME_SECONDS + patience)
                if self._seals is not None:
                    given.add(parts[index], room, told.square)
                    if index == share[-1]:
                        sealed = self._seals.check(channel.peer, run.group.id, given.digest(told.inputs), told.signature, told.key)
                        made_of = self._seals.check_inputs(channel.peer, len(run.group.members), told.inputs, told.made_of)
                        shown = {"hashes": tuple(given.hashes), "squares": given.squares, "inputs": told.inputs, "made_of": made_of}
                        run.shares[channel.peer] = replace(sealed, **shown)
                run.got_mean(channel.peer, index, parts[index], told.square)

        tasks = []
        try:
            await channel.send(Share(group=run.group.id), seconds=CONNECT_SECONDS)
            sending, receiving = asyncio.create_task(send()), asyncio.create_task(receive())
            tasks = [receiving, sending]
            await _all(tasks)
        finally:
            await end_tasks(*tasks)
            run.count(channel)

    async def _serve(self, channel: Channel) -> None:
        """Take a member's parts of our share, and give it the averages."""
        share, _ = await channel.receive(Share, seconds=CONNECT_SECONDS)
        reduction = await self._reduction(share.group)
        reduction.came(channel.peer)
        with self._serves(share.group):
            await self._take_and_give(channel, share.group, reduction)

    @contextlib.contextmanager
    def _serves(self, group_id: str) -> Iterator[None]:
        """One more of that group; those of the groups before the last one are ended."""
        handler = asyncio.current_task()
        self._serving.setdefault(group_id, {})[handler] = None
        for former in list(self._serving)[:-_GROUPS_GIVEN]:
            for late in self._serving.pop(former):
                late.cancel()
        try:
            yield
        finally:
            handlers = self._serving.get(group_id, {})
            handlers.pop(handler, None)
            if not handlers:
                self._serving.pop(group_id, None)

    async def _take_and_give(self, channel: Channel, group_id: str, reduction: Reduction) -> None:
        async def take() -> None:
            # The same memory again and again.
            room = torch.empty(PARTS_OF_A_SENDER, max(part.num_bytes for part in reduction.parts), dtype=torch.uint8)
            hashes = []
            for index, part in enumerate(reduction.parts if channel.peer in reduction.senders else ()):
                data = room[index % len(room)][: part.num_bytes]
                said = await _receive(channel, InputPart, part, data, PART_SECONDS)
                if self._seals is not None:
                    hashes.append(part_hash(part, data))
                    if index == len(reduction.parts) - 1:  # before it is averaged: a group without this is void
                        sent = Input(peer=channel.peer, digest=tree_digest(hashes), signature=said.signature, key=said.key)
                        reduction.inputs[channel.peer] = self._seals.check_input(group_id, sent)
                reduction.add(channel.peer, index, data)
                if index >= _WINDOW:
                    await reduction.mean(index - _WINDOW)

        async def give() -> None:
            for index in range(len(reduction.parts)):
                data, square = await reduction.mean(index)
                is_signed = self._seals is not None and index == len(reduction.parts) - 1
                signature, key, inputs = await reduction.signature(self._seals) if is_signed else ("", "", "")
                made_of = reduction.shown_inputs if is_signed else ()
                message = MeanPart(square=square, inputs=inputs, made_of=made_of, signature=signature, key=key)
                await channel.send(message, memoryview(data.numpy()), seconds=PART_SECONDS)

        taking, _ = tasks = [asyncio.create_task(take()), asyncio.create_task(give())]
        try:
            await _all(tasks)
        finally:
            await end_tasks(*tasks)
            reduction.run.count(channel)
            reasons = [task.exception() for task in tasks if not task.cancelled() and task.exception()]
            # A member whose parts are all here is in the average, even if it takes nothing back.
            if taking.cancelled() or taking.exception():
                reduction.fail(_fell_out(channel.peer, reasons[0] if reasons else None))

    async def _reduction(self, group_id: str) -> "Reduction":
        # A member may hear of the group, and dial us, a moment before the leader's message reaches us.
        if group_id in self._failed:
            raise self._failed[group_id].with_traceback(None)  # else it grows with each raise, and keeps what each had in hand
        try:
            async with self._announced:
                await within(_KNOWN_SOON_SECONDS, self._announced.wait_for(lambda: group_id in self._reductions))
            return self._reductions[group_id]
        except (asyncio.TimeoutError, KeyError):
            raise PeerLost("unknown group") from None


def _fell_out(peer: str, error: BaseException | None) -> PeerLost:
    """What becomes of a share of which a member's parts will not come."""
    reason = f"{peer[-6:]} fell out: {error or 'we are closing'}"
    if error is None:
        return PeerLost(reason)
    return _Gone(reason, [peer], hearsay=True) if isinstance(error, Broken) else PeerLost(reason, [peer])


async def _explanation(failure: PeerLost, exchanges: Collection[asyncio.Task]) -> PeerLost:
    """Why the round failed, where `failure` leaves that open: who went away may yet be heard to have done so because of another."""
    loop = asyncio.get_running_loop()
    until, open_ = loop.time() + _EXPLAINED_SECONDS, set(exchanges)
    while _doubt(failure) and open_ and loop.time() < until:
        done, open_ = await asyncio.wait(open_, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)
        reasons = [task.exception() for task in done if not task.cancelled()]
        failure = min([failure, *(reason for reason in reasons if isinstance(reason, PeerLost))], key=_doubt)
    return failure


def _doubt(failure: PeerLost) -> int:
    """None where somebody was seen at fault, or is named by one who saw it; more where one went away; most where others only heard.

    Of these the one that names nobody: the others may have heard it from that one.
    """
    if isinstance(failure, _Told):
        return 2 + bool(failure.culprits) if failure.hearsay else 0
    return 1 if isinstance(failure, _Gone) else 0


def longest_seconds(num_bytes: int) -> float:
    """For how long a group averages vectors that travel as `num_bytes`, before it gives up."""
    return 60 + 2 * num_bytes / SLOWEST_BYTES_PER_SECOND


async def _receive(channel: Channel, kind: type[M], part: Part, room: Tensor, seconds: float) -> M:
    """One encoded part into `room`, of the right length; decoding it checks its values. The message that came with it. Raises PeerLost."""
    message, count = await channel.receive_into(kind, memoryview(room.numpy()), seconds=seconds)
    try:
        part.check_length(room[:count])
    except ValueError as error:
        raise PeerLost(f"{channel.peer[-6:]} sent {error}") from None
    return message


async def _all(tasks: list[asyncio.Task], seconds: float | None = None) -> None:
    """Wait for all of them. Raises the error of a task; of several, that of the first in the list. After `seconds` it raises TimeoutError.

    Not `wait_for`: cancelled while a stream breaks, it leaves an error behind that nobody hears, and asyncio shouts about it.
    """
    _, late = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done():
            task.result()
    if late:
        raise asyncio.TimeoutError
