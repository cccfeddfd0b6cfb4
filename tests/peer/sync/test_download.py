"""Drawing chunks from several holders at once: whatever one of them does costs its own share of the time, and never a wrong byte."""

import asyncio
import itertools
import random
from functools import partial

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.state import CHUNK_BYTES, Head, State, next_state
from peer.sync.engine.transfer import download as download_module
from peer.sync.engine.transfer.download import CHUNKS, PIECE_BYTES, Download, Lied, ask_manifest
from peer.sync.engine.transfer.pace import Slow
from peer.sync.engine.transfer.state_fetch import STALLED_SECONDS, StateFetch, WholeState
from tests.clock import Clock
from tests.peer.sync.swarm_tools import ANYTHING, held, state_of, until

SIZE = 5 * CHUNK_BYTES // 4 + 5  # five chunks and a short one


def two_states() -> tuple[State, State]:
    base = state_of(torch.zeros(SIZE))
    return base, next_state(base, [[torch.arange(1, SIZE + 1.0)]], [Member("a", 1, 7)])


class Script:
    """A holder of `state` that does as it is told: changes what it sends, or is gone after so many chunks.

    `leave` is for who counts the chunks that came: p2pd loses what is on its way when its holder goes with requests unread.
    """

    def __init__(self, state: State, **does):
        self.state, self.asked, self.does, self.go_on, self.leave = state, [], does, asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.leave.set()

    async def serve(self, channel):
        does, state = self.does, self.state
        await channel.receive(ANYTHING, seconds=60)
        header = does.get("header", lambda header: header)(state.header.to_json())
        await channel.send({"header": header}, does.get("hashes", lambda data: data)(b"".join(state.chunk_hashes)), seconds=60)
        while len(self.asked) < does.get("after", 99):
            request, _ = await channel.receive(ANYTHING, seconds=30)
            if request.get("chunk") is None:
                return
            self.asked.append(request["chunk"])
            await self.go_on.wait()
            await does.get("before", lambda index: asyncio.sleep(0))(request["chunk"])
            await self._give(channel, does.get("chunk", lambda index, data: data)(request["chunk"], bytes(state.chunk(request["chunk"]))))
        await self.leave.wait()
        if does.get("stalls"):
            await asyncio.Event().wait()

    async def _give(self, channel, data):
        for offset in range(0, max(len(data), 1), PIECE_BYTES):
            await channel.send({}, data[offset : offset + PIECE_BYTES], seconds=60)


async def scripted(nodes, state: State, **does):
    ((node, streams),) = await nodes.streams(1)
    script = Script(state, **does)
    await streams.serve(CHUNKS, script.serve)
    return node.peer_id, script


def same(download: Download, state: State) -> bool:
    fetched = download.content.state()
    return fetched.digest == state.digest and torch.equal(fetched.buffer.bytes(), state.buffer.bytes())


LIES = {
    "a flipped byte": ({"chunk": lambda i, data: bytes([data[0] ^ 1]) + data[1:]}, "not in the state"),
    "a short chunk": ({"chunk": lambda i, data: data[:-1]}, "instead of"),
    "an empty chunk": ({"chunk": lambda i, data: b""}, "instead of"),
    "a long chunk": (
        {"chunk": lambda i, data: data[:-PIECE_BYTES] + data[: 2 * PIECE_BYTES] if len(data) > PIECE_BYTES else b""},
        "announced|instead|not in the state",
    ),
    "more samples": ({"header": lambda h: {**h, "samples": 8}}, "header: "),
    "another run's name": ({"header": lambda h: {**h, "run": "x"}}, "another state"),
    "no header": ({"header": lambda h: None}, "header: "),
    "a header that is a list": ({"header": lambda h: [h]}, "header: "),
    "other hashes": ({"hashes": lambda data: bytes(len(data))}, "another state"),
    "too few hashes": ({"hashes": lambda data: data[:-32]}, "another state"),
    "a torn hash": ({"hashes": lambda data: data[:-1]}, "another state"),
}


@pytest.mark.parametrize("what", LIES)
def test_a_lie_is_found_and_an_honest_holder_makes_up_for_it(virtual, what):
    does, reason = LIES[what]

    async def scenario(nodes):
        base, new = two_states()
        liar, _ = await scripted(nodes, new, **does)
        honest, _ = await scripted(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        with pytest.raises(PeerLost, match=reason):
            await Download(WholeState(new.digest, base), {liar}, nodes.clock).run(streams)
        download = Download(WholeState(new.digest, base), {liar, honest}, nodes.clock)
        await download.run(streams)
        assert same(download, new) and set(download.given) == {honest}
        assert isinstance(download.faults.get(liar, Lied()), Lied)

    virtual(scenario)


def test_holders_give_at_the_same_time_and_what_a_dead_one_gave_is_kept(virtual):
    async def scenario(nodes):
        base, new = two_states()
        dying, script = await scripted(nodes, new, after=2)
        other, second = await scripted(nodes, new)
        script.go_on.clear()
        script.leave.clear()
        second.go_on.clear()
        ((_, streams),) = await nodes.streams(1)
        download = Download(WholeState(new.digest, base), {dying, other}, nodes.clock)
        task = asyncio.create_task(download.run(streams))
        await until(lambda: len(script.asked) == 1 and len(second.asked) == 1)  # both at work on chunks of their own
        assert set(script.asked).isdisjoint(second.asked)
        script.go_on.set()
        await until(lambda: download.given[dying] == 2)
        script.leave.set()
        await until(lambda: dying in download.faults)
        second.go_on.set()
        await task
        assert same(download, new) and download.given == {dying: 2, other: 4}

    virtual(scenario)


@pytest.fixture
def patient(monkeypatch):
    """A holder that stalls is given up much later than the test needs, also on a busy machine."""
    for name in ("_FIRST_PIECE_SECONDS", "_PIECE_SECONDS", "_LONGEST_PIECE_SECONDS"):
        monkeypatch.setattr(download_module, name, 100.0)


def test_a_fast_holder_gives_more_and_takes_over_what_a_stalled_one_owes(virtual, monkeypatch, patient):
    monkeypatch.setattr(download_module, "_AGAIN_SECONDS", 0.2)

    async def scenario(nodes):
        base, new = two_states()
        stalling, _ = await scripted(nodes, new, after=1, stalls=True)
        fast, _ = await scripted(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        download = Download(WholeState(new.digest, base), {stalling, fast}, nodes.clock)
        await download.run(streams)  # long before a piece is late
        assert same(download, new) and download.given[fast] >= 5
        assert not download.faults

    virtual(scenario)


def test_a_short_last_piece_does_not_make_a_holder_seem_slow(virtual, patient):
    """Seen on a busy machine: 20 bytes that took 10 ms hid for 10 s that another holder had stalled."""

    async def scenario(nodes):
        base, new = two_states()
        stalling, stalled = await scripted(nodes, new, after=1, stalls=True)
        fast, script = await scripted(nodes, new, before=lambda index: asyncio.sleep(0.3 if index == 5 else 0))
        stalled.go_on.clear()
        ((_, streams),) = await nodes.streams(1)
        download = Download(WholeState(new.digest, base), {stalling}, nodes.clock)
        task = asyncio.create_task(download.run(streams))
        await until(lambda: len(download._asked) == 2)  # the fast one gets the short last chunk
        download.holders.add(fast)
        await task
        assert same(download, new) and not download.faults and 5 in script.asked

    virtual(scenario)


def test_a_holder_that_says_nothing_more_is_given_up_when_it_is_the_only_one(virtual, monkeypatch):
    async def scenario(nodes):
        base, new = two_states()
        stalling, _ = await scripted(nodes, new, after=1, stalls=True)
        ((_, streams),) = await nodes.streams(1)
        download = Download(WholeState(new.digest, base), {stalling}, nodes.clock)
        # The pieces of the chunk that comes may take their time.
        monkeypatch.setattr(download_module._Pace, "piece_seconds", property(lambda pace: 0.2 if download.done else 100.0))
        with pytest.raises(PeerLost, match="does not answer"):
            await download.run(streams)
        assert len(download.done) == 1

    virtual(scenario)


def test_several_chunks_are_on_their_way_from_one_holder(virtual):
    async def scenario(nodes):
        base, new = two_states()
        holder, script = await scripted(nodes, new)
        script.go_on.clear()
        ((_, streams),) = await nodes.streams(1)
        download = Download(WholeState(new.digest, base), {holder}, nodes.clock)
        task = asyncio.create_task(download.run(streams))
        await until(lambda: len(download._asked) == 2)
        script.go_on.set()
        await task
        assert same(download, new) and sorted(script.asked) == list(range(6)) and not download._asked

    virtual(scenario)


def test_a_holder_that_comes_later_helps(virtual):
    async def scenario(nodes):
        base, new = two_states()
        first, script = await scripted(nodes, new)
        later, _ = await scripted(nodes, new)
        script.go_on.clear()
        ((_, streams),) = await nodes.streams(1)
        download = Download(WholeState(new.digest, base), {first}, nodes.clock)
        task = asyncio.create_task(download.run(streams))
        await until(lambda: script.asked)
        download.holders.add(later)
        await until(lambda: download.given[later])
        script.go_on.set()
        await task
        assert same(download, new)

    virtual(scenario)


def test_what_is_known_already_is_not_sent(virtual):
    async def scenario(nodes):
        base = state_of(torch.zeros(SIZE))
        values = torch.zeros(SIZE)
        values[-1] = 1.0
        new = next_state(base, [[values]], [Member("a", 1, 7)])
        holder, script = await scripted(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        download = Download(WholeState(new.digest, base), {holder}, nodes.clock)
        await download.run(streams)
        assert same(download, new) and script.asked == [5]

    virtual(scenario)


def test_the_proof_of_a_state_comes_from_whoever_has_it(virtual):
    async def scenario(nodes):
        _, new = two_states()
        liar, _ = await scripted(nodes, new, hashes=lambda data: bytes(len(data)))
        honest, _ = await scripted(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        manifest = await ask_manifest(streams, {liar, honest}, new.digest)
        assert (manifest.header, manifest.chunk_hashes) == (new.header, new.chunk_hashes)
        assert await ask_manifest(streams, {liar}, new.digest) is None

    virtual(scenario)


class Dripping(Script):
    """Gives piece by piece, each just before it would be given up."""

    async def _give(self, channel, data):
        for offset in range(0, max(len(data), 1), PIECE_BYTES):
            await asyncio.sleep(self.does["pause"])
            await channel.send({}, data[offset : offset + PIECE_BYTES], seconds=60)


async def dripping(nodes, state: State, pause: float) -> str:
    ((node, streams),) = await nodes.streams(1)
    await streams.serve(CHUNKS, Dripping(state, pause=pause).serve)
    return node.peer_id


def test_holders_that_drip_are_replaced_by_one_that_gives(virtual, monkeypatch):
    monkeypatch.setattr(download_module, "MAX_HOLDERS", 3)
    monkeypatch.setattr(download_module, "_FIRST_CREDIT_SECONDS", 1.0)
    monkeypatch.setattr(download_module, "SLOWEST_BYTES_PER_SECOND", 400_000)

    async def scenario(nodes):
        base, new = two_states()
        drips = [await dripping(nodes, new, pause=1.0) for _ in range(3)]  # 262 kB/s each
        honest, _ = await scripted(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        download = Download(WholeState(new.digest, base), set(drips), nodes.clock)
        task = asyncio.create_task(download.run(streams))
        await until(lambda: len(download._asked) >= 3)  # all places are taken
        download.holders.add(honest)
        await task
        assert same(download, new) and download.given[honest] >= 4
        assert any(isinstance(fault, Slow) for fault in download.faults.values())

    virtual(scenario)


def test_three_identities_that_drip_a_made_up_state_hold_nobody_for_ever(virtual, seed):
    """They are as fast as a donor must be, and most peers sign what they have: it is the time for the whole of it that ends."""

    async def scenario(nodes):
        base, new = two_states()
        generator = torch.Generator().manual_seed(seed)
        made_up = next_state(base, [[torch.rand(SIZE, generator=generator)]], [Member("x", 1, 9)])
        drips = [await dripping(nodes, made_up, pause=0.5) for _ in range(3)]
        honest, _ = await scripted(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        clock = Clock()
        chaser = StateFetch(streams, lambda head, header: "", clock)
        claims = [*((Head(made_up.digest, 9), drip) for drip in drips), (Head(new.digest, 7), honest)]
        chaser.consider(held(claims), base)
        assert chaser._fetch.holders == set(drips)
        came = 0
        while chaser._fetch.head.digest == made_up.digest:  # 15 s for each piece that comes
            await until(lambda came=came: chaser._fetch.download.bytes_received > came)
            came, clock.now = chaser._fetch.download.bytes_received, clock.now + 15
            chaser.consider(held(claims), base)
        assert clock.now <= 120 + 4 * SIZE / 125_000 + 15 and came < 4 * SIZE
        assert (await ended(chaser)).digest == new.digest
        chaser.consider(held(claims[:3]), new)
        assert not chaser.signers, "they are not asked again for a while"
        await chaser.close()

    virtual(scenario)


def in_order(*holders):
    return lambda holder: holders.index(holder)


def test_holders_that_say_nothing_keep_nobody_from_the_one_behind_them(virtual):
    """Eight names that come first were asked for 20 s, in which a download that nothing comes of is given up: the ninth was never asked."""

    async def scenario(nodes):
        base, new = two_states()
        silent = [(await scripted(nodes, new, after=0, stalls=True))[0] for _ in range(20)]
        honest, _ = await scripted(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        download = Download(WholeState(new.digest, base), {*silent, honest}, nodes.clock, in_order(*silent, honest))
        began = nodes.clock()
        await download.run(streams)
        assert same(download, new) and nodes.clock() - began < STALLED_SECONDS and download.asked == {*silent, honest}

    virtual(scenario)


def test_who_was_not_asked_is_not_to_blame_for_a_download_that_stalled(virtual):
    async def scenario(nodes):
        base, new = two_states()
        silent = [(await scripted(nodes, new, after=0, stalls=True))[0] for _ in range(8)]
        honest, script = await scripted(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        clock = Clock()
        chaser = StateFetch(streams, lambda head, header: "", clock, met=silent)
        claims = [(Head(new.digest, 7), peer) for peer in (*silent, honest)]
        chaser.consider(held(claims), base)
        await until(lambda: chaser._fetch.asked == set(silent) and chaser._fetch.download.hashes)
        clock.now += STALLED_SECONDS + 1
        chaser.consider(held(claims), base)
        assert chaser._fetch.holders == {honest} and not script.asked
        assert (await ended(chaser)).digest == new.digest
        assert all(chaser.avoids(peer) for peer in silent) and not chaser.avoids(honest)

    virtual(scenario)


def test_whom_we_have_met_is_asked_first_and_of_the_others_nobody_comes_first_always(virtual):
    async def scenario(nodes):
        ((_, streams),) = await nodes.streams(1)
        chaser = StateFetch(streams, lambda head, header: "", met=["friend"], rng=random.Random(1))
        names = [*(f"stranger {index}" for index in range(9)), "friend"]
        orders = [sorted(names, key=partial(chaser._order, salt)) for salt in ("a", "b")]
        assert orders[0][0] == orders[1][0] == "friend" and orders[0] != orders[1]

    virtual(scenario)


# ------------------------------------------------------------------------------------------------------------ across failures


async def ended(chaser: StateFetch) -> State | None:
    await until(lambda: chaser._fetch is None or chaser._fetch.task.done())
    return chaser.result()


def test_all_holders_gone_half_way_and_back_send_only_what_is_missing(virtual):
    async def scenario(nodes):
        base, new = two_states()
        holder, script = await scripted(nodes, new, after=2)
        ((_, streams),) = await nodes.streams(1)
        clock = Clock()
        chaser = StateFetch(streams, lambda head, header: "", clock)
        claims = [(Head(new.digest, 7), holder)]
        script.leave.clear()
        chaser.consider(held(claims), base)
        await until(lambda: len(chaser._fetch.download.done) == 2)
        script.leave.set()
        assert await ended(chaser) is None
        chaser.consider(held(claims), base)
        assert not chaser.signers, "it failed a moment ago"
        clock.now += 6
        script.does = {"after": 0}  # answers, and is gone again
        script.asked = []
        chaser.consider(held(claims), base)
        assert await ended(chaser) is None
        clock.now += 11
        script.does = {}
        chaser.consider(held(claims), base)
        state = await ended(chaser)
        assert state.digest == new.digest and torch.equal(state.buffer.bytes(), new.buffer.bytes())
        assert len(script.asked) == 4

    virtual(scenario)


def test_a_later_state_takes_over_the_chunks_that_it_shares_with_the_one_that_came_half(virtual):
    async def scenario(nodes):
        base, new = two_states()
        values = new.buffer.floats().clone()
        values[-1] = 0.5
        later = next_state(new, [[values]], [Member("a", 2, 7)])
        first, leaving = await scripted(nodes, new, after=3)
        second, script = await scripted(nodes, later)
        ((_, streams),) = await nodes.streams(1)
        chaser = StateFetch(streams, lambda head, header: "")
        leaving.leave.clear()
        chaser.consider(held([(Head(new.digest, 7), first)]), base)
        await until(lambda: len(chaser._fetch.download.done) == 3)
        leaving.leave.set()
        assert await ended(chaser) is None
        chaser.consider(held([(Head(later.digest, 14), second)]), base)
        state = await ended(chaser)
        assert state.digest == later.digest and torch.equal(state.buffer.bytes(), later.buffer.bytes())
        assert len(script.asked) == 3

    virtual(scenario)


def test_a_liar_is_avoided_for_a_while_although_the_download_succeeded(virtual):
    async def scenario(nodes):
        base, new = two_states()
        liar, _ = await scripted(nodes, new, chunk=lambda i, data: bytes(len(data)))
        honest, script = await scripted(nodes, new)
        script.go_on.clear()
        ((_, streams),) = await nodes.streams(1)
        clock = Clock()
        chaser = StateFetch(streams, lambda head, header: "", clock)
        chaser.consider(held([(Head(new.digest, 7), peer) for peer in (liar, honest)]), base)
        await until(lambda: chaser._fetch.download.faults)
        script.go_on.set()
        assert (await ended(chaser)).digest == new.digest
        chaser.consider(held([(Head("f" * 64, 9), liar)]), base)
        assert not chaser.signers
        clock.now += 81
        chaser.consider(held([(Head("f" * 64, 9), liar)]), base)
        assert chaser.signers
        await chaser.close()

    virtual(scenario)


def test_a_download_that_is_not_better_any_more_makes_room_for_one_that_is(virtual):
    async def scenario(nodes):
        base, new = two_states()
        slow, script = await scripted(nodes, base)
        script.go_on.clear()
        quick, _ = await scripted(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        chaser = StateFetch(streams, lambda head, header: "", Clock())
        chaser.consider(held([(Head("f" * 64, 3), slow)]), base)
        assert chaser.signers
        ours = next_state(base, [[torch.ones(SIZE)]], [Member("b", 1, 5)])
        chaser.consider(held([(Head(new.digest, 7), quick)]), ours)
        assert (await ended(chaser)).digest == new.digest
        chaser.consider(held([(Head("e" * 64, 9), slow)]), new)
        assert chaser.signers, "it did nothing wrong"
        await chaser.close()

    virtual(scenario)


def test_a_partial_download_does_not_stay_in_memory_for_ever(virtual):
    async def scenario(nodes):
        base, new = two_states()
        holder, script = await scripted(nodes, new, after=2)
        ((_, streams),) = await nodes.streams(1)
        clock = Clock()
        chaser = StateFetch(streams, lambda head, header: "", clock)
        script.leave.clear()
        chaser.consider(held([(Head(new.digest, 7), holder)]), base)
        await until(lambda: len(chaser._fetch.download.done) == 2)
        script.leave.set()
        assert await ended(chaser) is None and chaser._partial is not None
        clock.now += 601
        chaser.consider(held([]), base)
        assert chaser._partial is None

    virtual(scenario)


def test_what_is_known_already_is_copied_without_holding_up_others(swarm):
    """A chunk at a time: 1 GB at once kept all of this peer's streams waiting for as long as its memory takes."""

    async def scenario(nodes):
        _, new = two_states()
        holder, _ = await scripted(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        content, order = WholeState(new.digest, new), []
        known = content.known
        content.known = lambda index, hash_: order.append("chunk") or known(index, hash_)

        async def others():
            while True:
                order.append("others")
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        download = Download(content, {holder})
        await download.run(streams)
        beside.cancel()
        chunks = [place for place, what in enumerate(order) if what == "chunk"]
        assert same(download, new) and len(chunks) == len(new.chunk_hashes)
        assert all("others" in order[one:next_] for one, next_ in itertools.pairwise(chunks))

    swarm(scenario)
