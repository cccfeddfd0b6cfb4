"""Whole peers but for the training process: what sync.md promises, and what forged records, lost rounds and forks do to it.

Each replica has a real node; its trainer is a recorder that freezes what it is told to, with vectors drawn from the test's seed.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import re
import signal
import time

import pytest
import torch

from peer.contracts import Member
from peer.metrics import NAMES
from peer.sync import diloco, gradients, parameters
from peer.sync.engine import arrivals, presence
from peer.sync.engine.averaging import RoundFailed
from peer.sync.engine.codec import Wire
from peer.sync.engine.disk import StateStore
from peer.sync.engine.local_work import REBASED_ANCESTORS
from peer.sync.engine.matchmaking import CALL, NoGroup
from peer.sync.engine.neighbours import PATIENT_ATTEMPTS
from peer.sync.engine.replica import Replica
from peer.sync.engine.state import Head, State, next_state
from peer.sync.engine.streams import Streams
from peer.sync.engine.trainer import Offer, Progress
from peer.sync.parameters import Parameters
from swarm import dht
from swarm.end import End, sign_extension
from swarm.errors import ExitCode, UserError
from swarm.records import LEAVING, PeerRecord
from swarm.run_config import RunConfig
from swarm.signing import HostKey
from swarm.tasks import end_tasks
from tests.peer.sync.swarm_tools import named, state_of, until

log = logging.getLogger(__name__)
SIZE = 1000
STRATEGIES = {module.__name__.split(".")[-1]: module.strategy for module in (parameters, diloco, gradients)}


class Peer:
    """A replica and its recorded trainer, which has `rate` samples more at every look while it trains."""

    def __init__(
        self,
        nodes,
        node,
        run: RunConfig,
        *,
        state: State | None = None,
        rate: int = 4,
        strategy=None,
        size: int = SIZE,
        number: int = 0,
        **options,
    ):
        self.folder = nodes.folder / node.peer_id
        self.node, self.run, self.rate = node, run, rate
        self.id = node.peer_id
        self.size = size
        self.base = state or state_of(torch.zeros(size), run=run.digest)
        self.at, self.open, self.frozen, self.number = "", 0, None, number
        self.began_with, self.trained, self.dropped, self.counted = number, 0, 0, {}
        self.may_train, self.offers, self.failures = True, [], []
        self.settlements, self.lands, self.texts, self.finished = [], [], [], False
        self.extensions = []
        self.store = StateStore(self.folder / "state")
        self.replica = Replica(
            run=run,
            state=self.base,
            wire=Wire(run.wire, size),
            strategy=strategy or Parameters(),
            node=node,
            store=self.store,
            rounds_path=self.folder / "rounds.jsonl",
            trainer=self,
            **options,
        )
        self.generator = torch.Generator().manual_seed(int(digest_seed(node.peer_id)))
        self.tasks: list[asyncio.Task] = []

    # what the replica says
    def freeze(self):
        if self.frozen is None and self.open:
            self.number += 1
            encoded = Wire(self.run.wire, self.size).encode(torch.randn(self.size, generator=self.generator))
            self.frozen = (self.number, self.open, encoded)
            self.offers.append((self.number, bytes(encoded.numpy())))
            self.open, self.may_train = 0, False
            self.offer()
        elif self.frozen is None:
            self.replica.nothing_to_freeze()
        else:  # it does not know: tell it once more, as the product does
            self.offer()

    def offer(self):
        number, samples, encoded = self.frozen
        self.replica.offered(Offer(Member(self.id, number, samples), encoded, self.at))

    def train(self):
        self.may_train = True

    def landed(self, state):
        """What LocalWork.land does, as far as the books go."""
        self.lands.append(state)
        own = state.header.included.get(self.id, 0)
        for number in [number for number in self.counted if number > own]:  # in a state that lost
            self.dropped += self.counted.pop(number)
        if self.frozen is not None:
            number, samples, _ = self.frozen
            if own >= number:
                self.counted[number], self.frozen = samples, None
            elif not (self.at == state.digest or self.at in state.header.parents[:REBASED_ANCESTORS]):
                self.dropped, self.frozen = self.dropped + samples, None
        self.at, self.may_train = state.digest, False
        if self.frozen is not None:
            self.offer()

    def settled(self, settlements):
        self.settlements += settlements

    def news(self, text):
        self.texts.append(text)

    def extended(self, extension):
        self.extensions.append(extension)

    def done(self):
        self.finished, self.rate = True, 0

    def failed(self, error):
        self.failures.append(error)

    # what a trainer does
    async def work(self):
        while True:
            if self.at and (self.frozen is None or self.may_train) and self.waiting < 2 * self.run.target_batch_size:
                self.open += self.rate
                self.trained += self.rate
            self.replica.progressed(Progress(self.waiting, 10.0 * self.rate, 0.1), self.at)
            await asyncio.sleep(0.1)

    @property
    def waiting(self):
        return self.open + (self.frozen[1] if self.frozen else 0)

    @property
    def head(self) -> State:
        return self.replica.state

    async def start(self, nodes):
        await self.replica.start()
        self.tasks = [asyncio.create_task(self.replica.live()), asyncio.create_task(self.work())]
        self.tasks[0].add_done_callback(self._ended)
        nodes.ends_with_the_test(*self.tasks)
        return self

    def _ended(self, living: asyncio.Task) -> None:
        if not living.cancelled() and living.exception() is not None:
            self.failures.append(living.exception())
            log.error("%s lives no more: %r", self.id[-6:], living.exception(), exc_info=living.exception())

    async def stop(self):
        self.replica.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.node.close()

    def rounds(self) -> list[dict]:
        path = self.folder / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def digest_seed(text: str) -> int:
    return sum(text.encode())


def make_run(**options) -> RunConfig:
    return RunConfig(**{"model": "x", "target_batch_size": 40, "total_samples": 0, "wire": "fp16", **options})


async def peers(nodes, count, run, **options) -> list[Peer]:
    return [await Peer(nodes, await nodes.node(), run, **options).start(nodes) for _ in range(count)]


def check_invariants(*members: Peer) -> None:
    """Whatever happened: the promises of sync.md."""
    by_group, per_state = {}, {}
    for peer in members:
        assert not peer.failures
        assert bool(torch.isfinite(peer.head.buffer.floats()).all())
        for number in {number for number, _ in peer.offers}:
            assert len({data for n, data in peer.offers if n == number}) == 1, "the bytes of a contribution changed"
        for line in peer.rounds():
            group = (line["parent"], json.dumps(line["members"]))
            assert by_group.setdefault(group, line["digest"]) == line["digest"], "two states for one parent and group"
            assert len({peer_id for peer_id, _, _ in line["members"]}) == len(line["members"])
            per_state[line["digest"]] = line
    for peer in members:
        counted, digest = set(), peer.head.digest
        while digest in per_state and per_state[digest]["round"]:
            for member in per_state[digest]["members"]:
                assert (member[0], member[1]) not in counted, "a contribution is in a state twice"
                counted.add((member[0], member[1]))
            digest = per_state[digest]["parent"]
        reported = {s.digest: s for s in peer.settlements}
        assert len(reported) == len(peer.settlements), "a state was reported twice"


def settled_samples(peer: Peer) -> int:
    return sum(member.samples for s in peer.settlements for member in s.members)


def test_three_peers_hold_one_state_after_every_round_and_report_every_sample(swarm):
    async def scenario(nodes):
        trio = await peers(nodes, 3, make_run(total_samples=200))
        await until(lambda: all(peer.finished for peer in trio))
        assert len({peer.head.digest for peer in trio}) == 1
        for peer in trio:
            assert settled_samples(peer) == peer.head.header.samples >= 200
            record, together = peer.replica.record(), any(line["how"] == "averaged" for line in peer.rounds())
            assert (min(record.sent_bytes, record.received_bytes, record.transfer_seconds) > 0) == together
            seen = peer.replica.seen()
            assert set(seen) - {"phase", "note"} <= set(NAMES) and seen["live_peers"] == 1 + len(peer.replica.neighbours.others())
            assert (seen["round"], seen["committed"]) == (peer.head.header.round, peer.head.header.samples)
            assert (seen["sent_bytes"] >= seen["round_sent_bytes"] > 0) == together
        check_invariants(*trio)

    swarm(scenario)


def test_a_newcomer_catches_up_and_simultaneous_founders_end_in_one_run(swarm):
    async def scenario(nodes):
        run = make_run()
        pair = await peers(nodes, 2, run)  # both start from the same base, neither waits for the other
        await until(lambda: all(peer.head.header.round >= 2 for peer in pair))
        # A read of the records may come back empty: nobody starts again from the base where a later state is known to exist.
        (late,) = await peers(nodes, 1, run, last_known=Head.of(pair[0].head))
        await until(lambda: any(late.id in peer.head.header.included for peer in pair))
        assert late.lands[0].header.round >= 1
        check_invariants(*pair, late)

    swarm(scenario)


def test_two_that_each_believe_the_other_away_average_again(swarm):
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

    swarm(scenario)


def test_who_has_moved_on_is_not_taken_for_absent(swarm):
    """Seen: a peer that came back called two that were a round ahead, took them for absent, and went on alone beside them."""

    async def scenario(nodes):
        behind = Peer(nodes, await nodes.node(), make_run())
        await behind.replica.start()  # it is there, and does nothing
        (ahead,) = await peers(nodes, 1, behind.run)
        replica, offer = behind.replica, Offer(Member(behind.id, 1, 4), None, behind.base.digest)
        while not any(record.round for record in replica.neighbours.others()):
            await replica.neighbours.read()
        for _ in range(PATIENT_ATTEMPTS):
            await replica._after_failure(offer, NoGroup("nobody came", {ahead.id}))
        assert [record.peer_id for record in replica.neighbours.counted_upon()] == [ahead.id]
        ahead.rate = 0
        await ahead.stop()
        replica.state = ahead.head
        for _ in range(PATIENT_ATTEMPTS):
            await replica._after_failure(offer, NoGroup("nobody came", {ahead.id}))
        assert not replica.neighbours.counted_upon()
        await replica._takeover.close()

    swarm(scenario)


def test_who_waits_for_a_group_takes_over_the_better_state_that_comes_meanwhile(swarm, monkeypatch, caplog):
    """It used to wait 10 s for those who had promised to come, and were at that state already."""
    monkeypatch.setattr(arrivals, "UNKNOWN_SECONDS", 1000.0)
    caplog.set_level("INFO")

    async def scenario(nodes):
        run = make_run()
        (waiter,) = await peers(nodes, 1, run, rate=40)
        promiser = Liar(await nodes.node(), run)

        async def promise(channel):
            await channel.receive(seconds=60)
            words = {"coming": True, "reason": "", "ready_seconds": 0.0, "busy": False, "behind": False}
            await channel.send({**words, "digest": waiter.base.digest, "samples": 0}, seconds=60)

        await Streams(promiser.node).serve(CALL, promise)
        await promiser.keep_saying(nodes, lambda: {"digest": waiter.base.digest, "waiting_samples": 8, "round": 0, "client_mode": True})
        await until(lambda: waiter.replica._phase == "group" and waiter.replica.rounds.matchmaker._open)
        await Peer(nodes, await nodes.node(), run, state=(later := branch(run, 51, 2.0)), rate=0).start(nodes)
        await until(lambda: waiter.at == later.digest)
        assert waiter.rounds()[0]["how"] == "fetched" and "round=1 not averaged: a better state has come" in caplog.text
        await until(lambda: waiter.replica._phase in ("train", "group"))  # it may wait for the promiser once more before we look

    swarm(scenario)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_round_that_one_member_committed_and_the_other_lost_is_repeated_there(swarm, kind, caplog):
    caplog.set_level("INFO")

    async def scenario(nodes):
        run, strategy = make_run(sync=kind), STRATEGIES[kind]
        base = state_of(torch.zeros(SIZE), run=run.digest, slots=strategy(run).slots)
        one, two = [await Peer(nodes, await nodes.node(), run, state=base, strategy=strategy(run)).start(nodes) for _ in range(2)]
        average, lost = two.replica.rounds.averager.average, []

        async def lose(group, mine):
            await average(group, mine)
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

    swarm(scenario)


def branch(run: RunConfig, samples: int, change: float) -> State:
    base = state_of(torch.zeros(SIZE), run=run.digest)
    return next_state(base, [[torch.full((SIZE,), change)]], [Member("gone", 1, samples)])


def test_two_branches_become_one_by_the_rule(swarm):
    async def scenario(nodes):
        run = make_run()
        lesser = await Peer(nodes, await nodes.node(), run, state=branch(run, 50, 1.0), rate=0).start(nodes)
        better = await Peer(nodes, await nodes.node(), run, state=branch(run, 51, 2.0), rate=0).start(nodes)
        await until(lambda: lesser.head.digest == better.base.digest)
        assert better.head.digest == better.base.digest
        check_invariants(lesser, better)

    swarm(scenario)


def test_alone_is_a_peer_only_after_a_whole_record_life(swarm, monkeypatch):
    from peer.sync.engine import neighbours

    monkeypatch.setattr(neighbours, "RECORD_LIFE_SECONDS", 4.0)

    async def scenario(nodes):
        began = time.monotonic()
        (one,) = await peers(nodes, 1, make_run(), rate=40)
        await until(lambda: one.head.header.round)
        assert time.monotonic() - began >= 4.0 and one.rounds()[0]["how"] == "solo"
        check_invariants(one)

    swarm(scenario)


def test_an_empty_answer_of_the_dht_makes_nobody_alone(swarm):
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

    swarm(scenario)


def test_a_peer_that_knows_of_a_later_state_waits_for_its_holder_and_says_who(swarm):
    async def scenario(nodes):
        run = make_run()
        later = branch(run, 51, 2.0)
        known = {"last_known": Head(later.digest, 51), "last_holders": ("QmHolder123",)}
        waiter = await Peer(nodes, await nodes.node(), run, **known).start(nodes)
        await until(lambda: waiter.texts)
        assert "51 samples" in waiter.texts[0] and "der123" in waiter.texts[0] and not waiter.at
        await Peer(nodes, await nodes.node(), run, state=later, rate=0).start(nodes)
        await until(lambda: waiter.at == later.digest)

    swarm(scenario)


class Liar:
    """A live peer with a valid signature, whose records say what the test wants."""

    def __init__(self, node, run):
        self.node, self.run = node, run

    async def say(self, **claims):
        record = PeerRecord(
            peer_id=self.node.peer_id, config=self.run.digest, schema="schema", round=1, samples=0, digest="0" * 64, time=time.time()
        )
        await self.node.publish(self.run.run_id, dataclasses.replace(record, **claims))

    async def keep_saying(self, nodes, claims):
        async def forever():
            while True:
                await self.say(**claims())
                await asyncio.sleep(0.5)

        task = asyncio.create_task(forever())
        nodes.ends_with_the_test(task)
        return task


LIES = {
    "more samples than there can be, in a state that nobody gives": lambda peer: {"samples": 10**15, "digest": "f" * 64, "round": 10**6},
    "samples waiting on our state that never come": lambda peer: {
        "samples": peer.head.header.samples, "digest": peer.head.digest, "waiting_samples": 80, "samples_per_second": 1e6,
    },
    "our digest with another count, and itself for a parent": lambda peer: {
        "samples": 10**15, "digest": peer.head.digest, "parents": (peer.head.digest,),
    },
    "another run's configuration": lambda peer: {"config": "x", "samples": 10**15},
    "waiting samples out of bounds": lambda peer: {"digest": peer.head.digest, "waiting_samples": 10**12},
}  # fmt: skip


def test_what_a_liar_claims_stops_nobody(swarm):
    """One liar after the other; what the one before claimed counts for another 20 s."""

    async def scenario(nodes):
        run = make_run()
        pair = await peers(nodes, 2, run)
        for what, claims in LIES.items():
            with named(what):
                liar = Liar(await nodes.node(), run)
                lying = await liar.keep_saying(nodes, lambda claims=claims: claims(pair[0]))
                await until(lambda liar=liar: all(liar.node.peer_id in peer.replica.neighbours._seen for peer in pair))
                started = max(peer.head.header.round for peer in pair)
                await until(lambda started=started: all(peer.head.header.round >= started + 2 for peer in pair))
                assert all(peer.head.header.samples < 10**6 for peer in pair)
                await end_tasks(lying)
        check_invariants(*pair)

    swarm(scenario)


def test_a_record_signed_by_another_or_by_nobody_is_not_seen(swarm):
    async def scenario(nodes):
        run = make_run()
        (peer,) = await peers(nodes, 1, run, rate=0)
        liar = Liar(await nodes.node(), run)
        await liar.say(peer_id="QmSomebodyElse")
        await liar.node._dht.store(f"{run.run_id}.peers", b"x", expiration_time=time.time() + 20, subkey=b"plain")
        await peer.replica.neighbours.read()
        assert set(peer.replica.neighbours._seen) <= {peer.id}

    swarm(scenario)


def test_a_stranger_without_a_record_makes_nobody_average(swarm):
    async def scenario(nodes):
        (peer,) = await peers(nodes, 1, make_run(target_batch_size=10_000))
        await until(lambda: peer.waiting)
        ((_, streams),) = await nodes.streams(1)
        channel = await streams.open(peer.id, CALL)
        await channel.send({"parent": peer.head.digest}, seconds=60)
        answer, _ = await channel.receive(seconds=60)
        channel.close()
        assert answer["coming"] is False and not peer.offers

    swarm(scenario)


def test_the_death_of_p2pd_ends_the_replica(swarm):
    async def scenario(nodes):
        (peer,) = await peers(nodes, 1, make_run())
        peer.node.p2p._child.kill()
        await until(lambda: peer.tasks[0].done())
        assert "p2pd has ended" in str(peer.tasks[0].exception())

    swarm(scenario)


def test_a_p2pd_that_hangs_ends_the_replica(swarm, monkeypatch):
    monkeypatch.setattr(presence, "RENEW_SECONDS", 0.5)
    monkeypatch.setattr(dht, "ANSWER_SECONDS", 0.5)

    async def scenario(nodes):
        (peer,) = await peers(nodes, 1, make_run())
        peer.node.p2p._child.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: peer.tasks[0].done())
        finally:
            peer.node.p2p._child.send_signal(signal.SIGCONT)
        assert "p2pd does not answer" in str(peer.tasks[0].exception())

    swarm(scenario)


async def one_and_one_that_stopped(nodes) -> list[Peer]:
    one, two = await peers(nodes, 2, make_run(), rate=0)
    await until(lambda: one.replica.neighbours.others())
    two.replica.close()
    await two.tasks[0]
    return [one, two]


def test_a_peer_that_leaves_in_order_is_not_waited_for(swarm):
    async def scenario(nodes):
        one, two = await one_and_one_that_stopped(nodes)
        two.replica.failed("CUDA is out of\nmemory")
        await two.replica.leave()
        await until(lambda: one.replica.neighbours._seen[two.id][0].phase == LEAVING)
        assert not one.replica.neighbours.others()
        assert one.replica.neighbours._seen[two.id][0].note == "CUDA is out of memory"

    swarm(scenario)


def test_a_peer_whose_disk_is_full_leaves_with_that_as_its_last_words(swarm):
    async def scenario(nodes):
        one, two = await one_and_one_that_stopped(nodes)

        async def full(state):
            raise UserError("The disk is full.", fix="Make room.", code=ExitCode.DISK)

        two.replica._saver.save = full
        with pytest.raises(UserError, match="The disk is full"):
            await two.replica.leave()
        await until(lambda: one.replica.neighbours._seen[two.id][0].phase == LEAVING)
        assert one.replica.neighbours._seen[two.id][0].note == "The disk is full."

    swarm(scenario)


def test_others_read_who_a_peer_is_and_why_its_round_failed(swarm):
    async def scenario(nodes):
        one, two = await peers(nodes, 2, make_run(), rate=40)
        two.replica.status._name, two.replica.status._hardware = "Ada's cellar", "2 x NVIDIA A40"

        async def lose(group, mine):
            raise RoundFailed("as if the last part had not come")

        one.replica.rounds.averager.average = two.replica.rounds.averager.average = lose
        await until(lambda: any("as if" in record.note for record in one.replica.neighbours.others()))
        (seen,) = one.replica.neighbours.others()
        assert (seen.name, seen.hardware) == ("Ada's cellar", "2 x NVIDIA A40")
        assert re.fullmatch(r"round \d+ not averaged: as if the last part had not come", seen.note)  # one may have made rounds alone

    swarm(scenario)


def test_who_calls_onto_the_state_before_ours_makes_nobody_offer_what_it_has_just_begun(swarm):
    async def scenario(nodes):
        run = make_run()
        peer = Peer(nodes, await nodes.node(), run, state=branch(run, 50, 1.0), rate=0)
        replica, peer.open = peer.replica, 4
        replica._phase, replica.progress.waiting = "train", 4
        for onto, frozen in ((peer.head.header.parents[0], False), (peer.head.digest, True)):
            replica._callers = {"QmCaller": onto}
            await replica._tick()
            assert bool(peer.offers) is frozen

    swarm(scenario)


def test_a_peer_that_waits_for_a_better_state_or_leaves_says_that_it_does_not_come(swarm):
    async def scenario(nodes):
        peer = Peer(nodes, await nodes.node(), make_run(), rate=0)
        replica = peer.replica
        replica.offer, replica._phase = Offer(Member(peer.id, 1, 4), None, peer.base.digest), "train"
        replica._knows = lambda caller: True
        assert replica._standing("QmCaller").has_samples
        replica._held_back = lambda: True
        await replica._tick()
        assert not replica._standing("QmCaller").has_samples
        replica._phase, asked = "train", []
        replica._saver.save = lambda state: asked.append(replica._standing("QmCaller").has_samples) or asyncio.sleep(0)
        await replica.leave()
        assert asked == [False]

    swarm(scenario)


def test_a_stopped_trainer_is_told_of_the_last_state_only(swarm):
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

    swarm(scenario)


def test_a_run_that_is_extended_while_its_peers_see_to_those_behind_goes_on(swarm, tmp_path):
    """One hears it from the host meanwhile, the other from what the first then says."""

    async def scenario(nodes):
        key, run = HostKey(tmp_path / "host.key"), make_run(total_samples=80)
        pair = [Peer(nodes, await nodes.node(), run, end=End(run, key.public)) for _ in range(2)]
        told, untold = [await peer.start(nodes) for peer in pair]
        for peer in pair:
            peer.replica._needed_by_others = lambda lingered, peer=peer: peer.replica.end.total < 200
        await until(lambda: all(peer.replica._phase == "done" for peer in pair))
        told.replica.extend(sign_extension(key, run, 200))
        await until(lambda: all(peer.finished for peer in pair))
        assert told.head.digest == untold.head.digest and told.head.header.samples >= 200
        check_invariants(*pair)

    swarm(scenario)


def test_who_has_not_heard_that_the_run_is_extended_asks_the_others_at_its_end(swarm, tmp_path, caplog):
    """One peer has it from the host, the other one only from what the first says in the DHT; a third knows no host, and believes nobody."""

    async def scenario(nodes):
        key, run = HostKey(tmp_path / "host.key"), make_run(total_samples=80)
        first, second, third = [await nodes.node() for _ in range(3)]
        told = Peer(nodes, first, run, end=End(run, key.public, sign_extension(key, run, 200)))
        untold, ignorant = Peer(nodes, second, run, end=End(run, key.public)), Peer(nodes, third, run)
        await told.start(nodes)
        await untold.start(nodes)
        await until(lambda: told.finished and untold.finished)
        assert told.head.digest == untold.head.digest and untold.head.header.samples >= 200
        assert [extension["total_samples"] for extension in untold.extensions] == [200] and not told.extensions
        assert not ignorant.replica.end.extend(told.replica.end.extension)

    caplog.set_level(logging.INFO, "peer.sync.engine.rounds")
    swarm(scenario)
    rounds = [record.getMessage() for record in caplog.records if record.name == "peer.sync.engine.rounds"]
    assert rounds and "total_samples=200" in rounds[-1]
