"""A reducer that gives two members two means has signed both: they compare, and the proof bans it everywhere. Honest peers cannot be framed."""

import contextlib
import dataclasses

import pytest
import torch

from peer.sync.engine.codec import PART_ELEMENTS, Wire
from peer.sync.engine.net.messages import Shares, SignedShare
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.round.averaging import Averager
from peer.sync.engine.round.equivocation import SHARES
from peer.sync.engine.round.share_seals import Given, ShareSeals
from swarm.errors import ExitCode, UserError
from swarm.proofs import Proof, Proofs
from swarm.statements import statement
from tests.peer.sync.replicas import make_run
from tests.peer.sync.swarm_tools import until
from tests.peer.sync.test_members import member

SECONDS = 100.0


class TwoFaced(Averager):
    """Gives `victim` its means with their values in another order, and signs them."""

    victim = ""
    node = None
    signs = True

    async def _serve(self, channel):
        honest, given = channel.send, Given()

        async def send(message, payload=b"", *, seconds):
            if channel.peer == self.victim and hasattr(message, "square"):
                data = torch.frombuffer(bytearray(payload), dtype=torch.int16).flip(0).view(torch.uint8)
                group, reduction = next((group, each) for group, each in self._reductions.items() if channel.peer in each.senders)
                given.add(reduction.parts[len(given.hashes)], data, message.square)
                if message.signature:
                    signature = self.node.sign(statement(self._seals._run, group, given.digest(message.inputs)))
                    message = message.model_copy(update={"signature": signature if self.signs else message.signature})
                payload = memoryview(data.numpy())
            await honest(message, payload, seconds=seconds)

        channel.send = send
        await super()._serve(channel)


async def swarm_of(nodes, key, count):
    """Members that have averaged together; each reduces a part."""
    run = make_run(members_of=key.public, target_batch_size=80 * count)
    found = [await member(nodes, key, run, size=count * PART_ELEMENTS) for _ in range(count)]
    await until(lambda: all(len(peer.replica.met) == count - 1 for peer in found), SECONDS)
    return found


async def two_faced(liar, victim, *, signs=True):
    averager = liar.replica.rounds.averager
    averager.__class__ = type("Liar", (TwoFaced,), {"victim": victim.id, "node": liar.node, "signs": signs})
    await averager.start()


def banned(peer, other):
    return peer.replica.members.proofs.reason(other.id)


def test_a_reducer_that_gives_two_means_is_banned_by_all_who_hear_of_it(virtual, key):
    async def scenario(nodes):
        liar, victim, *others = await swarm_of(nodes, key, 4)
        await two_faced(liar, victim)
        honest = [victim, *others]
        await until(lambda: all(banned(peer, liar) for peer in honest), SECONDS)
        assert not any(banned(peer, other) for peer in [*honest, liar] for other in honest)
        await until(lambda: liar.failures, SECONDS)
        error = liar.failures[0]
        assert isinstance(error, UserError) and error.code is ExitCode.AUTH and "banned by a proof of its own key" in error.message
        at = max(peer.head.header.round for peer in honest)
        await until(lambda: min(peer.head.header.round for peer in honest) >= at + 3, SECONDS)
        assert liar.id not in {member.peer for member in victim.head.header.members}
        newcomer = await member(nodes, key, victim.run, size=4 * PART_ELEMENTS)
        newcomer.replica.members.hear(liar.id, liar.replica.members.own)  # it is seen again, say
        await until(lambda: banned(newcomer, liar), SECONDS)
        await until(lambda: len({peer.head.digest for peer in honest}) == 1, SECONDS)  # of the two branches one is left
        assert not any(peer.failures for peer in honest)

    virtual(scenario)


def test_a_reducer_that_does_not_sign_what_it_gave_fails_the_round_by_itself(virtual, key):
    """It keeps to one signature: whom it lied to has none, and leaves it out."""

    async def scenario(nodes):
        liar, victim, third = await swarm_of(nodes, key, 3)
        await two_faced(liar, victim, signs=False)
        await until(lambda: victim.replica.rounds.company.offences(liar.id), SECONDS)
        assert not any(banned(peer, other) for peer in (victim, third) for other in (liar, victim, third))

    virtual(scenario)


def test_honest_members_compare_nothing_and_nobody_is_accused(virtual, key):
    async def scenario(nodes):
        trio, asked = await swarm_of(nodes, key, 3), []
        for peer in trio:
            swap = peer.replica._equivocation._swap

            async def count(other, kept=None, swap=swap):
                asked.append(kept)
                await swap(other, kept)

            peer.replica._equivocation._swap = count
        at = trio[0].head.header.round
        await until(lambda: min(peer.head.header.round for peer in trio) >= at + 10, SECONDS)
        assert not any(asked) and not any(banned(peer, other) for peer in trio for other in trio)
        assert all(peer.replica._equivocation._kept for peer in trio)

    virtual(scenario)


def test_who_says_that_an_honest_reducer_signed_something_else_accuses_nobody(virtual, key):
    async def scenario(nodes):
        one, two, framer = await swarm_of(nodes, key, 3)
        both = []
        await until(lambda: both.extend([each for each in one.replica._equivocation._kept if two.id in each.shares][len(both) :]) or len(both) > 1)
        earlier, kept = both[:2]
        real, older = kept.shares[two.id], earlier.shares[two.id]
        by_framer = framer.node.sign(statement(one.run.digest, kept.group, "0" * 64))
        lies = {
            "its own signature": SignedShare(reducer=two.id, digest="0" * 64, signature=by_framer),
            "the right signature of another digest": SignedShare(reducer=two.id, digest="0" * 64, signature=real.signature),
            "what was signed of an older group": SignedShare(reducer=two.id, digest=older.digest, signature=older.signature),
            "a peer that reduced nothing": SignedShare(reducer="Qm", digest="0" * 64, signature=by_framer),
        }
        proof = Proof(accused=two.id, key=real.key, group=kept.group, digests=(real.digest, older.digest), signatures=(real.signature, older.signature))
        for name, lie in lies.items():
            with contextlib.closing(await framer.replica._streams.open(one.id, SHARES)) as channel:
                await channel.send(Shares(group=kept.group, shares=(lie,), proofs=(proof,)), seconds=60)
                answer, _ = await channel.receive(Shares, seconds=60)
            assert not one.replica.members.proofs.all and not answer.proofs, name
            assert {share.reducer for share in answer.shares} == kept.shares.keys()

    virtual(scenario)


def test_a_peer_that_does_not_answer_costs_a_look_and_no_more(virtual, key):
    async def scenario(nodes):
        one, two = await swarm_of(nodes, key, 2)

        async def refuse(channel):
            raise PeerLost("not today")

        await two.replica._streams.serve(SHARES, refuse)
        await one.replica._equivocation._swap(two.id)
        assert not one.failures

    virtual(scenario)


# ---------------------------------------------------------------- what a reducer signs


class Node:
    peer_id = "Qme"

    def sign(self, said):
        return said.decode()

    def key_of(self, peer):
        assert peer == "Qme", "no record of the others is at hand"
        return "key of Qme"

    def has_signed(self, peer, said, key, signature):
        return key == f"key of {peer}" and signature == said.decode()


def test_what_a_reducer_gave_must_be_what_it_signed_by_the_key_that_it_brings():
    """Else a reducer whose record does not reach one member could give that one what it likes."""
    seals = ShareSeals("run", Node())
    signature, key = seals.sign("g", "a")
    assert seals.check("Qme", "g", "a", signature, key).key == key == "key of Qme"
    for group, digest, given in (("g", "b", signature), ("h", "a", signature), ("g", "a", "")):
        with pytest.raises(PeerLost, match="did not sign") as caught:
            seals.check("Qme", group, digest, given, key)
        assert caught.value.culprits == ("Qme",)
    for foreign in ("", "key of Qother"):
        with pytest.raises(PeerLost, match="did not sign"):
            seals.check("Qme", "g", "a", signature, foreign)


def test_another_square_or_other_inputs_are_another_share():
    (part,), zeros = Wire("fp16", 2).parts, torch.zeros(4, dtype=torch.uint8)
    digests = {Given([(part, zeros, square)]).digest(inputs) for square in (1.0, 2.0) for inputs in "ab"}
    assert len(digests) == 4


def test_proofs_of_a_replica_are_on_its_disk(virtual, key):
    async def scenario(nodes):
        one, two = await swarm_of(nodes, key, 2)
        signed = [two.node.sign(statement(one.run.digest, "g", digest)) for digest in "ab"]
        proof = Proof(accused=two.id, key=two.node.key_of(two.id), group="g", digests=("a", "b"), signatures=tuple(signed))
        assert one.replica.members.proofs.hear([proof, dataclasses.replace(proof, group="h")])
        assert Proofs(one.run, one.node.has_signed, path=one.folder / "state" / "proofs.json").all == (proof,)

    virtual(scenario)

def test_what_a_member_sent_must_be_what_it_signed_for_this_reducer_and_group():
    """Else it could sign something else later, and the reducer would seem to have lied."""
    seals = ShareSeals("run", Node())
    sent = seals.sign_input("g", "Qme", [bytes(32)])
    assert seals.check_input("g", sent) == sent and sent.peer == "Qme"
    elsewhere = seals.sign_input("g", "Qother", [bytes(32)])
    for group, wrong in (("h", sent), ("g", elsewhere), ("g", dataclasses.replace(sent, digest="0")), ("g", dataclasses.replace(sent, signature=""))):
        with pytest.raises(PeerLost, match="did not sign what it sent") as caught:
            seals.check_input(group, wrong)
        assert caught.value.culprits == ("Qme",)

