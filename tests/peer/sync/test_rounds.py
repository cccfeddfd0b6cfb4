"""Which groups may average: more than half of the samples that wait on a state, and whose are not counted."""

import asyncio
import time
from types import SimpleNamespace

import pytest
import torch

from peer.contracts import Member
from peer.sync.engine.buffers import IN_MEMORY
from peer.sync.engine.cell import Bell, Cell, Phase
from peer.sync.engine.net.neighbours import Neighbours
from peer.sync.engine.round.company import Company
from peer.sync.engine.round.groups import Group, NoGroup
from peer.sync.engine.round.next_round import NextRound
from peer.sync.engine.round.rounds import Rounds
from peer.sync.engine.state import next_state
from peer.sync.engine.trainer.trainer import Contribution
from peer.sync.parameters import Parameters
from swarm.records import PeerRecord
from tests.clock import Clock
from tests.peer.sync.replicas import make_run
from tests.peer.sync.swarm_tools import state_of

FRIENDS = ("ann", "bob", "cleo", "dan")
RUN = make_run()
STATE = state_of(torch.zeros(4), run=RUN.digest)


class Swarm:
    """Rounds of a peer that has met FRIENDS, before anything of it is started; `waiting`: whose records promise samples."""

    def __init__(self, samples_per_second: float = 0.0, **waiting: int):
        clock, self.now, self.samples_per_second = Clock(), time.time(), samples_per_second
        self.company = Company(frozenset(FRIENDS), clock=clock, me="us")
        self.records = {peer: self.record(peer, samples) for peer, samples in waiting.items()}
        self.neighbours = Neighbours(SimpleNamespace(peer_id="us", records=self.read), RUN, "schema", clock, self.company)
        asyncio.run(self.neighbours.read())
        for peer in waiting:
            self.company.answered(peer)
        node = SimpleNamespace(peer_id="us", client_mode=False)
        outer = SimpleNamespace(wire=SimpleNamespace(num_bytes=0), strategy=Parameters(), buffers=IN_MEMORY)
        reception = SimpleNamespace(standing=None, heard=None, failed=lambda group: None)
        next_round = NextRound(RUN, None, self.neighbours, Cell(STATE, Bell(), clock), lambda: self.now)
        phase = Cell(Phase.GROUP, Bell(), clock)
        self.rounds = Rounds(RUN, None, node, None, self.neighbours, self.company, outer, phase, reception, next_round, clock=clock)

    async def read(self, run_id: str) -> dict[str, PeerRecord]:
        return self.records

    def record(self, peer: str, samples: int) -> PeerRecord:
        return PeerRecord(
            peer_id=peer, config=RUN.digest, schema="schema", round=0, samples=0, digest=STATE.digest, waiting_samples=samples,
            samples_per_second=self.samples_per_second, time=self.now,
        )  # fmt: skip

    def refuses(self, *members: str, samples: int = 8, silent: tuple[str, ...] = ()) -> NoGroup | None:
        group = Group(STATE.digest, tuple(Member(peer, 1, samples) for peer in members), members, silent=frozenset(silent))
        try:
            self.rounds._check_quorum(group)
        except NoGroup as error:
            return error
        return None


def test_an_own_receipt_that_does_not_hold_is_left_out_with_one_warning(caplog):
    swarm, brought = Swarm(ann=8), []

    async def form(ticket, *_, **__):
        brought.append(ticket.receipt)
        raise NoGroup("enough is seen")

    swarm.rounds.matchmaker.form = form
    offer = Contribution(Member("us", 1, 8), None, STATE.digest, receipt="0" * 128)
    for offer.failures in range(3):
        with pytest.raises(NoGroup, match="enough is seen"):
            asyncio.run(swarm.rounds.attempt(STATE, offer, (), 60.0))
    assert brought == ["", "", ""] and [said for said in caplog.messages if "receipt" in said] == [
        "this run's host did not sign the dataset server's receipt for contribution=1: counting it as one without"
    ]


@pytest.mark.parametrize("why", ["called", "not called", "after a failure"])
def test_who_was_called_need_not_tell_those_that_made_its_state_and_that_it_has_met(why):
    swarm, told = Swarm(ann=8, bob=8, x=8), []
    state = next_state(STATE, [[torch.ones(4)]], [Member(peer, 1, 8) for peer in ("ann", "us", "x")])

    async def form(ticket, *_, **options):
        told.extend(options["told"])
        raise NoGroup("enough is seen")

    swarm.rounds.matchmaker.form = form
    offer = Contribution(Member("us", 2, 8), None, state.digest, failures=why == "after a failure")
    with pytest.raises(NoGroup, match="enough is seen"):
        asyncio.run(swarm.rounds.attempt(state, offer, () if why == "not called" else ("bob",), 60.0))
    assert set(told) == ({"ann", "us"} if why == "called" else set())


def test_half_of_the_waiting_samples_are_not_enough():
    swarm = Swarm(ann=8, bob=8, cleo=8)
    assert swarm.refuses("ann", "us") and not swarm.refuses("ann", "bob", "us")


def test_what_was_trained_since_a_record_was_written_counts_too():
    """Seen: a founder that read the other one's first record, in which nothing waits, made the first round alone, and the other one did, too."""
    swarm = Swarm(samples_per_second=40.0, ann=0)
    assert not swarm.refuses("us")
    swarm.now += 0.5
    assert swarm.refuses("us") and not swarm.refuses("us", samples=24)


def test_the_dead_do_not_count_at_once_where_those_who_are_there_are_more():
    swarm = Swarm(ann=8, bob=20, cleo=4)
    assert swarm.refuses("ann", "us") and not swarm.refuses("ann", "us", silent=("bob",))
    assert swarm.refuses("ann", "us", silent=("bob", "cleo"))  # as likely it is we who are cut off


def test_of_a_pair_that_lost_each_other_none_goes_on_at_once():
    assert Swarm(ann=20).refuses("us", silent=("ann",))


@pytest.mark.parametrize("samples", [1, 80])
def test_strangers_that_do_not_answer_or_are_left_out_never_count(samples):
    swarm = Swarm(ann=8, x=samples, y=samples)
    swarm.company.blame(["y"])
    assert not swarm.refuses("us", "ann", silent=("x",))


def test_strangers_who_promise_much_and_do_not_come_cost_one_attempt_without_a_pause():
    swarm = Swarm(ann=8, x=80)
    refused = swarm.refuses("us", "ann")
    assert refused.at_once and refused.silent == {"x"}
    swarm.neighbours.missed(refused.silent)
    assert not swarm.refuses("us", "ann")


def test_peers_that_we_have_met_are_waited_for_with_a_pause():
    swarm = Swarm(ann=8, bob=80)
    refused = swarm.refuses("us", "ann")
    assert refused and not refused.at_once
    swarm.neighbours.missed(refused.silent)
    assert swarm.refuses("us", "ann")


def test_a_peer_that_is_left_out_is_not_expected_and_its_samples_are_promised_to_nobody():
    swarm = Swarm(ann=8, bob=8)
    swarm.company.blame(["bob"])
    assert [record.peer_id for record in swarm.neighbours.counted_upon()] == ["ann"]
    assert {record.peer_id for record in swarm.neighbours.counted_upon(left_out_too=True)} == {"ann", "bob"}
