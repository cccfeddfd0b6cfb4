"""Spot checks: a reducer that gives all one wrong mean is proven to, by members that draw themselves. Honest ones never are."""

import contextlib
import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import peer.sync.engine.round.checks as checks_module
import peer.sync.engine.round.reduction as reduction_module
import peer.sync.engine.round.share_seals as share_seals_module
from peer.sync.engine.codec import PART_ELEMENTS
from peer.sync.engine.net.messages import Look, Looked, Sought, WrongMeans
from peer.sync.engine.net.streams import PeerLost, Refused
from peer.sync.engine.round.checks import CHECKERS, INPUTS, WRONG, SpotChecks, is_drawn
from peer.sync.engine.round.clipping import Clipping
from peer.sync.engine.round.share_seals import ShareSeals
from simulation.records import signed
from swarm.statements import lot_statement
from swarm.wrong_states import WrongState
from tests.peer.sync.swarm_tools import until
from tests.peer.sync.test_equivocation import banned, swarm_of
from tests.peer.sync.test_members import member

SECONDS = 200.0


class Turned(Clipping):
    """Makes a mean the opposite of what it should be."""

    def factors(self, members, norms):
        return [-factor for factor in super().factors(members, norms)]


def lie(liar):
    averager = liar.replica.rounds.averager
    averager._clipping = Turned(**vars(averager._clipping))


def checks(peer) -> SpotChecks:
    return peer.replica._checks


def lot_of(peer, state):
    return peer.node.lot(lot_statement(peer.run.digest, state))


def test_a_reducer_that_gives_all_one_wrong_mean_is_banned_by_all_within_twenty_rounds(virtual, key):
    async def scenario(nodes):
        liar, *honest = await swarm_of(nodes, key, 4)
        began = honest[0].head.header.round
        lie(liar)
        await until(lambda: all(banned(peer, liar) for peer in honest), SECONDS)
        assert honest[0].head.header.round - began <= 20
        assert not any(banned(peer, other) for peer in [*honest, liar] for other in honest)
        await until(lambda: liar.failures, SECONDS)
        assert "it signed a mean that is not that of what members sent it" in liar.failures[0].message
        (state,) = {shown for peer in honest for shown in peer.replica.accusations() if isinstance(shown, WrongState)}
        (proof,) = honest[0].replica.members.proofs.of_wrong_means
        assert state.round_by(proof, liar.run) and state.digest in {honest[0].head.digest, *honest[0].head.header.parents}
        newcomer = await member(nodes, key, liar.run, size=4 * PART_ELEMENTS)
        newcomer.replica.members.hear(liar.id, liar.replica.members.own)  # it is seen again, say
        await until(lambda: banned(newcomer, liar), SECONDS)
        at = max(peer.head.header.round for peer in honest)
        await until(lambda: min(peer.head.header.round for peer in honest) >= at + 3, SECONDS)
        assert not any(peer.failures for peer in honest)

    virtual(scenario)


def test_honest_members_look_at_each_other_and_accuse_nobody(virtual, key):
    async def scenario(nodes):
        trio = await swarm_of(nodes, key, 3)
        at = trio[0].head.header.round
        await until(lambda: min(peer.head.header.round for peer in trio) >= at + 10, SECONDS)
        looked = sum(checks(peer).looked for peer in trio)
        assert looked >= 10, "each of three draws itself in each round, and looks at two shares"
        assert not any(banned(peer, other) for peer in trio for other in trio)

    virtual(scenario)


def test_a_group_of_any_size_has_three_checkers_on_average():
    for peers in (4, 16, 100):
        drawn = [sum(is_drawn(signed(f"Qm{peer}", b"lot of round %d" % number), peers) for peer in range(peers)) for number in range(300)]
        assert CHECKERS - 0.5 < sum(drawn) / len(drawn) < CHECKERS + 0.5 and min(drawn) < CHECKERS < max(drawn)
    assert all(is_drawn(signed(f"Qm{peer}", b"lot"), 3) for peer in range(50))


def test_who_averaged_all_by_itself_asks_nobody_what_a_mean_was_made_of(virtual, key, monkeypatch):
    """It asked each member three times for an empty list."""

    async def scenario(nodes):
        one, _ = await swarm_of(nodes, key, 2)
        await until(lambda: checks(one)._kept, SECONDS)
        monkeypatch.setattr(checks_module, "is_drawn", lambda lot, peers: True)
        kept = checks(one)._kept[-1]
        sole = SimpleNamespace(mean=SimpleNamespace(shares={}, sent=kept.sent, encoded=None), group=kept.group, state=SimpleNamespace(digest=kept.state))
        before = len(checks(one)._kept), len(checks(one)._checks)
        checks(one).averaged(sole, None)
        assert (len(checks(one)._kept), len(checks(one)._checks)) == (before[0] + 1, before[1])

    virtual(scenario)


async def show(channel, look):
    await channel.send(look, seconds=60)
    said, _ = await channel.receive(Looked, seconds=60)
    return said


async def looked(asker, asked, look):
    with contextlib.closing(await asker.replica._streams.open(asked.id, INPUTS)) as channel:
        return await show(channel, look)


def test_a_member_shows_what_it_sent_to_who_was_drawn_and_to_nobody_else(virtual, key):
    async def scenario(nodes):
        one, two, three = await swarm_of(nodes, key, 3)
        for peer in (one, two, three):
            peer.rate = 0  # no other round
        await until(lambda: len({checks(peer)._kept[-1].state for peer in (one, two, three)}) == 1, SECONDS)
        kept = checks(one)._kept[-1]
        sought = Sought(reducer=three.id, position=0, number=1)
        look = Look(group=kept.group.id, lot=lot_of(two, kept.state), key=two.node.key_of(two.id), sought=(sought,))
        kept.asked.clear()
        said = await looked(two, one, look)
        assert len(said.slices) == 1
        refused = {
            "you were not drawn": {"lot": lot_of(three, kept.state)},
            "you were not drawn to": {"lot": two.node.sign(lot_statement(two.run.digest, kept.state))},
            "you were not drawn to check": {"lot": lot_of(two, "another state")},
            "you were not drawn to check this": {"key": three.node.key_of(three.id)},
            "not a round of ours": {"group": "g"},
            "no such part": {"sought": (dataclasses.replace(sought, position=99),)},
            "no such slice": {"sought": (dataclasses.replace(sought, number=10_000),)},
            "answered": {},
        }
        for why, wrong in refused.items():
            with pytest.raises(Refused, match=why):
                await looked(two, one, look.model_copy(update=wrong))
        kept.mine.add_(1)  # the trainer has frozen the next one there
        kept.asked.clear()
        with pytest.raises(Refused, match="its memory is in use again"):
            await looked(two, one, look)
        outsider = await member(nodes, key, one.run, size=3 * PART_ELEMENTS)
        with pytest.raises(Refused, match="not a round of ours"):
            await looked(outsider, one, look.model_copy(update={"lot": lot_of(outsider, kept.state), "key": outsider.node.key_of(outsider.id)}))

    virtual(scenario)


def test_a_checker_whose_own_contribution_is_gone_gives_no_verdict_and_lives_on(virtual, key):
    """Its trainer has frozen the next one in that memory."""

    async def scenario(nodes):
        trio = await swarm_of(nodes, key, 3)
        for peer in trio:
            averaged = checks(peer).averaged
            checks(peer).averaged = lambda done, mine, averaged=averaged: averaged(done, torch.zeros_like(mine))
        before, at = [checks(peer).looked for peer in trio], trio[0].head.header.round
        await until(lambda: min(peer.head.header.round for peer in trio) >= at + 5, SECONDS)
        assert not any(peer.failures for peer in trio)
        assert all(checks(peer).looked <= then + 2 for peer, then in zip(trio, before, strict=True)), "what was kept before"

    virtual(scenario)


@pytest.mark.parametrize("copied", [True, False])
def test_a_short_contribution_is_shown_also_when_its_trainer_has_frozen_the_next_one_at_once(virtual, key, monkeypatch, copied):
    """Seen in the simulator: of 47 checks in a swarm whose rounds follow at once none had all that it needs."""
    if not copied:
        monkeypatch.setattr(checks_module, "_COPIED_BYTES", 100)

    async def scenario(nodes):
        trio = await swarm_of(nodes, key, 3)

        def frozen_over(averaged, done, mine):
            memory = mine.clone()
            averaged(done, memory)
            memory.zero_()

        for peer in trio:
            checks(peer).averaged = partial(frozen_over, checks(peer).averaged)
        before, at = [checks(peer).looked for peer in trio], trio[0].head.header.round
        await until(lambda: min(peer.head.header.round for peer in trio) >= at + 5, SECONDS)
        more = [checks(peer).looked - then for peer, then in zip(trio, before, strict=True)]
        assert min(more) > 2 if copied else max(more) <= 2, more

    virtual(scenario)


def test_no_verdict_without_all_that_was_sent_and_no_peer_is_asked_for_ever(virtual, key):
    """A sender that shows nothing hides the liar, and is not taken for it."""

    async def scenario(nodes):
        liar, honest, silent = await swarm_of(nodes, key, 3)
        asked = []

        async def refuse(channel):
            asked.append(channel.peer)
            raise PeerLost("not today")

        async def look(check):
            pass

        checks(silent)._check = look  # it would have all that it needs
        await silent.replica._streams.serve(INPUTS, refuse)
        lie(liar)
        at = honest.head.header.round
        await until(lambda: honest.head.header.round >= at + 4 and asked.count(honest.id) > 3, SECONDS)
        assert not any(banned(peer, other) for peer in (liar, honest, silent) for other in (liar, honest, silent))

    virtual(scenario)


async def gives(liar, **changes):
    """With the last part of its mean, in place of what an honest reducer says there."""
    averager = liar.replica.rounds.averager

    class Changes(type(averager)):
        async def _serve(self, channel):
            honest = channel.send

            async def send(message, payload=b"", *, seconds):
                if getattr(message, "signature", ""):
                    message = message.model_copy(update={name: change(message) for name, change in changes.items()})
                await honest(message, payload, seconds=seconds)

            channel.send = send
            await super()._serve(channel)

    averager.__class__ = Changes
    await averager.start()


@pytest.mark.parametrize("made_of", [lambda said: (), lambda said: said.made_of[:1], lambda said: said.made_of[::-1]])
def test_a_reducer_that_does_not_show_what_its_mean_was_made_of_fails_the_round_and_is_named(virtual, key, made_of):
    """Its checkers had to ask it for that: whoever reduced, brought nothing and did not answer could lie for ever."""

    async def scenario(nodes):
        liar, *honest = await swarm_of(nodes, key, 3)
        at = honest[0].head.header.round
        await gives(liar, made_of=made_of)
        await until(lambda: all(peer.replica.rounds.company.offences(liar.id) for peer in honest), SECONDS)
        await until(lambda: min(peer.head.header.round for peer in honest) > at + 2, SECONDS)
        assert not any(banned(peer, other) for peer in honest for other in [liar, *honest])

    virtual(scenario)


def test_a_group_that_is_too_large_to_be_checked_shows_no_inputs(virtual, key, monkeypatch):
    monkeypatch.setattr(share_seals_module, "MOST_SENDERS", 2)
    monkeypatch.setattr(reduction_module, "MOST_SENDERS", 2)

    async def scenario(nodes):
        trio = await swarm_of(nodes, key, 3)
        at = trio[0].head.header.round
        await until(lambda: min(peer.head.header.round for peer in trio) >= at + 3, SECONDS)
        kept = checks(trio[0])._kept[-1]
        assert len(kept.group.members) == 3
        shares = trio[0].replica._equivocation._kept[-1].shares
        assert len(shares) == 2 and not any(sealed.made_of for sealed in shares.values())

    virtual(scenario)


def test_a_liar_that_is_a_member_and_shows_nothing_gets_no_verdict(virtual, key):
    """It hides what it brought itself. What ends it is the host (`trust`, docs/decisions/0019)."""

    async def scenario(nodes):
        liar, honest, _ = await swarm_of(nodes, key, 3)

        async def refuse(channel):
            raise PeerLost("not today")

        await liar.replica._streams.serve(INPUTS, refuse)
        lie(liar)
        at, before = honest.head.header.round, checks(honest).looked
        await until(lambda: honest.head.header.round >= at + 4, SECONDS)
        assert checks(honest).looked <= before + 2 and not banned(honest, liar), "what was under way"

    virtual(scenario)


def test_a_member_whose_input_is_not_signed_fails_the_round_and_is_named(virtual, key):
    async def scenario(nodes):
        one, two, lazy = await swarm_of(nodes, key, 3)
        seals = lazy.replica.rounds.averager._seals

        class Unsigned(ShareSeals):
            def sign_input(self, group, reducer, hashes):
                signed = super().sign_input(group, reducer, hashes)
                return signed if reducer == lazy.id else dataclasses.replace(signed, signature="")

        seals.__class__ = Unsigned
        await until(lambda: one.replica.rounds.company.offences(lazy.id) and two.replica.rounds.company.offences(lazy.id), SECONDS)
        at = one.head.header.round
        await until(lambda: one.head.header.round > at, SECONDS)

    virtual(scenario)


def test_a_false_proof_is_not_taken_and_one_that_is_known_is_not_told_again(virtual, key):
    async def scenario(nodes):
        liar, one, two = await swarm_of(nodes, key, 3)
        lie(liar)
        await until(lambda: banned(one, liar) and banned(two, liar), SECONDS)
        (proof,) = one.replica.members.proofs.of_wrong_means
        framed = dataclasses.replace(proof, accused=two.id)
        with contextlib.closing(await two.replica._streams.open(one.id, WRONG)) as channel:
            await channel.send(WrongMeans(known=(liar.id,), proof=framed), seconds=60)
            said, _ = await channel.receive(WrongMeans, seconds=60)
        assert said.known == (liar.id,) and said.proof is None and not banned(one, two)

    virtual(scenario)


def test_what_it_averages_is_not_changed_by_a_check(virtual, key):
    async def scenario(nodes):
        one, two = await swarm_of(nodes, key, 2)
        await until(lambda: checks(one).looked > 2 and one.head.digest == two.head.digest, SECONDS)
        assert torch.equal(one.head.buffer.bytes(), two.head.buffer.bytes())

    virtual(scenario)
