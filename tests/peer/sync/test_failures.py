"""Every failpoint of a round, and a peer that fails there: the others commit their next round, and the one that failed comes back.

A point is armed once; whoever reaches it first is the victim. In one process, "dies" ends its node and all that it runs, "is cut off"
breaks the stream it is at, "is slow" holds it until the others have gone on without it.
"""

import asyncio

import pytest
import torch

from peer.sync.engine import codec, failpoints, replica
from peer.sync.engine.codec import Wire
from peer.sync.engine.net.streams import Broken, PeerLost
from tests.peer.sync.replicas import Peer, check_invariants, make_run, peers
from tests.peer.sync.swarm_tools import PART, named, until

TWO_CHUNKS = (1 << 20) + 1000
"""Elements of a state that travels in two chunks."""
SECONDS = 160.0
PAUSES = (0.25, 0.5, 1, 2, 4, 8)
"""Between attempts: a quarter of the product's."""

PARTS = ("first_part_sent", "half_of_parts_sent", "before_last_part")
TRANSFER = ("donor_half_way", "fetch_half_way")
DEATHS = {
    "forming a group": ("called", "joined", "group_closed"),
    "sending parts": PARTS,
    "committing": ("mean_complete", "outer_step", "before_publish"),
    "keeping a state": ("saved", "before_final"),
    "handing out a state": TRANSFER,
}
BREAKS = {"averaging": ("joined", "half_of_parts_sent"), "handing out a state": TRANSFER}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A dead peer's record promises samples until it was missed from three attempts, which takes 7 to 15 s with the product's pauses."""
    monkeypatch.setattr(replica, "_BACKOFF_SECONDS", PAUSES)


def size_for(what: str, monkeypatch) -> int:
    """Ten parts, so that each member sends several to each reducer; two chunks where a state is handed out."""
    if what == "handing out a state":
        return TWO_CHUNKS
    monkeypatch.setattr(codec, "PART_ELEMENTS", PART)
    return 10 * PART


class Trap:
    """Does `what` to the first peer that reaches `point`."""

    def __init__(self, point: str, what):
        self.point, self.what, self.victim = point, what, ""

    async def __call__(self, point: str, peer: str) -> None:
        if point == self.point and not self.victim:
            self.victim = peer
            await self.what(peer)


@pytest.fixture
def trap(monkeypatch):
    def arm(point, what) -> Trap:
        monkeypatch.setattr(failpoints, "hook", Trap(point, what))
        return failpoints.hook

    return arm


def lineage(peer: Peer, everyone) -> list[dict]:
    """The rounds that lead from the first state to `peer`'s, as any of the peers wrote them down; empty when one is not there yet."""
    lines = {line["digest"]: line for each in everyone for line in each.rounds()}
    found, digest, first = [], peer.head.digest, everyone[0].base.digest
    while digest != first and digest in lines:
        found.append(lines[digest])
        digest = lines[digest]["parent"]
    return found if digest == first else []


def balanced(peer: Peer, everyone) -> bool:
    """Whether every sample of this peer is in its state once, waiting, or given back; and the state's count is what its rounds add up to."""
    rounds = lineage(peer, everyone)
    own = sum(samples for line in rounds for who, number, samples in line["members"] if who == peer.id and number > peer.began_with)
    total = sum(samples for line in rounds for _, _, samples in line["members"])
    landed = peer.at == peer.head.digest and total == peer.head.header.samples
    return landed and peer.trained == own + peer.waiting + peer.dropped


def contributions(lines) -> set[tuple[str, int, int]]:
    """Peer, number and samples of each."""
    return {tuple(member) for line in lines for member in line["members"]}


async def die(peer: Peer, bystanders) -> None:
    """As a killed process: nothing of it runs on, and its connections end."""
    ending = asyncio.create_task(peer.stop())
    bystanders.append(ending)
    await asyncio.Event().wait()  # cancelled by its end


async def back(nodes, gone: Peer, knows: Peer, **options) -> Peer:
    """The peer that died, started again from what is on its disk. Its number goes on, since that was on disk before it was used."""
    nodes.maddrs = await knows.node.maddrs()
    state = gone.store.load(gone.run.digest, gone.base.header.schema, gone.base.buffer.num_bytes, gone.run.target_batch_size)
    node = await nodes.node(again=gone.node)
    return await Peer(nodes, node, gone.run, state=state, number=gone.number, **options).start(nodes)


async def go_on(everyone, others) -> None:
    """The others commit two rounds more, of which one began after whatever happened before."""
    at = max(peer.head.header.round for peer in everyone)
    await until(lambda: all(peer.head.header.round >= at + 2 for peer in others), SECONDS)


async def average_together(one: Peer, others) -> None:
    at = max(peer.head.header.round for peer in (one, *others))
    await until(lambda: any(one.id in {m[0] for m in line["members"]} and line["round"] > at for line in others[0].rounds()), SECONDS)


def of_one_lineage(living, everyone) -> bool:
    """Whether all are on the way to one state: a branch that a single peer made is left as soon as it hears of the better one."""
    digests = {line["digest"] for peer in living for line in lineage(peer, everyone)}
    longest = max(living, key=lambda peer: peer.head.header.samples)
    return digests == {line["digest"] for line in lineage(longest, everyone)}


async def audit(living, everyone) -> None:
    await until(lambda: of_one_lineage(living, everyone) and all(balanced(peer, everyone) for peer in living), SECONDS)
    check_invariants(*everyone)


@pytest.mark.parametrize("what", DEATHS)
def test_a_peer_that_dies_at_any_point_stops_nobody_and_comes_back(virtual, trap, monkeypatch, what):
    """One swarm for several failpoints: each time another peer dies, the others go on without it, and it comes back to them."""

    async def scenario(nodes):
        size = size_for(what, monkeypatch)
        living = await peers(nodes, 3, make_run(), size=size)
        everyone = list(living)
        await until(lambda: min(peer.head.header.round for peer in living) >= 1, SECONDS)
        for point in DEATHS[what]:
            with named(f"after the failpoint {point}"):
                # A newcomer's node is there before anybody may die: it could be the one by whose address it joins.
                newcomers = [Peer(nodes, await nodes.node(), living[0].run, size=size)] if point in TRANSFER else []
                living, everyone = living + newcomers, everyone + newcomers
                ends, by_id = [], {peer.id: peer for peer in living}
                armed = trap(point, lambda peer, by_id=by_id, ends=ends: die(by_id[peer], ends))
                for newcomer in newcomers:
                    await newcomer.start(nodes)
                await until(lambda ends=ends: ends and ends[0].done(), SECONDS)
                victim = by_id[armed.victim]
                others = [peer for peer in living if peer is not victim]
                await go_on(living, others)
                again = await back(nodes, victim, others[0], size=size)
                living = [*others, again]
                everyone.append(again)
                await average_together(again, others)
        await audit(living, everyone)

    virtual(scenario)


@pytest.mark.parametrize("what", BREAKS)
def test_a_stream_that_breaks_at_any_point_costs_a_retry(virtual, trap, monkeypatch, what):
    async def scenario(nodes):
        size = size_for(what, monkeypatch)
        living = await peers(nodes, 3, make_run(), size=size)
        await until(lambda: min(peer.head.header.round for peer in living) >= 1, SECONDS)
        for point in BREAKS[what]:
            with named(f"after the failpoint {point}"):

                async def cut_off(peer, point=point):
                    raise Broken(f"cut off at {point}")

                armed = trap(point, cut_off)
                if point in TRANSFER:
                    living.append(await Peer(nodes, await nodes.node(), living[0].run, size=size).start(nodes))
                await until(lambda armed=armed: armed.victim, SECONDS)
                victim = next(peer for peer in living if peer.id == armed.victim)
                await go_on(living, living)
                await average_together(victim, [peer for peer in living if peer is not victim])
        await audit(living, living)

    virtual(scenario)


def test_a_peer_that_is_slow_to_commit_holds_nobody_up(virtual, trap):
    async def scenario(nodes):
        trio = await peers(nodes, 3, make_run())
        await until(lambda: min(peer.head.header.round for peer in trio) >= 1, SECONDS)
        for point in ("mean_complete", "outer_step"):
            with named(f"after the failpoint {point}"):
                release = asyncio.Event()
                armed = trap(point, lambda peer, release=release: release.wait())
                await until(lambda armed=armed: armed.victim, SECONDS)
                victim = next(peer for peer in trio if peer.id == armed.victim)
                others = [peer for peer in trio if peer is not victim]
                await go_on(trio, others)
                release.set()
                await average_together(victim, others)
        await audit(trio, trio)

    virtual(scenario)


def cut_off_from(peer: Peer, far: set[str]):
    """No stream of `peer` reaches `far`, and their records are not found any more; returns what heals it."""
    node, streams, neighbours = peer.node, peer.replica._streams, peer.replica.neighbours
    open_stream, read = streams.open, node.records

    async def open_near(other, name):
        if other in far:
            raise PeerLost("the network is cut")
        return await open_stream(other, name)

    async def near_records(run_id):
        return {other: record for other, record in (await read(run_id)).items() if other not in far}

    streams.open, node.records = open_near, near_records
    neighbours._seen = {other: seen for other, seen in neighbours._seen.items() if other not in far}

    def heal():
        streams.open, node.records = open_stream, read

    return heal


def test_of_two_halves_that_went_on_apart_one_lineage_is_left_and_the_other_halfs_samples_are_given_back(virtual):
    async def scenario(nodes):
        four = await peers(nodes, 4, make_run())
        # Two pairs that never met stay apart (docs/internals.md).
        await until(lambda: all(other.id in peer.replica.met for peer in four for other in four if other is not peer))
        halves = four[:2], four[2:]
        ids = [{peer.id for peer in half} for half in halves]
        heal = [cut_off_from(peer, far) for half, far in zip(halves, reversed(ids), strict=True) for peer in half]
        at = max(peer.head.header.round for peer in four)
        await until(lambda: min(peer.head.header.round for peer in four) >= at + 2, SECONDS)
        assert not {peer.head.digest for peer in halves[0]} & {peer.head.digest for peer in halves[1]}
        for mend in heal:
            mend()

        def of_both_halves(line):
            return all({member[0] for member in line["members"]} & half for half in ids)

        at = max(peer.head.header.round for peer in four)
        await until(lambda: any(line["round"] > at and of_both_halves(line) for line in four[0].rounds()), SECONDS)
        await audit(four, four)
        kept = {line["digest"]: line for line in lineage(four[0], four)}
        lost = [line for peer in four for line in peer.rounds() if line["digest"] not in kept]
        # One that was averaged with others once more is in a state of either branch.
        given_back = contributions(lost) - contributions(kept.values())
        assert given_back
        for peer in four:
            assert peer.dropped >= sum(samples for who, _, samples in given_back if who == peer.id)

    virtual(scenario)


def test_peers_a_hundred_times_as_fast_weigh_as_much_more(virtual):
    async def scenario(nodes):
        run = make_run(target_batch_size=4000, clip_members=0.0)  # what these contribute is as long after 1 step as after 100
        fast = await Peer(nodes, await nodes.node(), run, rate=300).start(nodes)
        slow = await Peer(nodes, await nodes.node(), run, rate=3).start(nodes)
        both = {fast.id: fast, slow.id: slow}

        def step():
            """A round of both, from a state to the next, both of which one of them was at."""
            for before, after in zip(fast.lands, fast.lands[1:], strict=False):
                if after.header.parents[0] == before.digest and len(after.header.members) == 2:
                    return before, after
            return None

        await until(step, SECONDS)
        before, after = step()
        total, expected = sum(member.samples for member in after.header.members), torch.zeros(fast.size)
        for member in after.header.members:
            encoded = dict(both[member.peer].offers)[member.number]
            delta = Wire(run.wire, fast.size).decode(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
            expected += delta * (member.samples / total)
        assert torch.allclose(after.vectors(fast.size)[0] - before.vectors(fast.size)[0], expected, atol=2e-3)
        weights = {member.peer: member.samples for member in after.header.members}
        assert weights[fast.id] > weights[slow.id]
        await audit([fast, slow], [fast, slow])

    virtual(scenario)


def test_a_round_that_nobody_else_attends_is_made_alone_and_taken_over_by_the_others(virtual):
    async def scenario(nodes):
        one, idle = await peers(nodes, 1, make_run()), await peers(nodes, 1, make_run(), rate=0)
        await until(lambda: idle[0].head.header.round >= 2, SECONDS)
        assert all([member[0] for member in line["members"]] == [one[0].id] for line in one[0].rounds())
        await audit([*one, *idle], [*one, *idle])

    virtual(scenario)
