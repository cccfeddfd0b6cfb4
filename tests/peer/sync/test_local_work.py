"""Local work between states: wherever the swarm's state goes, every sample is in it, waiting, or given back."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from peer.contracts import Member
from peer.sync.engine.codec import WIRES, Wire
from peer.sync.engine.state import State, next_state
from peer.sync.engine.trainer.local_work import OPEN, REBASED_ANCESTORS, Anchor, LocalWork, NotFinite
from peer.sync.engine.trainer.swarm_sync import _News
from peer.sync.parameters import Parameters
from tests.peer.sync.swarm_tools import state_of

SIZE, ME = 6, "me"


def anchor(state: State) -> Anchor:
    return Anchor(state.digest, state.header, state.buffer)


def child(state: State, change: float, *members: Member) -> State:
    return next_state(state, [[state.vectors(SIZE)[0] + change]], members or [Member("other", state.header.round + 1, 5)])


def start(wire: str = "fp32") -> tuple[dict[str, nn.Parameter], State, LocalWork]:
    params = {"w": nn.Parameter(torch.arange(float(SIZE)))}
    state = state_of(params["w"].detach().clone())
    return params, state, LocalWork(params, anchor(state), Parameters(), Wire(wire, SIZE))


def train(params, work, change: float, samples: int = 4) -> None:
    params["w"].data += change
    work.open_samples += samples


def test_landing_on_a_state_that_includes_us_keeps_only_what_was_trained_since():
    params, state, work = start()
    train(params, work, 1.0)
    work.freeze(1)
    train(params, work, 0.25)
    new = child(state, 10.0, Member(ME, 1, 4))
    assert work.rebase(anchor(new), 1) == [] and work.waiting_samples == 4
    assert torch.equal(params["w"].data, torch.arange(float(SIZE)) + 10.25)
    assert final(work, state) == [] and final(work, new) == [1] and final(work, new) == []


def final(work: LocalWork, state: State) -> list[int]:
    work.final(state.digest, state.header.round)
    return work.take_done()


def test_a_final_state_counts_for_those_who_stand_on_it_or_come_to_it_and_for_nobody_on_another_branch():
    """The sidecar may call final what it has fetched before it tells of it, while the trainer stands on a state that lost."""
    params, state, work = start()
    for number in (1, 2):
        train(params, work, 1.0)
        work.freeze(number)
        lost, won = (child(state, change, Member(ME, number, 4)) for change in (1.0, 2.0))
        if number == 1:
            won = child(state, 2.0)
        work.rebase(anchor(lost), number)
        assert final(work, won) == [], "ours is in its sibling"
        assert work.rebase(anchor(won), 0 if number == 1 else 2) == ([1] if number == 1 else [])
        assert work.take_done() == ([] if number == 1 else [2])
        state = won


def test_landing_on_a_near_state_moves_params_and_keeps_the_contributions_bytes():
    params, state, work = start()
    train(params, work, 1.0)
    encoded = work.freeze(1).encoded.bytes().clone()
    new = child(child(state, 10.0), 10.0)
    assert work.rebase(anchor(new), 0) == []
    assert torch.equal(params["w"].data, torch.arange(float(SIZE)) + 21)
    assert torch.equal(work.frozen.encoded.bytes(), encoded)
    final = child(new, 1.0, Member(ME, 1, 4))
    work.rebase(anchor(final), 1)
    assert torch.equal(params["w"].data, final.vectors(SIZE)[0])


def test_only_a_contribution_that_came_into_a_state_leaves_its_memory_to_the_next():
    params, state, work = start()
    train(params, work, 1.0)
    first = work.freeze(1).encoded
    work.withdraw()  # the sidecar may still be sending it
    train(params, work, 1.0)
    second = work.freeze(2).encoded
    assert second is not first
    new = child(state, 1.0, Member(ME, 2, 4))
    work.rebase(anchor(new), 2)
    train(params, work, 2.0)
    third = work.freeze(3).encoded
    assert third is second and torch.equal(third.bytes().view(torch.float32), torch.full((SIZE,), 2.0))
    train(params, work, 1.0)
    work.rebase(anchor(child(new, 1.0)), 2)  # a round without us: the third is still on its way
    assert work.frozen.encoded is third and work._spare is None


def test_landing_far_away_drops_all_work():
    params, state, work = start()
    train(params, work, 1.0)
    work.freeze(1)
    train(params, work, 1.0)
    new = state
    for _ in range(REBASED_ANCESTORS + 1):
        new = child(new, 1.0)
    assert work.rebase(anchor(new), 0) == [1, OPEN] and work.waiting_samples == 0
    assert torch.equal(params["w"].data, new.vectors(SIZE)[0])


def test_a_fork_that_lost_gives_its_contributions_back():
    params, state, work = start()
    train(params, work, 1.0)
    work.freeze(1)
    work.rebase(anchor(child(state, 1.0, Member(ME, 1, 4))), 1)
    winner = child(state, 2.0, Member("other", 1, 50))
    assert work.rebase(anchor(winner), 0) == [1] and final(work, winner) == []


def test_an_older_final_state_does_not_end_a_newer_contribution():
    params, state, work = start()
    for number in (1, 2):
        train(params, work, 1.0)
        work.freeze(number)
        state = child(state, 1.0, Member(ME, number, 4))
        work.rebase(anchor(state), number)
    work.final(state.header.parents[0], 1)
    assert work.take_done() == [1] and final(work, state) == [2]


def test_a_withdrawn_contribution_leaves_nothing_in_the_parameters():
    params, _, work = start()
    train(params, work, 1.0)
    work.freeze(1)
    train(params, work, 0.25)
    work.withdraw()
    assert work.frozen is None and work.waiting_samples == 4
    assert torch.equal(params["w"].data, torch.arange(float(SIZE)) + 0.25)


@pytest.mark.parametrize("wire", WIRES)
def test_half_a_step_goes_out_of_the_parameters_with_what_no_contribution_holds(wire):
    params, state, work = start(wire)
    train(params, work, 1.0)
    encoded = work.freeze(1).encoded.bytes().clone()
    frozen = params["w"].detach().clone()
    train(params, work, 0.25)
    params["w"].data[2:] += 3.0  # of a step that is not counted
    assert work.undo() == [OPEN] and work.waiting_samples == 4 and torch.equal(work.frozen.encoded.bytes(), encoded)
    torch.testing.assert_close(params["w"].data, frozen, rtol=0, atol=1e-2)
    work.rebase(anchor(child(state, 1.0, Member(ME, 1, 4))), 1)
    params["w"].data[2:] += 3.0
    assert work.undo() == [] and torch.equal(params["w"].data, work.state.vector(SIZE))


def test_what_fp16_lost_goes_into_the_next_contribution():
    params, state, work = start("fp16")
    sent = torch.zeros(SIZE)
    for number in range(1, 6):
        train(params, work, 1e-3 + 1e-8)
        sent += Wire("fp16", SIZE).decode(work.freeze(number).encoded.bytes())
        state = child(state, 0.0, Member(ME, number, 4))
        work.rebase(anchor(state), number)
        assert 0 < float((params["w"].data - state.vectors(SIZE)[0]).abs().max()) < 1e-6
    assert torch.allclose(sent + (params["w"].data - state.vectors(SIZE)[0]), torch.full((SIZE,), 5 * (1e-3 + 1e-8)), atol=2e-6)


@pytest.mark.parametrize("wire", WIRES)
def test_parameters_that_are_not_finite_go_back_to_the_state(wire):
    params, state, work = start(wire)
    train(params, work, float("nan"))
    with pytest.raises(NotFinite):
        work.freeze(1)
    assert torch.equal(params["w"].data, state.vectors(SIZE)[0]) and work.waiting_samples == 0 and work.frozen is None


def test_a_contribution_that_was_lost_before_its_number_was_told_is_reported_as_open_samples():
    news = _News()
    news.frozen, news.dropped = 7, [3, 7]
    report = news.report(wait=False, done=False)
    assert (report.frozen, report.dropped) == (None, (3, OPEN))


class Bookkeeping(RuleBasedStateMachine):
    """Any order of training, freezing, rebases and final rounds."""

    @initialize(wire=st.sampled_from(["fp32", "fp16"]))  # which hold eighths exactly
    def begin(self, wire):
        self.params, self.state, self.work = start(wire)
        self.number, self.trained, self.samples_of = 0, 0, {}
        self.open, self.in_state, self.done, self.back = 0, {}, set(), 0
        self.open_work = torch.zeros(SIZE)

    @rule(samples=st.integers(1, 9), change=st.integers(-8, 8))
    def train(self, samples, change):
        train(self.params, self.work, change / 8, samples)
        self.trained += samples
        self.open += samples
        self.open_work += change / 8

    @precondition(lambda self: self.work.frozen is None and self.work.open_samples)
    @rule()
    def freeze(self):
        self.number += 1
        self.work.freeze(self.number)
        self.samples_of[self.number], self.open = self.open, 0
        self.open_work = torch.zeros(SIZE)

    def rebase(self, state, own_number):
        dropped = self.work.rebase(anchor(state), own_number)
        for number in dropped:
            self.back += self.open if number == OPEN else self.samples_of[number]
            if number == OPEN:
                self.open, self.open_work = 0, torch.zeros(SIZE)
            self.in_state.pop(number, None)
        return dropped

    @precondition(lambda self: self.work.frozen is not None)
    @rule(change=st.integers(-4, 4))
    def land_included(self, change):
        number = self.work.frozen.number
        self.state = child(self.state, change, Member(ME, number, self.samples_of[number]))
        assert self.rebase(self.state, number) == []
        self.in_state[number] = self.state.header.round
        assert torch.allclose(self.params["w"].data, self.state.vectors(SIZE)[0] + self.open_work, atol=1e-4)

    @rule(change=st.integers(-4, 4), rounds=st.integers(0, REBASED_ANCESTORS))
    def land_near(self, change, rounds):
        before = self.params["w"].data - self.state.vectors(SIZE)[0]
        for _ in range(rounds):
            self.state = child(self.state, change)
        assert self.rebase(self.state, self.state.header.included.get(ME, 0)) == []
        assert torch.allclose(self.params["w"].data, self.state.vectors(SIZE)[0] + before, atol=1e-4)

    @rule()
    def undo(self):
        frozen = self.params["w"].data - self.open_work
        assert self.work.undo() == ([OPEN] if self.open else [])
        assert torch.allclose(self.params["w"].data, frozen, atol=1e-4)
        self.back, self.open, self.open_work = self.back + self.open, 0, torch.zeros(SIZE)

    @rule(rounds=st.integers(REBASED_ANCESTORS + 1, REBASED_ANCESTORS + 3))
    def land_far(self, rounds):
        for _ in range(rounds):
            self.state = child(self.state, 1.0)
        self.rebase(self.state, self.state.header.included.get(ME, 0))
        assert self.work.waiting_samples == 0 and torch.equal(self.params["w"].data, self.state.vectors(SIZE)[0])

    @rule()
    def land_on_a_branch_without_us(self):
        base = state_of(torch.arange(float(SIZE)))
        for number in range(1, REBASED_ANCESTORS + 2):  # longer than the memory of ancestors: the first state is none of them
            base = child(base, 3.0, Member("other", number, self.state.header.samples + 1 if number == 1 else 1))
        self.state = base
        self.rebase(self.state, 0)
        assert not self.work.included and self.work.waiting_samples == 0

    @rule(behind=st.integers(0, 3))
    def final(self, behind):
        behind = min(behind, len(self.state.header.parents))
        round = self.state.header.round - behind
        self.work.final([self.state.digest, *self.state.header.parents][behind], round)
        done = self.work.take_done()
        assert all(self.in_state[number] <= round for number in done)
        for number in done:
            del self.in_state[number]
        self.done |= set(done)

    @invariant()
    def every_sample_is_in_exactly_one_place(self):
        frozen = self.work.frozen.samples if self.work.frozen else 0
        in_states = sum(self.samples_of[number] for number in self.in_state)
        final = sum(self.samples_of[number] for number in self.done)
        assert self.work.open_samples == self.open and set(self.work.included) == set(self.in_state)
        assert self.open + frozen + in_states + final + self.back == self.trained


Bookkeeping.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_any_order_of_events_keeps_the_books = Bookkeeping.TestCase
