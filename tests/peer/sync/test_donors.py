"""Handing out states, and choosing what to fetch: never a wrong one, and no second copy in memory."""

import asyncio
import gc
import weakref

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.net.streams import PeerLost, Refused
from peer.sync.engine.state import CHUNK_BYTES, BadState, Head, State, next_state
from peer.sync.engine.transfer import slots, state_fetch
from peer.sync.engine.transfer.disk import StateStore
from peer.sync.engine.transfer.donors import KEEP_SECONDS, Donor, ask_head
from peer.sync.engine.transfer.download import CHUNKS, PIECE_BYTES, Download
from peer.sync.engine.transfer.replay import MeanStore
from peer.sync.engine.transfer.state_fetch import StateFetch, WholeState
from tests.clock import Clock
from tests.peer.sync.swarm_tools import ANYTHING, held, holder, same, state_of, until

SIZE = 3 * CHUNK_BYTES // 4 + 5  # three chunks and a short one


def two_states(run="run") -> tuple[State, State]:
    base = state_of(torch.zeros(SIZE), run=run)
    return base, next_state(base, [[torch.arange(1, SIZE + 1.0)]], [Member("a", 1, 7)])


async def fetch(streams, holders, digest: str, like: State, partial: Download | None = None) -> State:
    download = Download(WholeState(digest, like, partial), set(holders))
    await download.run(streams)
    return download.content.state()


def test_a_state_arrives_whole_and_heads_are_told(virtual):
    async def scenario(nodes):
        base, new = two_states()
        giver = await holder(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        assert await ask_head(streams, giver.node.peer_id) == Head.of(new)
        assert same(await fetch(streams, [giver.node.peer_id], new.digest, base), new)
        await until(lambda: not giver.donor.busy)

    virtual(scenario)


async def ask(streams, peer: str, digest: str):
    channel = await streams.open(peer, CHUNKS)
    await channel.send({"digest": digest}, seconds=60)
    await channel.receive(ANYTHING, max_payload=200, seconds=60)
    return channel


async def chunk(channel, index: int) -> bytes:
    await channel.send({"chunk": index}, seconds=60)
    length, data = CHUNK_BYTES if index < 3 else 20, b""
    while len(data) < length:
        data += (await channel.receive(ANYTHING, max_payload=1 << 20, seconds=60))[1]
    return data


def test_who_asks_anew_has_given_up_what_it_asked_for_before(virtual):
    async def scenario(nodes):
        base, new = two_states()
        giver = await holder(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        given_up = await ask(streams, giver.node.peer_id, new.digest)
        await chunk(given_up, 0)
        assert same(await fetch(streams, [giver.node.peer_id], new.digest, base), new), "the first one is still open"
        with pytest.raises(PeerLost):
            await chunk(given_up, 1)
        await until(lambda: not giver.donor.busy)

    virtual(scenario)


def test_one_download_too_many_is_sent_to_another_peer(virtual, monkeypatch):
    monkeypatch.setattr(slots, "MAX_DOWNLOADS", 1)

    async def scenario(nodes):
        base, new = two_states()
        giver = await holder(nodes, new)
        ((_, first), (_, second)) = await nodes.streams(2)
        channel = await ask(first, giver.node.peer_id, new.digest)
        await chunk(channel, 0)
        with pytest.raises(Refused, match="too many downloads at once, try another peer"):
            await fetch(second, [giver.node.peer_id], new.digest, base)
        assert await chunk(channel, 1) == bytes(new.chunk(1)), "the first one goes on"
        channel.close()
        await until(lambda: not giver.donor.busy)
        assert same(await fetch(second, [giver.node.peer_id], new.digest, base), new)

    virtual(scenario)


def test_an_old_state_is_given_from_its_file_and_leaves_memory(virtual):
    async def scenario(nodes):
        base, new = two_states()
        clock = Clock()
        giver = await holder(nodes, base, clock)
        ((_, streams),) = await nodes.streams(1)
        channel = await ask(streams, giver.node.peer_id, base.digest)
        assert await chunk(channel, 0) == bytes(base.chunk(0))
        giver.moves_to(new)
        memory = weakref.ref(base.buffer)
        digest, expected, base = base.digest, bytes(base.chunk(1)), None
        giver.donor.tidy()
        gc.collect()
        assert memory() is not None and await chunk(channel, 1) == expected, "not on disk yet: the download holds it"
        path = giver.store.save(memory_state := state_of(torch.zeros(SIZE)))
        assert memory_state.digest == digest

        def let_go() -> bool:
            giver.donor.tidy()
            gc.collect()
            return memory() is None

        await until(let_go)  # the handler may still hold what it sent a moment ago
        path.unlink()
        assert await chunk(channel, 2) == expected, "a file that is open stays readable"
        channel.close()
        await until(lambda: not giver.donor.busy)
        clock.now += KEEP_SECONDS + 1
        giver.donor.tidy()
        with pytest.raises(PeerLost, match="not here any more"):
            await ask(streams, giver.node.peer_id, digest)

    virtual(scenario)


def test_a_state_just_replaced_is_given_to_who_has_heard_of_it(virtual):
    async def scenario(nodes):
        base, new = two_states()
        giver = await holder(nodes, base)
        ((_, streams),) = await nodes.streams(1)
        giver.store.save(base)
        giver.moves_to(new)
        assert same(await fetch(streams, [giver.node.peer_id], base.digest, new), base)

    virtual(scenario)


def test_a_state_damaged_on_disk_is_not_given(virtual):
    async def scenario(nodes):
        base, new = two_states()
        giver = await holder(nodes, new)
        path = giver.store.save(new)
        digest = new.digest
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\1")
        giver.moves_to(base)
        new = None
        gc.collect()
        ((_, streams),) = await nodes.streams(1)
        with pytest.raises(Refused, match="damaged on disk"):
            await fetch(streams, [giver.node.peer_id], digest, base)

    virtual(scenario)


def test_of_old_states_that_never_came_to_disk_one_stays_in_memory(virtual):
    async def scenario(nodes):
        base, new = two_states()
        last = next_state(new, [[torch.ones(SIZE)]], [Member("a", 2, 7)])
        giver = await holder(nodes, base)
        ((_, first), (_, second)) = await nodes.streams(2)
        slow = await ask(first, giver.node.peer_id, base.digest)
        giver.moves_to(new)
        slower = await ask(second, giver.node.peer_id, new.digest)
        giver.moves_to(last)
        giver.donor.tidy()
        with pytest.raises(PeerLost, match="not here any more"):
            await chunk(slow, 0)
        assert await chunk(slower, 0) == bytes(new.chunk(0))
        slower.close()
        slow.close()

    virtual(scenario)


def test_a_foreign_runs_state_is_refused_whoever_promises_it(virtual):
    async def scenario(nodes):
        base, _ = two_states()
        _, foreign = two_states(run="other")
        giver = await holder(nodes, foreign)
        ((_, streams),) = await nodes.streams(1)
        with pytest.raises(BadState, match="another run"):
            await fetch(streams, [giver.node.peer_id], foreign.digest, base)

    virtual(scenario)


def test_a_state_with_nan_in_it_is_refused(virtual):
    async def scenario(nodes):
        base, _ = two_states()
        bad = next_state(base, [[torch.full((SIZE,), float("nan"))]], [Member("a", 1, 7)])
        giver = await holder(nodes, bad)
        ((_, streams),) = await nodes.streams(1)
        with pytest.raises(BadState, match="non-finite"):
            await fetch(streams, [giver.node.peer_id], bad.digest, base)

    virtual(scenario)


def test_a_request_out_of_bounds_ends_the_stream(virtual):
    async def scenario(nodes):
        _, new = two_states()
        giver = await holder(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        for request in ({"chunk": -1}, {"chunk": 4}, {"chunk": True}, {"chunk": "x"}, {"digest": ["x"]}):
            channel = await streams.open(giver.node.peer_id, CHUNKS)
            if "chunk" in request:
                await channel.send({"digest": new.digest}, seconds=60)
                await channel.receive(ANYTHING, max_payload=200, seconds=60)
            await channel.send(request, seconds=60)
            with pytest.raises(PeerLost, match=r"no chunk 4|malformed message"):
                await channel.receive(ANYTHING, max_payload=CHUNK_BYTES, seconds=60)
            channel.close()

    virtual(scenario)


def test_one_peer_cannot_take_every_download(virtual):
    async def scenario(nodes):
        base, new = two_states()
        giver = await holder(nodes, new)
        ((_, greedy),) = await nodes.streams(1)
        ((_, streams),) = await nodes.streams(1)
        channels = [await ask(greedy, giver.node.peer_id, new.digest) for _ in range(8)]
        for channel in channels:
            await channel.send({"chunk": 0}, seconds=60)
        await until(lambda: giver.donor.busy)
        assert same(await fetch(streams, [giver.node.peer_id], new.digest, base), new)
        for channel in channels:
            channel.close()

    virtual(scenario)


def test_four_identities_that_ask_for_a_chunk_every_59_seconds_leave_a_newcomer_its_slot(virtual):
    """All from one address, as the newcomer is: that cannot tell them apart, their pace does."""

    async def scenario(nodes):
        base, new = two_states()
        clock = Clock()
        giver = await holder(nodes, new, clock)
        strangers = [streams for _, streams in await nodes.streams(4)]
        ((_, newcomer),) = await nodes.streams(1)
        hogs = [await ask(streams, giver.node.peer_id, new.digest) for streams in strangers]
        for hog in hogs:
            await chunk(hog, 0)
        with pytest.raises(Refused, match="too many downloads at once"):
            await fetch(newcomer, [giver.node.peer_id], new.digest, base)
        clock.now += 59
        assert same(await fetch(newcomer, [giver.node.peer_id], new.digest, base), new)
        lost = 0
        for hog in hogs:
            try:
                await chunk(hog, 1)
            except Refused as error:
                assert "gave way to another" in str(error)
                lost += 1
            hog.close()
        assert lost == 1, "no more than the newcomer needs"
        await until(lambda: not giver.donor.busy)

    virtual(scenario)


def test_a_round_goes_before_a_download(virtual):
    async def scenario(nodes):
        base, new = two_states()
        pauses = []

        async def note(seconds):
            pauses.append(seconds)

        ((node, giving), (_, streams)) = await nodes.streams(2)
        ticks = iter(range(10**6))  # each piece takes one second
        giver = Donor(
            giving, lambda: new, StateStore(nodes.folder / "x"), MeanStore(nodes.folder / "y"), lambda: True, lambda: next(ticks), note
        )
        await giver.start()
        assert same(await fetch(streams, [node.peer_id], new.digest, base), new)
        assert pauses == [3] * (3 * CHUNK_BYTES // PIECE_BYTES + 1)

    virtual(scenario)


# ------------------------------------------------------------------------------------------------------------ what is fetched


async def outcome(chaser: StateFetch):
    await until(lambda: chaser._fetch is None or chaser._fetch.task.done())
    return chaser.result()


def test_a_head_that_nobody_gives_is_asked_for_less_and_less_often(virtual):
    async def scenario(nodes):
        base, _ = two_states()
        ((_, streams), (silent, _)) = await nodes.streams(2)
        clock = Clock()
        chaser = StateFetch(streams, lambda head, header: "", clock)
        tried = []
        for clock.now in range(200):
            chaser.consider(held([(Head(f"{clock.now:064x}", 10**15), silent.peer_id)]), base)  # another digest each time
            if chaser.signers:
                tried.append(clock.now)
                assert await outcome(chaser) is None
        assert tried == [0, 5, 15, 35, 75, 155]

    virtual(scenario)


def test_what_most_sign_is_fetched_before_what_a_single_peer_promises(virtual):
    async def scenario(nodes):
        base, new = two_states()
        honest = [await holder(nodes, new) for _ in range(2)]
        ((_, streams),) = await nodes.streams(1)
        chaser = StateFetch(streams, lambda head, header: "")
        claims = [(Head(new.digest, 7), giver.node.peer_id) for giver in honest]
        chaser.consider(held([(Head("f" * 64, 10**15), "nobody"), *claims]), base)
        assert same(await outcome(chaser), new)

    virtual(scenario)


def test_a_download_that_stalls_gives_way_to_another(virtual):
    async def scenario(nodes):
        base, new = two_states()
        giver = await holder(nodes, new)

        async def sleepy(channel):
            await asyncio.Event().wait()

        ((sleeper, sleeper_streams), (_, streams)) = await nodes.streams(2)
        await sleeper_streams.serve(CHUNKS, sleepy)
        clock = Clock()
        chaser = StateFetch(streams, lambda head, header: "", clock)
        claims = [(Head("f" * 64, 10**15), sleeper.peer_id), (Head(new.digest, 7), giver.node.peer_id)]
        chaser.consider(held(claims[:1]), base)
        chaser.consider(held(claims), base)
        assert chaser._fetch.head.samples == 10**15
        clock.now += state_fetch.STALLED_SECONDS + 1
        chaser.consider(held(claims), base)
        await until(lambda: chaser._fetch and chaser._fetch.head.digest == new.digest)
        assert same(await outcome(chaser), new)
        await chaser.close()

    virtual(scenario)


def test_an_old_state_behind_a_great_promise_is_refused(virtual):
    async def scenario(nodes):
        base, new = two_states()
        giver = await holder(nodes, base)
        ((_, streams),) = await nodes.streams(1)
        chaser = StateFetch(streams, lambda head, header: "" if header.samples == head.samples else "not as promised")
        chaser.consider(held([(Head(base.digest, 10**15), giver.node.peer_id)]), new)
        assert await outcome(chaser) is None

    virtual(scenario)
