"""Fetching a state: from whoever is left, checked chunk by chunk, and never a wrong one."""

import asyncio

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine import donors, takeover
from peer.sync.engine.donors import KEEP_SECONDS, STATE, Donor, Download, ask_head, fetch
from peer.sync.engine.state import CHUNK_BYTES, BadState, Head, State, next_state
from peer.sync.engine.streams import PeerLost
from peer.sync.engine.takeover import Takeover
from tests.peer.sync.swarm_tools import state_of, until

SIZE = 3 * CHUNK_BYTES // 4 + 5  # three chunks and a short one


def two_states(run="run") -> tuple[State, State]:
    base = state_of(torch.zeros(SIZE), run=run)
    return base, next_state(base, [torch.arange(float(SIZE))], [Member("a", 1, 7)])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def donor(nodes, state: State, clock=None):
    ((node, streams),) = await nodes.streams(1)
    giver = Donor(streams, lambda: state, clock or Clock())
    await giver.start()
    return node, giver


def same(state: State, other: State) -> bool:
    return state.digest == other.digest and state.header == other.header and torch.equal(state.buffer.bytes(), other.buffer.bytes())


def test_a_state_arrives_whole_and_heads_are_told(swarm):
    async def scenario(nodes):
        base, new = two_states()
        node, giver = await donor(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        assert await ask_head(streams, node.peer_id) == Head(new.digest, 7)
        assert same(await fetch(streams, [node.peer_id], Download(new.digest, base)), new)
        await until(lambda: not giver.busy)

    swarm(scenario)


def lying(chunk=lambda index, data: data, header=lambda header: header, hashes=lambda hashes: hashes, after: int = 99):
    """A handler that serves `state` with changes, and goes away after so many chunks."""

    def handler(state: State):
        async def serve(channel):
            await channel.receive(seconds=5)
            await channel.send({"header": header(state.header.to_json())}, hashes(b"".join(state.chunk_hashes)), seconds=5)
            for _ in range(after):
                request, _ = await channel.receive(seconds=5)
                index = request.get("chunk")
                if index is None:
                    return
                await channel.send({}, chunk(index, bytes(state.chunk(index))), seconds=5)

        return serve

    return handler


async def liar(nodes, state: State, handler):
    ((node, streams),) = await nodes.streams(1)
    await streams.serve(STATE, handler(state))
    return node


LIES = {
    "a flipped byte in the last chunk": (lying(lambda i, data: data if i < 3 else bytes([data[0] ^ 1]) + data[1:]), "not in the state"),
    "a short chunk": (lying(lambda i, data: data[:-1]), "not in the state"),
    "an empty chunk": (lying(lambda i, data: b""), "not in the state"),
    "more samples": (lying(header=lambda h: {**h, "samples": 8}), "no header"),
    "another run's name": (lying(header=lambda h: {**h, "run": "x"}), "another state"),
    "no header": (lying(header=lambda h: None), "no header"),
    "other hashes": (lying(hashes=lambda data: bytes(len(data))), "another state"),
    "too few hashes": (lying(hashes=lambda data: data[:-32]), "another state"),
    "a death in the middle": (lying(after=2), "nothing"),
}


def test_every_lie_is_found_and_an_honest_donor_makes_up_for_it(swarm, monkeypatch):
    monkeypatch.setattr(donors.random, "sample", lambda holders, count: list(holders))

    async def scenario(nodes):
        base, new = two_states()
        honest, _ = await donor(nodes, new)
        ((_, streams), (bad, bad_streams)) = await nodes.streams(2)
        current = {}

        async def serve(channel):
            await current["handler"](new)(channel)

        await bad_streams.serve(STATE, serve)
        for what, (current["handler"], reason) in LIES.items():
            with pytest.raises(PeerLost, match=reason):
                await fetch(streams, [bad.peer_id], Download(new.digest, base))
                pytest.fail(what)
            assert same(await fetch(streams, [bad.peer_id, honest.peer_id], Download(new.digest, base)), new), what

    swarm(scenario)


def test_the_next_donor_sends_only_what_is_missing(swarm, monkeypatch):
    monkeypatch.setattr(donors.random, "sample", lambda holders, count: list(holders))

    async def scenario(nodes):
        base, new = two_states()
        sent = []

        def note(index, data):
            sent.append(index)
            return data

        dying = await liar(nodes, new, lying(after=2))
        ((_, streams), (other, other_streams)) = await nodes.streams(2)
        await other_streams.serve(STATE, lying(note)(new))
        assert same(await fetch(streams, [dying.peer_id, other.peer_id], Download(new.digest, base)), new)
        assert sent == [2, 3]

    swarm(scenario)


def test_a_state_stays_for_a_while_after_its_last_request(swarm):
    async def scenario(nodes):
        base, new = two_states()
        clock = Clock()
        node, giver = await donor(nodes, new, clock)
        ((_, streams),) = await nodes.streams(1)
        giver.retire(base)
        clock.now += KEEP_SECONDS - 1
        giver.forget_old()
        assert same(await fetch(streams, [node.peer_id], Download(base.digest, new)), base)
        clock.now += KEEP_SECONDS - 1
        giver.forget_old()
        assert same(await fetch(streams, [node.peer_id], Download(base.digest, new)), base)
        clock.now += KEEP_SECONDS + 1
        giver.forget_old()
        with pytest.raises(PeerLost, match="not here any more"):
            await fetch(streams, [node.peer_id], Download(base.digest, new))

    swarm(scenario)


def test_a_foreign_runs_state_is_refused_whoever_promises_it(swarm):
    async def scenario(nodes):
        base, _ = two_states()
        _, foreign = two_states(run="other")
        node, _ = await donor(nodes, foreign)
        ((_, streams),) = await nodes.streams(1)
        with pytest.raises(BadState, match="another run"):
            await fetch(streams, [node.peer_id], Download(foreign.digest, base))

    swarm(scenario)


def test_a_state_with_nan_in_it_is_refused(swarm):
    async def scenario(nodes):
        base, _ = two_states()
        bad = next_state(base, [torch.full((SIZE,), float("nan"))], [Member("a", 1, 7)])
        node, _ = await donor(nodes, bad)
        ((_, streams),) = await nodes.streams(1)
        with pytest.raises(BadState, match="non-finite"):
            await fetch(streams, [node.peer_id], Download(bad.digest, base))

    swarm(scenario)


def test_a_request_out_of_bounds_ends_the_stream(swarm):
    async def scenario(nodes):
        _, new = two_states()
        node, _ = await donor(nodes, new)
        ((_, streams),) = await nodes.streams(1)
        for request in ({"chunk": -1}, {"chunk": 4}, {"chunk": True}, {"chunk": "x"}, {"digest": ["x"]}):
            channel = await streams.open(node.peer_id, STATE)
            if "chunk" in request:
                await channel.send({"digest": new.digest}, seconds=5)
                await channel.receive(max_payload=200, seconds=5)
            await channel.send(request, seconds=5)
            with pytest.raises(PeerLost, match=r"no chunk|not here"):
                await channel.receive(max_payload=CHUNK_BYTES, seconds=5)
            channel.close()

    swarm(scenario)


def test_one_peer_cannot_take_every_download(swarm):
    async def scenario(nodes):
        base, new = two_states()
        node, giver = await donor(nodes, new)
        ((_, greedy),) = await nodes.streams(1)
        ((_, streams),) = await nodes.streams(1)
        channels = [await greedy.open(node.peer_id, STATE) for _ in range(8)]
        await until(lambda: giver.busy)
        assert same(await fetch(streams, [node.peer_id], Download(new.digest, base)), new)
        for channel in channels:
            channel.close()

    swarm(scenario)


# ------------------------------------------------------------------------------------------------------------ what is fetched


async def outcome(chaser: Takeover):
    await until(lambda: chaser._fetch is None or chaser._fetch.task.done())
    return chaser.result()


def test_a_head_that_nobody_gives_is_asked_for_less_and_less_often(swarm):
    async def scenario(nodes):
        base, _ = two_states()
        ((_, streams), (silent, _)) = await nodes.streams(2)
        clock = Clock()
        chaser = Takeover(streams, lambda state: "", clock)
        tried = []
        for clock.now in range(200):
            chaser.consider([(Head(f"{clock.now:064x}", 10**15), silent.peer_id)], base)  # another digest each time
            if chaser.signers:
                tried.append(clock.now)
                assert await outcome(chaser) is None
        assert tried == [0, 5, 15, 35, 75, 155]

    swarm(scenario)


def test_what_most_sign_is_fetched_before_what_a_single_peer_promises(swarm):
    async def scenario(nodes):
        base, new = two_states()
        honest = [await donor(nodes, new) for _ in range(2)]
        ((_, streams),) = await nodes.streams(1)
        chaser = Takeover(streams, lambda state: "")
        claims = [(Head(new.digest, 7), node.peer_id) for node, _ in honest]
        chaser.consider([(Head("f" * 64, 10**15), "nobody"), *claims], base)
        assert same(await outcome(chaser), new)

    swarm(scenario)


def test_a_download_that_stalls_gives_way_to_another(swarm):
    async def scenario(nodes):
        base, new = two_states()
        node, _ = await donor(nodes, new)

        async def sleepy(channel):
            await asyncio.sleep(60)

        ((sleeper, sleeper_streams), (_, streams)) = await nodes.streams(2)
        await sleeper_streams.serve(STATE, sleepy)
        clock = Clock()
        chaser = Takeover(streams, lambda state: "", clock)
        claims = [(Head("f" * 64, 10**15), sleeper.peer_id), (Head(new.digest, 7), node.peer_id)]
        chaser.consider(claims[:1], base)
        chaser.consider(claims, base)
        assert chaser._fetch.head.samples == 10**15
        clock.now += takeover.STALLED_SECONDS + 1
        chaser.consider(claims, base)
        await until(lambda: chaser._fetch and chaser._fetch.head.digest == new.digest)
        assert same(await outcome(chaser), new)
        await chaser.close()

    swarm(scenario)


def test_an_old_state_behind_a_great_promise_is_refused(swarm):
    async def scenario(nodes):
        base, new = two_states()
        node, _ = await donor(nodes, base)
        ((_, streams),) = await nodes.streams(1)
        chaser = Takeover(streams, lambda state: "")
        chaser.consider([(Head(base.digest, 10**15), node.peer_id)], new)
        assert await outcome(chaser) is None

    swarm(scenario)
