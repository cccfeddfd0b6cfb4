"""One limit for a state's header: what others send above it is refused, and what we make never is."""

import dataclasses
import math
import random
import struct

import msgpack
import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.net.messages import read_header
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.state import ANCESTORS_KEPT, MAX_HEADER_BYTES, MOST_MEMBERS, BadState, Head, Header, State, next_state, state_digest
from peer.sync.engine.trainer.messages import Rebase, Start
from peer.sync.engine.trainer.port import Port
from peer.sync.engine.transfer.download import CHUNKS, Download, Lied
from peer.sync.engine.transfer.state_fetch import StateFetch, WholeState
from tests.peer.sync.replicas import Peer, make_run
from tests.peer.sync.swarm_tools import ANYTHING, held, shared_copy, state_of, until


def identity(rng: random.Random) -> str:
    return "Qm" + "".join(rng.choices("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", k=44))


def lineage(members: int, rounds: int, rng: random.Random, *, always_new: bool = False) -> list[Header]:
    """Headers of a run of so many peers, each with all of them; always_new: other peers in each round."""
    peers = [identity(rng) for _ in range(members * (rounds if always_new else 1))]
    headers = [Header(run="r" * 64, schema="s" * 64)]
    for number in range(1, rounds + 1):
        here = peers[members * (number - 1) :][:members] if always_new else peers
        headers.append(headers[-1].child(f"{number:064x}", [Member(peer, number, rng.randrange(1, 99)) for peer in here], "m" * 64))
    return headers


def test_some_hundred_members_keep_all_their_ancestors(seed):
    last = lineage(370, 10, random.Random(seed))[-1]
    assert len(last.ancestors) == len(last.parents) == ANCESTORS_KEPT and last.num_bytes <= MAX_HEADER_BYTES


@pytest.mark.parametrize("always_new", [False, True])
def test_with_more_members_the_oldest_ancestors_go_and_nobody_refuses_the_header(seed, always_new):
    for header in lineage(MOST_MEMBERS, 14, random.Random(seed), always_new=always_new):
        assert read_header(header.to_json()) == header
    assert 1 <= len(header.ancestors) < ANCESTORS_KEPT and header.parents == tuple(a.digest for a in header.ancestors)
    named = {member.peer for members in (header.members, *(a.members for a in header.ancestors)) for member in members}
    assert named <= set(header.included), "what was made within the rounds that are named cannot be brought twice"


def test_those_who_are_long_gone_are_forgotten_before_any_ancestor_is(seed):
    """A run that thousands came to and left: each left 50 bytes behind for ever."""
    headers = lineage(100, 60, random.Random(seed), always_new=True)
    assert all(len(header.ancestors) == ANCESTORS_KEPT for header in headers[9:])
    assert any(len(header.included) > 2000 for header in headers) and len(headers[-1].included) < 6000


def test_the_largest_honest_header_has_a_child(seed):
    """The bounds on members, texts and counts together: whatever was accepted, the next round can be written down."""
    rng = random.Random(seed)
    header = Header(run="r" * 64, schema="s" * 64)
    for number in range(3):
        members = [Member(rng.randbytes(32).hex(), 1 << 53, 1 << 42) for _ in range(MOST_MEMBERS)]
        header = header.child(rng.randbytes(32).hex(), members, "m" * 64)
        assert read_header(header.to_json()) == header, number
    with pytest.raises(BadState, match="513 members"):
        header.child("d" * 64, [Member(str(number), 1, 1) for number in range(MOST_MEMBERS + 1)])
    with pytest.raises(BadState, match="more than a state may have"):
        header.child("d" * 64, [Member("a", 1, 1 << 53)])


def stuffed(base: State, num_bytes: int, rng: random.Random) -> State:
    """A made-up state whose header has at least so many bytes, signed by its digest."""
    included = {"a": 1}
    while Header(run="r", schema="s", included=included).num_bytes < num_bytes:
        included |= {identity(rng): rng.randrange(1 << 40) for _ in range(100)}
    header = Header(base.header.run, base.header.schema, 1, 7, (base.digest,), included, (Member("a", 1, 7),))
    return State(header, shared_copy(torch.ones(base.buffer.floats().numel())))


async def dishonest(nodes, state: State):
    """A node that gives `state`, whatever its header's size, by its own framing."""
    ((node, streams),) = await nodes.streams(1)

    async def serve(channel) -> None:
        await channel.receive(ANYTHING, seconds=60)
        answer, proof = msgpack.packb({"header": state.header.to_json()}), b"".join(state.chunk_hashes)
        await channel._pipe.send(struct.pack("<II", len(answer), len(proof)) + answer + proof, until=math.inf)
        await channel.hung_up(60)

    await streams.serve(CHUNKS, serve)
    return node.peer_id


@pytest.mark.parametrize("over", [1, 9000])
def test_a_header_above_the_limit_is_a_lie_of_its_sender(virtual, seed, over):
    async def scenario(nodes):
        base = state_of(torch.zeros(1000))
        state = stuffed(base, MAX_HEADER_BYTES + over, random.Random(seed))
        liar = await dishonest(nodes, state)
        ((_, streams),) = await nodes.streams(1)
        with pytest.raises(Lied, match=liar[-6:]):
            await Download(WholeState(state.digest, base), {liar}).run(streams)
        chaser = StateFetch(streams, lambda head, header: "")
        chaser.consider(held([(Head(state.digest, 7), liar)]), base)
        await until(lambda: chaser._fetch.task.done())
        assert chaser.result() is None and not chaser.promises.counts(liar)

    virtual(scenario)


def test_a_header_below_the_limit_goes_through_stream_and_port(virtual, seed):
    async def scenario(nodes):
        base = state_of(torch.zeros(1000))
        state = stuffed(base, MAX_HEADER_BYTES - 8000, random.Random(seed))
        giver = await dishonest(nodes, state)
        ((_, streams),) = await nodes.streams(1)
        content = WholeState(state.digest, base)
        download = Download(content, {giver})
        with pytest.raises(PeerLost):  # it gives no chunks
            await download.run(streams)
        assert download.hashes is not None
        assert read_header(state.header.to_json()).child(state.digest, [Member("b", 1, 8)]).num_bytes <= MAX_HEADER_BYTES

    virtual(scenario)


@pytest.mark.parametrize("num_bytes", [199_000, 221_000, MAX_HEADER_BYTES - 8000])
def test_every_header_that_is_taken_over_can_be_told_to_the_trainer(seed, num_bytes):
    """221 kB went through a stream and ended sidecar and trainer, five times, until both gave up."""
    header = stuffed(state_of(torch.zeros(10)), num_bytes, random.Random(seed)).header
    assert read_header(header.to_json()) == header
    ours, theirs = Port.pair()
    ours.send(Rebase("d" * 64, header.to_json(), shared_copy(torch.ones(10))))
    assert read_header(theirs.receive(10).header) == header
    others = {field.name: None for field in dataclasses.fields(Start)}
    long = {"header": header.to_json(), "run": {"model": "x" * 2048}, "peers": ["/" + "x" * 511] * 64}
    ours.send(Start(**{**others, **long, "state": shared_copy(torch.ones(10))}))
    assert theirs.receive(10).peers == long["peers"]
    ours.close()
    theirs.close()


def test_a_round_that_would_make_a_header_nobody_takes_fails_and_ends_nothing(virtual):
    """The state before it has as many samples as can be counted."""

    async def scenario(nodes):
        run = make_run()
        base = state_of(torch.zeros(1000), run=run.digest)
        full = next_state(base, [[torch.ones(1000)]], [Member("a", 1, (1 << 53) - 5)])
        peer = await Peer(nodes, await nodes.node(), run, state=full).start(nodes)
        await until(lambda: peer.replica.status.note.startswith("round 2 not averaged"))
        assert not peer.failures and not peer.tasks[0].done() and peer.head is full

    virtual(scenario)


def test_the_digest_of_a_fitted_header_is_the_same_for_everybody(seed):
    headers = lineage(MOST_MEMBERS, 9, random.Random(seed))
    again = read_header(headers[-2].to_json())
    shuffled = dict(random.Random(seed).sample(sorted(again.included.items()), len(again.included)))
    object.__setattr__(again, "included", shuffled)
    members = list(headers[-1].members)
    random.Random(seed).shuffle(members)
    child = again.child(headers[-1].parents[0], members, headers[-1].mean)
    assert state_digest(child, [b"x"]) == state_digest(headers[-1], [b"x"])
