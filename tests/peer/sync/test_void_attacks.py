"""Members that void group after group, and a reducer that lies about it: what they cost is bounded, and no sample is counted twice or lost."""

import asyncio
import logging
from dataclasses import replace

import pytest

from peer.contracts import Member
from peer.sync.engine.net.messages import Share
from peer.sync.engine.net.streams import PeerLost
from peer.sync.engine.round.averaging import Averager
from peer.sync.engine.round.groups import Group
from peer.sync.engine.round.leading import Leading
from tests.peer.sync.replicas import make_run, peers
from tests.peer.sync.swarm_tools import PART, until
from tests.peer.sync.test_closing_again import assert_no_sample_is_lost

pytestmark = pytest.mark.usefixtures("small_parts")
SECONDS = 600.0


async def met(nodes, count):
    found = await peers(nodes, count, make_run(target_batch_size=80 * count), size=count * PART)
    await until(lambda: all(len(peer.replica.met) == count - 1 for peer in found), SECONDS)
    return found


class MuteAt(Averager):
    """Comes to no reducer in one of a round's closings: in the first, or in the one after it."""

    turn, parent, closing = 0, "", -1

    async def average(self, group, mine, strangers=None):
        self.closing, self.parent = (self.closing + 1 if group.parent == self.parent else 0), group.parent
        return await super().average(group, mine, strangers)

    async def _exchange(self, reducer, share, run):
        await (asyncio.Event().wait() if self.closing == self.turn else super()._exchange(reducer, share, run))


def test_two_of_five_that_fail_one_after_the_other_void_a_few_groups_and_no_more(virtual, caplog):
    """Whoever failed is left out of 1, 4, 16, 64 rounds; so in 20 rounds each voids three groups or four, and each round is made."""

    async def scenario(nodes):
        *bad, one, two, three = await met(nodes, 5)
        for turn, peer in enumerate(bad):
            peer.replica.rounds.averager.__class__ = type("Mute", (MuteAt,), {"turn": turn})
        honest, at = [one, two, three], max(peer.head.header.round for peer in (one, two, three))
        await until(lambda: min(peer.head.header.round for peer in honest) >= at + 20, SECONDS)
        void = {record.void for record in caplog.records if hasattr(record, "void")}
        assert 2 <= len(void) <= 8
        assert all(any(peer.replica.rounds.company.offences(other.id) for peer in honest) for other in bad)
        assert_no_sample_is_lost(honest)

    with caplog.at_level(logging.INFO, "peer.sync"):
        virtual(scenario)


class Hearsay(Averager):
    """Answers each that comes to it as reducer that it only heard of a fault: of others' or of nobody's."""

    others = 0

    async def _serve(self, channel):
        share, _ = await channel.receive(Share, seconds=60.0)
        group = next(run.group for run in (one.run for one in self._reductions.values()) if run.group.id == share.group)
        lost = PeerLost("gave up", sorted(group.peers - {self._peer_id, channel.peer})[: self.others], hearsay=True)
        lost.void = True
        raise lost


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_reducer_that_only_heard_of_faults_fails_a_few_rounds_and_no_more(virtual, others):
    async def scenario(nodes):
        *honest, liar = await met(nodes, 4)
        averager = liar.replica.rounds.averager
        averager.__class__ = type("Liar", (Hearsay,), {"others": others})
        await averager.start()
        at, began = max(peer.head.header.round for peer in honest), nodes.clock()
        await until(lambda: min(peer.head.header.round for peer in honest) >= at + 20, SECONDS)
        assert any(peer.replica.rounds.company.offences(liar.id) for peer in honest) and nodes.clock() - began < 400
        assert_no_sample_is_lost([*honest, liar])  # whom nobody lets in goes on alone, and the others take that over

    virtual(scenario)


class FalseVoid(Averager):
    """Once, has all parts of its share, gives some their mean, and tells the others that nobody will ever have it."""

    told, lied = frozenset(), False

    async def _serve(self, channel):
        send, reductions = channel.send, self._reductions

        async def lie(message, payload=b"", *, seconds):
            if channel.peer not in self.told or not payload:
                return await send(message, payload, seconds=seconds)
            await next(one for one in reductions.values() if channel.peer in one.senders).whole()
            type(self).lied = True
            lost = PeerLost("a part is given up")
            lost.void = True
            raise lost

        channel.send = lie
        await super()._serve(channel)


@pytest.mark.parametrize("others", [0, 1])
def test_a_reducer_that_lies_about_a_void_group_makes_two_branches_at_most_and_one_is_left(virtual, others):
    """The leader believes it, and another member, or none. The rest commit the first closing."""

    async def scenario(nodes):
        found = await met(nodes, 4)
        state = found[0].head
        await until(lambda: all(peer.head.header.round > state.header.round for peer in found), SECONDS)
        liar = found[0]
        kind = type("Liar", (FalseVoid,), {})
        liar.replica.rounds.averager.__class__ = kind
        average = liar.replica.rounds.averager.average

        async def choose(group, mine, strangers=None):
            honest = sorted(group.peers - {liar.id, group.leader})
            ours = group.leader != liar.id and not kind.lied and len(group.peers) == 4
            kind.told = frozenset([group.leader, *honest[:others]]) if ours else frozenset()
            return await average(group, mine, strangers)

        liar.replica.rounds.averager.average = choose
        await liar.replica.rounds.averager.start()
        await until(lambda: kind.lied, SECONDS)
        honest = found[1:]
        at = max(peer.head.header.round for peer in honest)
        await until(lambda: min(peer.head.header.round for peer in honest) >= at + 5, SECONDS)
        await until(lambda: len({peer.head.digest for peer in honest}) == 1, SECONDS)
        assert_no_sample_is_lost(honest)

    virtual(scenario)


class Inventive(Leading):
    """Announces a member more, which nobody has ever seen, in each group that it leads."""

    count = 0

    async def _gather(self, *asked):
        group, answers = await super()._gather(*asked)
        type(self).count += 1
        return self.worse(group), answers

    def worse(self, group):
        invented = Member(f"zzInvented{self.count}", 1, 1)
        return replace(group, members=(*group.members, invented), norms=(*group.norms, 1.0))


class InventsReducers(Inventive):
    """Likewise a reducer."""

    def worse(self, group):
        draws = (*group.draws, "") if group.draws else ()
        return replace(group, reducers=(*group.reducers, f"zzInvented{self.count}"), draws=draws)


class Splits(Inventive):
    """Tells each of another group of the same peers."""

    def worse(self, group):
        object.__setattr__(group, "__class__", type("Split", (Group,), {"announcement": lambda group: Many(Group.announcement(group))}))
        return group


class Many:
    """An announcement that is another one each time that it is sent."""

    def __init__(self, said):
        self._said, self._count = said, 0

    def wire(self):
        self._count += 1
        return {**self._said.wire(), "attempt": f"{self._count:016x}"}


@pytest.mark.parametrize("kind", [Inventive, InventsReducers, Splits])
def test_a_leader_that_announces_what_is_not_there_is_left_out_and_the_rounds_go_on(virtual, kind):
    """It ranked first until a round was made, and none was."""

    async def scenario(nodes):
        *honest, liar = await met(nodes, 4)
        at = max(peer.head.header.round for peer in honest)
        lying = type("Liar", (kind,), {})
        leading = liar.replica.rounds.matchmaker._leading
        leading.__class__ = lying
        began = nodes.clock()
        await until(lambda: min(peer.head.header.round for peer in honest) >= at + 20, SECONDS)
        assert lying.count and any(peer.replica.rounds.company.offences(liar.id) for peer in honest)
        assert nodes.clock() - began < 300
        assert_no_sample_is_lost([*honest, liar])

    virtual(scenario)
