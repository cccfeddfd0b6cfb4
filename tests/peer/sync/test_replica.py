"""Whole peers but for the training process: what sync.md promises, and what lost rounds and forks do to it."""

import asyncio
import contextlib
import re
from types import SimpleNamespace

import pytest
import torch

from peer.contracts import Member
from peer.figures.metrics import NAMES
from peer.sync import diloco, gradients, parameters
from peer.sync.engine.cell import Phase
from peer.sync.engine.net.neighbours import PATIENT_ATTEMPTS
from peer.sync.engine.net.streams import Streams
from peer.sync.engine.round import arrivals
from peer.sync.engine.round.averaging import RoundFailed
from peer.sync.engine.round.calls import CALL
from peer.sync.engine.round.groups import NoGroup
from peer.sync.engine.state import Head, next_state
from peer.sync.engine.trainer.messages import Progress
from peer.sync.engine.trainer.trainer import Contribution
from swarm.records import RECORD_LIFE_SECONDS
from tests.peer.sync.replicas import SIZE, Liar, Peer, branch, check_invariants, final_samples, make_run, peers
from tests.peer.sync.swarm_tools import ANYTHING, state_of, until

STRATEGIES = {module.__name__.split(".")[-1]: module.strategy for module in (parameters, diloco, gradients)}


def test_three_peers_hold_one_state_after_every_round_and_report_every_sample(virtual):
    async def scenario(nodes):
        trio = await peers(nodes, 3, make_run(total_samples=200))
        await until(lambda: all(peer.finished for peer in trio))
        assert len({peer.head.digest for peer in trio}) == 1
        for peer in trio:
            assert final_samples(peer) == peer.head.header.samples >= 200
            record, together = peer.replica.record(), any(line["how"] == "averaged" for line in peer.rounds())
            assert (min(record.sent_bytes, record.received_bytes, record.transfer_seconds) > 0) == together
            seen = peer.replica.seen()
            assert set(seen) - {"phase", "note"} <= set(NAMES) and seen["live_peers"] == 1 + len(peer.replica.neighbours.others())
            assert (seen["round"], seen["committed"]) == (peer.head.header.round, peer.head.header.samples)
            assert (seen["sent_bytes"] >= seen["round_sent_bytes"] > 0) == together
        check_invariants(*trio)

    virtual(scenario)


def test_a_newcomer_catches_up_and_simultaneous_founders_end_in_one_run(virtual):
    async def scenario(nodes):
        run = make_run()
        pair = await peers(nodes, 2, run)  # both start from the same base, neither waits for the other
        await until(lambda: all(peer.head.header.round >= 2 for peer in pair))
        # A read of the records may come back empty: nobody starts again from the base where a later state is known to exist.
        (late,) = await peers(nodes, 1, run, last_known=Head.of(pair[0].head))
        await until(lambda: any(late.id in peer.head.header.included for peer in pair))
        assert late.lands[0].header.round >= 1
        check_invariants(*pair, late)

    virtual(scenario)


def test_the_record_of_a_new_state_says_how_fast_its_trainer_is_not_that_it_waited(virtual):
    """Seen: whoever read it took the peer for one that does nothing, and half of the swarm's speed was missing in what people see."""

    async def scenario(nodes):
        one = Peer(nodes, await nodes.node(), make_run())
        await one.replica.start()
        one.replica.phase.set(Phase.TRAIN)
        states = [one.base]
        for paused, told in ((False, 20.0), (True, 0.0)):
            one.replica.trainer.hear(Progress(20, 20.0, 0.05, stands_on=states[-1].digest))
            # Its contribution is being averaged.
            one.replica.trainer.hear(Progress(20, 20.0, 0.05, waits=True, paused=paused, stands_on=states[-1].digest))
            states.append(next_state(states[-1], [[torch.ones(SIZE)]], [Member(one.id, len(states), 20)]))
            one.replica._adopt(states[-1], "averaged")
            assert one.replica.record().samples_per_second == told

    virtual(scenario)


def test_two_that_each_believe_the_other_away_average_again(virtual):
    """Seen: p2pd of one died, both gave the other up, and each went on alone for as long as one looked."""

    async def scenario(nodes):
        one, two = await peers(nodes, 2, make_run())
        await until(lambda: min(one.head.header.round, two.head.header.round) >= 1)
        for peer, other in ((one, two), (two, one)):
            for _ in range(PATIENT_ATTEMPTS):
                peer.replica.neighbours.missed([other.id])
        at = max(one.head.header.round, two.head.header.round)
        await until(lambda: any(line["how"] == "averaged" and line["round"] > at + 1 for line in one.rounds()))
        check_invariants(one, two)

    virtual(scenario)


def test_who_has_moved_on_is_not_taken_for_absent(virtual):
    """Seen: a peer that came back called two that were a round ahead, took them for absent, and went on alone beside them."""

    async def scenario(nodes):
        behind = Peer(nodes, await nodes.node(), make_run())
        await behind.replica.start()  # it is there, and does nothing
        (ahead,) = await peers(nodes, 1, behind.run)
        replica, offer = behind.replica, Contribution(Member(behind.id, 1, 4), None, behind.base.digest)
        while not any(record.round for record in replica.neighbours.others()):
            await replica.neighbours.read()
        for _ in range(PATIENT_ATTEMPTS):
            await replica._look_and_back_off(offer, NoGroup("nobody came", {ahead.id}))
        assert [record.peer_id for record in replica.neighbours.counted_upon()] == [ahead.id]
        ahead.rate = 0
        await ahead.stop()
        replica.state.set(ahead.head)
        for _ in range(PATIENT_ATTEMPTS):
            await replica._look_and_back_off(offer, NoGroup("nobody came", {ahead.id}))
        assert not replica.neighbours.counted_upon()
        await replica._state_fetch.close()

    virtual(scenario)


def test_who_waits_for_a_group_takes_over_the_better_state_that_comes_meanwhile(virtual, monkeypatch, caplog):
    """It used to wait 10 s for those who had promised to come, and were at that state already."""
    monkeypatch.setattr(arrivals, "UNKNOWN_SECONDS", 1000.0)
    caplog.set_level("INFO")

    async def scenario(nodes):
        run = make_run()
        (waiter,) = await peers(nodes, 1, run, rate=40)
        promiser = Liar(await nodes.node(), run)

        async def promise(channel):
            await channel.receive(ANYTHING, seconds=60)
            words = {"coming": True, "reason": "", "ready_seconds": 0.0, "busy": False, "behind": False}
            await channel.send({**words, "head": vars(Head.of(waiter.base))}, seconds=60)

        await Streams(promiser.node).serve(CALL, promise)
        await promiser.keep_saying(nodes, lambda: {"digest": waiter.base.digest, "waiting_samples": 8, "round": 0, "client_mode": True})
        await until(lambda: waiter.replica.phase.value is Phase.GROUP and waiter.replica.rounds.matchmaker._leading._gathering)
        await Peer(nodes, await nodes.node(), run, state=(later := branch(run, 51, 2.0)), rate=0).start(nodes)
        await until(lambda: waiter.at == later.digest)
        assert waiter.rounds()[0]["how"] == "fetched" and "round=1 not averaged: a better state has arrived" in caplog.text
        await until(lambda: waiter.replica.phase.value in (Phase.TRAIN, Phase.GROUP))  # it may wait for the promiser once more before we look

    virtual(scenario)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_round_that_one_member_committed_and_the_other_lost_is_repeated_there(virtual, kind, caplog):
    caplog.set_level("INFO")

    async def scenario(nodes):
        run, strategy = make_run(sync=kind), STRATEGIES[kind]
        base = state_of(torch.zeros(SIZE), run=run.digest, slots=strategy(run).slots)
        one, two = [await Peer(nodes, await nodes.node(), run, state=base, strategy=strategy(run)).start(nodes) for _ in range(2)]
        average, lost = two.replica.rounds.averager.average, []

        async def lose(group, mine, strangers):
            await average(group, mine, strangers)
            lost.append(group)
            raise RoundFailed("as if the last part had not come")

        two.replica.rounds.averager.average = lose
        await until(lambda: lost)
        two.replica.rounds.averager.average = average
        await until(lambda: two.head.header.round >= 3 and one.head.header.round >= 3)
        how = [line["how"] for line in two.rounds()]
        assert how[0] == "fetched" and two.rounds()[0]["digest"] == one.rounds()[0]["digest"]
        (told,) = [record.getMessage() for record in caplog.records if "fetched round=1 " in record.getMessage()]
        assert told.endswith("holders=1 replayed=1")
        check_invariants(one, two)

    virtual(scenario)


def test_two_branches_become_one_by_the_rule(virtual):
    async def scenario(nodes):
        run = make_run()
        lesser = await Peer(nodes, await nodes.node(), run, state=branch(run, 50, 1.0), rate=0).start(nodes)
        better = await Peer(nodes, await nodes.node(), run, state=branch(run, 51, 2.0), rate=0).start(nodes)
        await until(lambda: lesser.head.digest == better.base.digest)
        assert better.head.digest == better.base.digest
        check_invariants(lesser, better)

    virtual(scenario)


def test_alone_is_a_peer_only_after_a_whole_record_life(virtual):
    async def scenario(nodes):
        began = nodes.clock()
        (one,) = await peers(nodes, 1, make_run(), rate=40)
        await until(lambda: one.head.header.round)
        assert nodes.clock() - began >= RECORD_LIFE_SECONDS and one.rounds()[0]["how"] == "solo"
        check_invariants(one)

    virtual(scenario)


def test_an_empty_answer_of_the_dht_makes_nobody_alone(virtual):
    async def scenario(nodes):
        one, two = await peers(nodes, 2, make_run())
        await until(lambda: one.replica.neighbours.others())
        records = one.node.records

        async def only_ours(run_id):
            return {peer: record for peer, record in (await records(run_id)).items() if peer == one.id}

        one.node.records = only_ours
        for _ in range(5):
            await one.replica.neighbours.read()
        assert one.replica.neighbours.others() and not one.replica.neighbours.alone()
        check_invariants(one, two)

    virtual(scenario)


def test_a_peer_that_knows_of_a_later_state_waits_for_its_holder_and_says_who(virtual):
    async def scenario(nodes):
        run = make_run()
        later = branch(run, 51, 2.0)
        known = {"last_known": Head(later.digest, 51), "last_holders": ("QmHolder123",)}
        waiter = await Peer(nodes, await nodes.node(), run, **known).start(nodes)
        await until(lambda: waiter.texts)
        assert "51 samples" in waiter.texts[0] and "der123" in waiter.texts[0] and not waiter.at
        await Peer(nodes, await nodes.node(), run, state=later, rate=0).start(nodes)
        await until(lambda: waiter.at == later.digest)

    virtual(scenario)


def test_others_read_who_a_peer_is_and_why_its_round_failed(virtual):
    async def scenario(nodes):
        one, two = await peers(nodes, 2, make_run(), rate=40)
        two.replica.status._name, two.replica.status._hardware = "Ada's cellar", "2 x NVIDIA A40"

        async def lose(group, mine, strangers):
            raise RoundFailed("as if the last part had not come")

        one.replica.rounds.averager.average = two.replica.rounds.averager.average = lose
        await until(lambda: any("as if" in record.note for record in one.replica.neighbours.others()))
        (seen,) = one.replica.neighbours.others()
        assert (seen.name, seen.hardware) == ("Ada's cellar", "2 x NVIDIA A40")
        assert re.fullmatch(r"round \d+ not averaged: as if the last part had not come", seen.note)  # one may have made rounds alone

    virtual(scenario)


def test_who_calls_onto_the_state_before_ours_makes_nobody_offer_what_it_has_just_begun(virtual):
    async def scenario(nodes):
        run = make_run()
        peer = Peer(nodes, await nodes.node(), run, state=branch(run, 50, 1.0), rate=0)
        replica, peer.open = peer.replica, 4
        replica.trainer.progress = Progress(4, stands_on=peer.head.digest)
        for onto, frozen in ((peer.head.header.parents[0], False), (peer.head.digest, True)):
            replica.next_round.call("QmCaller", onto)
            replica._contribution()
            assert bool(peer.offers) is frozen

    virtual(scenario)


def test_a_peer_that_waits_for_a_better_state_or_leaves_says_that_it_does_not_come(virtual):
    async def scenario(nodes):
        peer = Peer(nodes, await nodes.node(), make_run(), rate=0)
        replica = peer.replica
        replica.trainer.offered(Contribution(Member(peer.id, 1, 4), None, peer.base.digest))
        replica.phase.set(Phase.TRAIN)
        standing = replica.reception.standing
        assert standing(peer.id).has_samples and not standing("QmNobodyKnows").has_samples
        replica._state_fetch._fetch = SimpleNamespace(holders={"QmAhead"})
        assert replica._contribution() is False
        assert not standing(peer.id).has_samples
        replica._state_fetch._fetch, asked = None, []
        assert replica._contribution() is False and standing(peer.id).has_samples
        replica._saver.save = lambda state: asked.append(standing(peer.id).has_samples) or asyncio.sleep(0)
        await replica.leave()
        assert asked == [False]

    virtual(scenario)


def test_a_stopped_trainer_is_told_of_the_last_state_only(virtual):
    async def scenario(nodes):
        one, two = await peers(nodes, 2, make_run())
        await until(lambda: one.at and two.at)
        one.tasks[1].cancel()  # its training process stands still
        told = len(one.lands)
        with contextlib.suppress(asyncio.CancelledError):
            await one.tasks[1]
        start = two.head.header.round
        await until(lambda: two.head.header.round >= start + 3)
        two.rate = 0
        await until(lambda: one.head.digest == two.head.digest)
        assert len(one.lands) <= told + 2
        check_invariants(one, two)

    virtual(scenario)
