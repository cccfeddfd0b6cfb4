"""What the host's ban does among peers: one hears of it, all keep to it, and the banned one is told why."""

import asyncio

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peer.sync.engine.net.messages import Answer, Call
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.round.averaging import Averager
from peer.sync.engine.round.calls import CALL
from peer.sync.engine.state import Head
from swarm.bans import Bans, sign_word
from swarm.errors import ExitCode, UserError
from swarm.members import Members, sign_membership
from swarm.signing import HostKey
from tests.peer.sync.replicas import Peer, check_invariants, make_run
from tests.peer.sync.swarm_tools import until


@pytest.fixture(autouse=True)
def host_key(tmp_path):
    """The same in every run: a run for members draws its ids, and with them all chance, from its host's key."""
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "host.key").write_bytes(Ed25519PrivateKey.from_private_bytes(bytes(range(32))).private_bytes(*pem))
    (tmp_path / "host.key").chmod(0o600)


async def swarm_of(nodes, count, run, key, halves=False, **options) -> list[Peer]:
    """halves: neither half hears of the other before `nodes.heal()`."""
    at = [await nodes.node() for _ in range(count)]
    if halves:
        nodes.split(node.peer_id for node in at[: count // 2])
    members = [Members(run, Bans(run, key.public, rng=nodes.rng), sign_membership(key, run, node.peer_id)) for node in at]
    started = [Peer(nodes, node, run, members=each, **options) for node, each in zip(at, members, strict=True)]
    for peer in started:
        await peer.start(nodes)
    return started


async def begins_again(nodes, peer, key) -> Peer:
    """As dd-peer starts it: with its identity, its folder, and the host's words in it."""
    await peer.node.close()
    bans = Bans(peer.run, key.public, peer.replica.members.bans.words)
    node = await nodes.node(again=peer.node)
    return await Peer(nodes, node, peer.run, members=Members(peer.run, bans), number=peer.number, resumes=True).start(nodes)


def test_one_hears_that_a_peer_is_banned_all_keep_it_out_and_it_is_told_why(virtual, tmp_path):
    async def scenario(nodes):
        key, run = HostKey(tmp_path / "host.key"), make_run()
        told, other, bad = await swarm_of(nodes, 3, run, key)
        await until(lambda: all(len(peer.head.header.members) == 3 for peer in (told, other, bad)))
        told.replica.members.bans.hear([sign_word(key, run, bad.id, banned=True, reason="it lies")])
        await until(lambda: bad.tasks[0].done() and bad.id in other.replica.members.bans.peers())
        error = bad.tasks[0].exception()
        assert isinstance(error, UserError) and error.code == ExitCode.AUTH and "banned this peer: it lies" in error.message
        await until(lambda: all([r.peer_id for r in one.replica.neighbours.others()] == [two.id] for one, two in ((told, other), (other, told))))
        round_ = told.head.header.round
        await until(lambda: told.head.header.round > round_ + 2)
        assert {member.peer for member in told.head.header.members} == {told.id, other.id}
        check_invariants(told, other)

    virtual(scenario)


def test_a_banned_peer_that_goes_on_all_the_same_is_answered_nothing_but_the_reason(virtual, tmp_path):
    """It runs another program, which does not end."""

    async def scenario(nodes):
        key, run = HostKey(tmp_path / "host.key"), make_run()
        honest, other = await swarm_of(nodes, 2, run, key)
        deaf = Peer(nodes, await nodes.node(), run)  # knows no host
        await deaf.start(nodes)
        await until(lambda: len(honest.replica.neighbours.others()) == 2)
        for peer in (honest, other):
            peer.replica.members.bans.hear([sign_word(key, run, deaf.id, banned=True, reason="it lies")])
        with pytest.raises(PeerLost, match="you are banned by the host: it lies"):
            channel = await deaf.replica._streams.open(honest.id, CALL)
            await channel.send(Call(head=Head.of(deaf.head)), seconds=5)
            await channel.receive(Answer, seconds=5)
        number = honest.head.header.round
        await until(lambda: honest.head.header.round > number + 3)
        assert deaf.id not in {member.peer for member in honest.head.header.members}
        assert deaf.id not in {record.peer_id for record in honest.replica.neighbours.others()}
        check_invariants(honest, other)

    virtual(scenario)


def test_where_three_take_part_whom_the_host_trusts_nobody_else_averages(virtual, tmp_path, monkeypatch):
    """One hears of it from the server, the others by its record."""
    groups, average = [], Averager.average

    async def noting(self, group, *options):
        groups.append(group)
        return await average(self, group, *options)

    monkeypatch.setattr(Averager, "average", noting)

    async def scenario(nodes):
        key = HostKey(tmp_path / "host.key")
        run = make_run(members_of=key.public)
        *trusted, other = found = await swarm_of(nodes, 4, run, key)
        named = {peer.id for peer in trusted}
        other.replica.members.bans.hear([sign_word(key, run, peer, trusted=True) for peer in sorted(named)])
        await until(lambda: all(peer.replica.members.bans.trusted == named for peer in found))
        number = other.head.header.round + 1  # one may be on its way
        await until(lambda: min(peer.head.header.round for peer in found) > number)
        del groups[:]
        await until(lambda: min(peer.head.header.round for peer in found) > number + 10)
        full = [group for group in groups if named <= group.peers]
        assert len(full) > 10 and all(set(group.reducers) == named for group in full)
        assert any(other.id in group.peers for group in full) and all(group.leader in named for group in full)
        assert not any(peer.replica.rounds.company.offences(another.id) for peer in found for another in found), "some heard of it before others"
        check_invariants(*found)

    virtual(scenario)


def test_who_stands_on_a_state_that_the_host_discards_ends_and_begins_again_from_what_was_before_it(virtual, tmp_path):
    async def scenario(nodes):
        key, run = HostKey(tmp_path / "host.key"), make_run()
        told, _ = found = await swarm_of(nodes, 2, run, key)
        await until(lambda: min(peer.head.header.round for peer in found) > 3)
        forged = told.head
        told.replica.members.bans.hear([sign_word(key, run, forged.digest, banned=True, reason="it is forged")])
        await until(lambda: all(peer.tasks[0].done() for peer in found))
        for peer in found:
            error = peer.tasks[0].exception()
            assert isinstance(error, UserError) and error.code == ExitCode.FAILED and f"has discarded state {forged.digest[:16]}" in error.message
            await peer.node.close()
        again = [await begins_again(nodes, peer, key) for peer in found]
        for peer in again:
            began = peer.replica.state.value.header.round
            assert peer.store.forsaken and began < forged.header.round and bool(peer.replica.met) == (began > 0)
        await until(lambda: min(peer.head.header.round for peer in again) > forged.header.round + 10)
        for peer in again:
            assert not any(peer.store.discarded.holds(state.digest, state.header) for state in peer.lands)
            assert not any(past.startswith(forged.digest[:12]) for past in peer.head.header.past())
        check_invariants(*again)

    virtual(scenario)


def test_two_pairs_that_never_met_stay_apart_until_the_host_discards_one_branch(virtual, tmp_path):
    async def scenario(nodes):
        key, run = HostKey(tmp_path / "host.key"), make_run(target_batch_size=160)  # a round every 2 s
        four = await swarm_of(nodes, 4, run, key, halves=True)
        stays, leaves = four[:2], four[2:]
        await until(lambda: min(peer.head.header.round for peer in four) > 3)
        nodes.heal()
        await asyncio.sleep(60)
        assert all(len(peer.replica.neighbours.others()) == 3 for peer in four)
        parted = leaves[0].lands[1].digest
        assert not {parted[:12]} & {past[:12] for peer in stays for past in peer.head.header.past()}, "each pair has a branch of its own"
        four[0].replica.members.bans.hear([sign_word(key, run, parted, banned=True)])
        await until(lambda: all(peer.tasks[0].done() for peer in leaves))
        assert all(f"has discarded state {parted[:16]}" in str(peer.tasks[0].exception()) for peer in leaves)
        again = [await begins_again(nodes, peer, key) for peer in leaves]
        assert all(peer.store.forsaken for peer in again) and not {peer.id for peer in leaves} - {peer.id for peer in again}
        await until(lambda: {member.peer for member in stays[0].head.header.members} == {peer.id for peer in (*stays, *again)})
        assert not any(peer.tasks[0].done() for peer in stays)
        check_invariants(*stays, *again)

    virtual(scenario)


def test_one_that_goes_on_from_a_discarded_state_all_the_same_is_no_neighbour(virtual, tmp_path):
    """It runs another program, which does not end."""

    async def scenario(nodes):
        key, run = HostKey(tmp_path / "host.key"), make_run()
        deaf = Peer(nodes, await nodes.node(), run)  # knows no host
        await deaf.start(nodes)
        await until(lambda: deaf.head.header.round > 2)
        deaf.rate = 0  # its state stays
        forged, told = deaf.head, Members(run, Bans(run, key.public))
        told.bans.hear([sign_word(key, run, forged.digest, banned=True)])
        honest = Peer(nodes, await nodes.node(), run, members=told)
        await honest.start(nodes)
        await until(lambda: honest.head.header.round > 2)
        assert not honest.replica.neighbours.others() and forged.digest not in {state.digest for state in honest.lands}

    virtual(scenario)


def test_whom_the_host_lets_in_again_averages_again(virtual, tmp_path):
    async def scenario(nodes):
        key, run = HostKey(tmp_path / "host.key"), make_run()
        one, two = await swarm_of(nodes, 2, run, key)
        third = Peer(nodes, await nodes.node(), run)
        one.replica.members.bans.hear([sign_word(key, run, third.id, banned=True, clock=lambda: 1)])
        await third.start(nodes)
        await until(lambda: third.id in two.replica.members.bans.peers() and one.head.header.round > 2)
        one.replica.members.bans.hear([sign_word(key, run, third.id, banned=False, clock=lambda: 2)])
        await until(lambda: not two.replica.members.bans.peers() and third.id in {member.peer for member in two.head.header.members})
        await until(lambda: third.head.digest == one.head.digest)
        check_invariants(one, two, third)

    virtual(scenario)
