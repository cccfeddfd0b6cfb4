"""What the simulator works out beside the product, and that it notices what is wrong."""

import math

import pytest
import torch

from peer.contracts import Member
from peer.sync.diloco import DiLoCo
from peer.sync.engine.codec import Wire, add_up, square_norm
from peer.sync.engine.outer import advance
from peer.sync.engine.state import first_state
from peer.sync.engine.trainer.local_work import Anchor, LocalWork
from peer.sync.parameters import Parameters
from simulation.arithmetic import Arithmetic, Learned, Taken

SIZE = 1536


def contributions(wire):
    generator = torch.Generator().manual_seed(1)
    return [(Member(peer, 1, samples), wire.encode(torch.randn(SIZE, generator=generator))) for peer, samples in (("ann", 3), ("bob", 5))]


def averaged(wire, strategy, offers, change=lambda mean: mean, weights=(3 / 8, 5 / 8), clip=0.0, receipts=("", "")):
    """The state after one round, and a watcher that was told of its contributions."""
    watcher = Arithmetic(wire, strategy, clip)
    for (member, data), receipt in zip(offers, receipts, strict=True):
        watcher.offered(member.peer, member.number, data, receipt)
    mean = wire.encode(change(wire.decode(offers[0][1]) * weights[0] + wire.decode(offers[1][1]) * weights[1]))
    square = add_up(square_norm(part.decode(part.bytes_of(mean))) for part in wire.parts)
    state = advance(first_state("run", "schema", torch.zeros(SIZE), strategy.slots), [member for member, _ in offers], mean, square, strategy, wire)
    return watcher, state


@pytest.mark.parametrize("strategy", [Parameters(), DiLoCo(0.7, 0.9)])
@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8", "int4"])
def test_the_weighted_mean_of_the_contributions_is_taken_to_the_bit(codec, strategy):
    wire = Wire(codec, 1024, 512)
    watcher, state = averaged(wire, strategy, contributions(wire))
    assert watcher.rebased(state.digest, state.header, state.buffer.bytes()) == "" and watcher.checked == 1
    assert watcher.rebased(state.digest, state.header, state.buffer.bytes() + 1) == f"the state {state.digest[:8]} has two contents"


@pytest.mark.parametrize("fault", [{"weights": (0.5, 0.5)}, {"weights": (3 / 8, 0)}, {"change": lambda mean: mean * (1 + 1e-2)}])
def test_another_mean_is_named(fault):
    wire = Wire("fp32", 1024, 512)
    watcher, state = averaged(wire, Parameters(), contributions(wire), **fault)
    assert "not its parent's after the weighted mean" in watcher.rebased(state.digest, state.header, state.buffer.bytes())


@pytest.mark.parametrize(("receipts", "weights"), [(("r", ""), (0.5, 0.5)), (("", "r"), (3 / 8, 5 / 8)), (("r", "r"), (3 / 8, 5 / 8))])
def test_who_has_no_receipt_counts_no_more_than_who_has_one(receipts, weights):
    wire = Wire("fp32", 1024, 512)
    for tried in ((0.5, 0.5), (3 / 8, 5 / 8)):
        watcher, state = averaged(wire, Parameters(), contributions(wire), weights=tried, receipts=receipts)
        assert (watcher.rebased(state.digest, state.header, state.buffer.bytes()) == "") == (tried == weights)
        assert watcher.lessened == (weights == (0.5, 0.5))


def test_who_is_longer_than_the_others_warrant_counts_less():
    wire, (one, other) = Wire("fp32", 1024, 512), contributions(Wire("fp32", 1024, 512))
    other = other[0], wire.encode(wire.decode(other[1]) * 100)
    norm, longer = (wire.norm(data) for _, data in (one, other))
    factor = 1.5 * (norm / 3) * 5 / longer
    for weights, right in (((3 / 8, 5 / 8 * factor), True), ((3 / 8, 5 / 8), False)):
        watcher, state = averaged(wire, Parameters(), [one, other], weights=weights, clip=1.5)
        assert (watcher.rebased(state.digest, state.header, state.buffer.bytes()) == "") == right
        assert watcher.clipped == 1


class Scene:
    """A trainer's work, and the account of it."""

    def __init__(self, codec="int8"):
        self.wire, self.params = Wire(codec, 1024, 512), {"big": torch.nn.Parameter(torch.zeros(1024)), "small": torch.nn.Parameter(torch.zeros(512))}
        self.state = first_state("run", "schema", torch.zeros(SIZE), 0)
        self.work = LocalWork(self.params, Anchor(self.state.digest, self.state.header, self.state.buffer), Parameters(), self.wire)
        self.learned = Learned(self.wire, self.params, "ann")
        self.generator = torch.Generator().manual_seed(2)
        self.lands(self.state)
        assert self.wrong() == ""

    def learns(self):
        before = self.learned.now()
        with torch.no_grad():
            for parameter in self.params.values():
                parameter += 0.1 * torch.randn(parameter.shape, generator=self.generator)
        self.learned.stepped(before)
        self.work.open_samples += 4

    def lands(self, state, own=0):
        self.learned.told(state.digest, state.header, state.buffer.bytes())
        self.work.rebase(Anchor(state.digest, state.header, state.buffer), own)
        self.state = state

    def next_state(self, number):
        encoded = self.work.frozen.encoded.bytes()
        return advance(self.state, [Member("ann", number, 4)], encoded, self.wire.square_norm(encoded), Parameters(), self.wire)

    def wrong(self):
        frozen = self.work.frozen
        return self.learned.check(self.work.state.digest, frozen and (frozen.number, frozen.encoded.bytes()))


@pytest.fixture
def scene():
    return Scene()


def frozen(scene, number=1):
    scene.learns()
    scene.work.freeze(number)
    assert scene.wrong() == ""
    return scene.next_state(number)


def test_what_was_learned_frozen_rebased_and_withdrawn_adds_up(scene):
    scene.lands(frozen(scene), own=1)
    assert scene.wrong() == ""
    frozen(scene, 2)
    scene.work.withdraw()
    scene.learned.withdrew()
    assert scene.wrong() == ""


def test_error_feedback_that_is_forgotten_is_named(scene):
    state = frozen(scene)
    scene.lands(state, own=1)
    with torch.no_grad():  # what the codec lost is in no state and no contribution any more
        scene.params["big"].copy_(state.buffer.floats()[:1024])
        scene.params["small"].copy_(state.buffer.floats()[1024:])
    assert "the parameters differ" in scene.wrong()


def test_a_contribution_counted_twice_is_named(scene):
    state = frozen(scene)
    scene.learned.told(state.digest, state.header, state.buffer.bytes())
    scene.work.rebase(Anchor(state.digest, state.header, state.buffer), 0)  # as if it were not in the state
    assert "the parameters differ" in scene.wrong()


def test_work_that_is_lost_on_the_way_is_named(scene):
    scene.lands(frozen(scene), own=1)
    scene.learns()
    with torch.no_grad():
        scene.params["small"][7] = 0.0
    assert "the parameters differ" in scene.wrong()


def test_a_contribution_that_is_not_what_was_learned_is_named(scene):
    scene.learns()
    scene.work.freeze(1)
    scene.work.frozen.encoded.bytes()[:512] = 0
    assert "contribution 1 differs" in scene.wrong()


def test_what_a_sidecar_said_before_it_died_counts_as_far_as_it_was_heard(scene):
    state = frozen(scene)
    scene.lands(state, own=1)
    scene.learned.restarted(state.digest)
    assert scene.wrong() == "" and math.isfinite(float(scene.learned.ahead.sum()))


def test_gradients_that_were_taken_at_another_state_are_named():
    taken = Taken()
    taken.stepped("a", 2)
    taken.stepped("a", 2)
    assert taken.check("a", 4) == ""
    assert taken.check("a", 1) == "1 samples are in a contribution, and 0 of them were taken at its state", "they are in the one before"
    taken.stepped("a", 2)
    taken.stepped("b", 3)
    assert taken.check("b", 5) == "5 samples are in a contribution, and 3 of them were taken at its state"
    taken.stepped("b", 3)
    assert taken.check("c", 3) == "3 samples are in a contribution, and 0 of them were taken at its state"
