"""Catching up by repeating rounds: from whoever has their means, and the whole state where anything differs."""

import asyncio
import math
import resource

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.round.averaging import Mean
from peer.sync.engine.state import CHUNK_BYTES, Head, State, hash_chunks, mean_digest, next_state
from peer.sync.engine.transfer import replay
from peer.sync.engine.transfer.donors import Donor
from peer.sync.engine.transfer.download import CHUNKS, PIECE_BYTES, Manifest
from peer.sync.engine.transfer.replay import MeanStore
from peer.sync.engine.transfer.state_fetch import Replaying, StateFetch
from swarm.tasks import end_tasks
from tests.clock import Clock
from tests.peer.sync.swarm_tools import held, holder, same, state_of, until

SIZE = 5 * CHUNK_BYTES // 8 + 5  # a state of six chunks (two vectors), a mean of three
MEAN_BYTES = SIZE * 4


def step(state: State, mean: Mean, members, into=None) -> State:
    """Like `gradients`: what it does depends on the mean's norm, and an outer tensor remembers."""
    anchor, slot = state.vectors(SIZE)
    slot = slot * 0.5 + mean.encoded.view(torch.float32) / math.sqrt(mean.square_norm)
    return next_state(state, [[anchor - 0.1 * slot, slot]], members, mean_digest(mean.square_norm, hash_chunks(mean.encoded)), into, mean.group)


def other_step(state: State, mean: Mean, members, into=None) -> State:
    """Another arithmetic than everybody else's."""
    return step(state, Mean(mean.encoded, mean.square_norm * 2, group=mean.group), members, into)


def rounds(count: int) -> tuple[list[State], list[Mean]]:
    """A base and `count` states after it; `means[i]` led to `states[i]`."""
    generator = torch.Generator().manual_seed(1)
    states, means = [state_of(torch.ones(SIZE), slots=1)], [None]
    for number in range(1, count + 1):
        mean = Mean(torch.randn(SIZE, generator=generator).view(torch.uint8), 2.0 + number, group=f"group {number}")
        states.append(step(states[-1], mean, [Member("a", number, 7)]))
        means.append(mean)
    return states, means


async def giver(nodes, states, means):
    """A holder of the last of `states` and of the means of its last two rounds."""
    one = await holder(nodes, states[-1])
    for state, mean in zip(states[-2:], means[-2:], strict=True):
        if mean is not None:
            one.means.keep(state.digest, Manifest(state.header, state.chunk_hashes), mean)
    return one


async def taken(nodes, streams, ours: State, head: State, holders, how=step, clock=None) -> tuple[State, StateFetch, dict]:
    """What a StateFetch brings, and the figures of its line in the log."""
    means = MeanStore(nodes.folder / "ours")
    chaser = StateFetch(streams, lambda head, header: "", clock or Clock(), Replaying(MEAN_BYTES, how, means))
    chaser.consider(held([(Head.of(head), peer) for peer in holders]), ours)
    fetch = chaser._fetch
    await until(lambda: fetch.task.done())
    state = chaser.result()
    figures = {"replayed": len(fetch.replay.digests) if fetch.replayed else 0, "bytes": sum(d.bytes_received for d in fetch.downloads)}
    return state, chaser, {**figures, "kept": [digest for digest, _, _ in means._wanted], "fetch": fetch}


@pytest.mark.parametrize("missed", [1, 2])
def test_who_missed_a_round_or_two_repeats_them(virtual, missed):
    async def scenario(nodes):
        states, means = rounds(3)
        pair = [await giver(nodes, states, means) for _ in range(2)]
        ((_, streams),) = await nodes.streams(1)
        taken_over = []

        def counted_step(state, mean, members, into):
            taken_over.append(into is state.buffer)
            return step(state, mean, members, into)

        state, _, told = await taken(nodes, streams, states[3 - missed], states[3], [one.node.peer_id for one in pair], counted_step)
        assert taken_over == [False, True][:missed], "besides ours there is one state at a time"
        assert same(state, states[3])
        assert told["replayed"] == missed
        assert missed * MEAN_BYTES <= told["bytes"] <= 2 * missed * MEAN_BYTES  # a late chunk may come twice
        assert told["kept"] == [s.digest for s in states[-missed:]], "it can give them to others now"

    virtual(scenario)


def test_who_missed_three_rounds_fetches_the_whole_state(virtual):
    async def scenario(nodes):
        states, means = rounds(3)
        one = await giver(nodes, states, means)
        ((_, streams),) = await nodes.streams(1)
        state, _, told = await taken(nodes, streams, states[0], states[3], [one.node.peer_id])
        assert same(state, states[3]) and told["replayed"] == 0 and told["bytes"] >= states[3].buffer.num_bytes

    virtual(scenario)


def test_arithmetic_that_differs_is_noticed_and_the_state_fetched_whole(virtual):
    async def scenario(nodes):
        states, means = rounds(1)
        one = await giver(nodes, states, means)
        ((_, streams),) = await nodes.streams(1)
        state, _, told = await taken(nodes, streams, states[0], states[1], [one.node.peer_id], other_step)
        assert same(state, states[1]) and told["replayed"] == 0 and told["kept"] == []

    virtual(scenario)


class Liar:
    """Gives whole states honestly and changes what it says of means."""

    def __init__(self, one, answer=lambda answer: answer, proof=lambda proof: proof, piece=lambda piece: piece, pieces=10**6):
        self.one, self.answer, self.proof, self.piece, self.pieces = one, answer, proof, piece, pieces

    async def start(self):
        self.honest = Donor(self.one.streams, lambda: self.one.state, self.one.store, self.one.means)
        await self.one.streams.serve(CHUNKS, self.serve)

    async def serve(self, channel):
        send, sent = channel.send, 0
        means = False

        async def lying(header, payload=b"", *, seconds):
            nonlocal means, sent
            header = header if isinstance(header, dict) else header.wire()
            if "square_norm" in header:
                means, header, payload = True, self.answer(header), self.proof(bytes(payload))
            elif means and "error" not in header:
                sent, payload = sent + 1, self.piece(bytes(payload))
                if sent > self.pieces:
                    channel.close()
                    raise RuntimeError("dead")
            await send(header, payload, seconds=seconds)

        channel.send = lying
        await self.honest._serve(channel)


async def liar(nodes, states, means, **lies):
    ((node, streams),) = await nodes.streams(1)
    one = await giver(nodes, states, means)
    one.node, one.streams = node, streams
    await Liar(one, **lies).start()
    return one


LIES = {
    "another mean": {"piece": lambda piece: bytes(len(piece))},
    "a short piece": {"piece": lambda piece: piece[:-1]},
    "another norm": {"answer": lambda answer: {**answer, "square_norm": answer["square_norm"] + 1}},
    "a norm that is not finite": {"answer": lambda answer: {**answer, "square_norm": math.inf}},
    "no norm": {"answer": lambda answer: {**answer, "square_norm": None}},
    "another length": {"answer": lambda answer: {**answer, "num_bytes": 1 << 50}},
    "other hashes": {"proof": lambda proof: proof[:-1] + b"\0"},
    "garbage for a header": {"answer": lambda answer: {**answer, "header": [1, "x"]}},
}


@pytest.mark.parametrize("what", LIES)
def test_a_wrong_mean_is_found_before_it_is_used_and_its_sender_avoided(virtual, what):
    async def scenario(nodes):
        states, means = rounds(1)
        bad = await liar(nodes, states, means, **LIES[what])
        ((_, streams),) = await nodes.streams(1)
        clock = Clock()
        state, chaser, told = await taken(nodes, streams, states[0], states[1], [bad.node.peer_id], clock=clock)
        assert same(state, states[1]) and told["replayed"] == 0, "it gave the whole state, which is proven chunk by chunk"
        chaser.consider(held([(Head("f" * 64, 100), bad.node.peer_id)]), states[1])
        assert not chaser.signers, "but it is not believed again soon"

    virtual(scenario)


def test_another_holder_makes_up_for_a_liar_and_for_one_that_dies(virtual):
    async def scenario(nodes):
        states, means = rounds(2)
        lying = await liar(nodes, states, means, piece=lambda piece: bytes(len(piece)))
        dying = await liar(nodes, states, means, pieces=CHUNK_BYTES // PIECE_BYTES // 2)
        honest = await giver(nodes, states, means)
        ((_, streams),) = await nodes.streams(1)
        three = [one.node.peer_id for one in (lying, dying, honest)]
        state, _, told = await taken(nodes, streams, states[0], states[2], three)
        assert same(state, states[2]) and told["replayed"] == 2

    virtual(scenario)


def test_nobody_with_the_means_left_costs_no_more_than_the_whole_state(virtual):
    async def scenario(nodes):
        states, means = rounds(1)
        one = await holder(nodes, states[1])
        torn = await giver(nodes, states, means)
        path = torn.means._path(states[1].digest)
        path.write_bytes(path.read_bytes()[:-1])
        ((_, streams),) = await nodes.streams(1)
        state, _, told = await taken(nodes, streams, states[0], states[1], [one.node.peer_id, torn.node.peer_id])
        assert same(state, states[1]) and told["replayed"] == 0

    virtual(scenario)


def test_a_newcomer_whose_download_took_two_rounds_catches_up_without_a_second_one(virtual):
    async def scenario(nodes):
        states, means = rounds(5)
        one = await giver(nodes, states[:4], means[:4])
        ((_, streams),) = await nodes.streams(1)
        first, chaser, told = await taken(nodes, streams, states[0], states[3], [one.node.peer_id])
        assert same(first, states[3]) and not told["replayed"]
        for number in (4, 5):
            one.moves_to(states[number])
            one.means.keep(states[number].digest, Manifest(states[number].header, states[number].chunk_hashes), means[number])
        chaser.consider(held([(Head.of(states[5]), one.node.peer_id)]), first)
        fetch = chaser._fetch
        await until(lambda: fetch.task.done())
        assert same(chaser.result(), states[5])
        assert fetch.replayed and not fetch.download.bytes_received

    virtual(scenario)


# ------------------------------------------------------------------------------------------------------------ on disk


def has(store: MeanStore, state: State) -> bool:
    kept = store.open(state.digest)
    if kept is not None:
        kept.file.close()
    return kept is not None


def test_the_means_of_the_last_two_rounds_are_kept_and_found_again(tmp_path):
    states, means = rounds(4)
    store = MeanStore(tmp_path)
    for state, mean in zip(states[1:], means[1:], strict=True):
        store.keep(state.digest, Manifest(state.header, state.chunk_hashes), mean)
    assert [has(MeanStore(tmp_path), state) for state in states] == [False, False, False, True, True]
    kept = store.open(states[4].digest)
    with kept.file:
        assert kept.manifest == Manifest(states[4].header, states[4].chunk_hashes)
        content = torch.empty(kept.file.num_bytes, dtype=torch.uint8)
        kept.file.read_into(content)
        assert torch.equal(content, means[4].encoded) and kept.square_norm == means[4].square_norm


def test_a_mean_that_is_about_to_be_written_is_waited_for(tmp_path, monkeypatch):
    async def scenario():
        states, means = rounds(1)
        store = MeanStore(tmp_path)
        await asyncio.wait_for(store.written(states[1].digest), 5)  # nothing is on its way
        store.want(states[1], means[1])
        monkeypatch.setattr(replay, "WRITE_SECONDS", 0.3)
        await asyncio.wait_for(store.written(states[1].digest), 5)  # nobody writes it: not waited for in vain
        assert not has(store, states[1])
        monkeypatch.setattr(replay, "WRITE_SECONDS", 60)
        writing = asyncio.create_task(store.keep_forever())
        await asyncio.wait_for(store.written(states[1].digest), 30)
        assert has(store, states[1])
        await end_tasks(writing)

    asyncio.run(scenario())


def test_a_branch_that_was_left_is_forgotten(tmp_path):
    states, means = rounds(2)
    store = MeanStore(tmp_path)
    store.keep(states[2].digest, Manifest(states[2].header, states[2].chunk_hashes), means[2])
    fork = step(states[1], Mean(means[2].encoded, 9.0), [Member("b", 1, 7)])
    store.keep(fork.digest, Manifest(fork.header, fork.chunk_hashes), Mean(means[2].encoded, 9.0))
    assert has(store, fork) and not has(store, states[2])


@pytest.mark.parametrize("name", ["../secret", "a" * 31 + "\0", "", "A" * 64, "a" * 65])
def test_a_name_that_is_no_digest_opens_no_file(tmp_path, name):
    (tmp_path / "secret.mean").write_text("{}")
    assert MeanStore(tmp_path / "means").open(name) is None


def test_a_full_disk_costs_the_mean_and_nothing_else(tmp_path, caplog):
    states, means = rounds(1)
    store = MeanStore(tmp_path / "means")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEAN_BYTES // 2, hard))
    try:
        store.keep(states[1].digest, Manifest(states[1].header, states[1].chunk_hashes), means[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "could not keep the mean of round 1" in caplog.text
    assert list((tmp_path / "means").iterdir()) == []


def test_a_folder_that_cannot_be_made_costs_no_more(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    states, means = rounds(1)
    MeanStore(tmp_path / "file" / "means").keep(states[1].digest, Manifest(states[1].header, states[1].chunk_hashes), means[1])
    assert "could not keep the mean" in caplog.text
