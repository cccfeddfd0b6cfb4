"""What one contribution does to the loss of a tiny real model, measured by what its reducer sees of it."""

import asyncio
import io
import random

import pytest
import torch
from PIL import Image

from peer.audit.measuring import Measuring
from peer.audit.tally import LEAST_ROUNDS, Tally
from peer.contracts import LatentBatch, Member, Sample
from peer.launch.starting_model import load_model
from peer.machine.device import Precision
from peer.rooms import load_part
from peer.samples.decoding import Decoder
from peer.samples.encoding import Encoder
from peer.sync.engine import codec
from peer.sync.engine.codec import Wire
from peer.sync.engine.round import reduction
from peer.sync.engine.round.excerpts import Excerpts
from peer.sync.engine.round.groups import Group, share_out
from peer.sync.engine.round.reduction import Reduction, Run
from peer.sync.engine.state import first_state
from peer.sync.engine.vectors import Flat, Schema, flatten
from swarm.run_config import RunConfig

CPU = torch.device("cpu")
COLOURS = {"red": (230, 30, 30), "blue": (30, 30, 230)}
BATCH, STEPS, RATE = 4, 3, 2e-3


def picture(colour, number):
    file = io.BytesIO()
    image = Image.new("RGB", (16, 16), colour)
    image.putpixel((number % 16, number // 16), (0, 0, 0))
    image.save(file, "PNG")
    return file.getvalue()


RIGHT = [Sample(f"{colour}:{n}", picture(COLOURS[colour], n), colour) for colour in COLOURS for n in range(8)]


class Toy:
    """A model that has learned something of two colours, and members that train it further."""

    def __init__(self, folder, **options):
        self.run = RunConfig(model=str(folder), resolution=16, target_batch_size=64, wire="fp16", ucg=0.0, **{"sync": "parameters"} | options)
        self.model = load_model(self.run, {}, None)
        self.params = load_part("methods", self.run.method).build(self.run).attach(self.model)
        self.precision = Precision(CPU, None, False, "a test")
        self.wire, self.rng = Wire.of(self.run.wire, Schema.of(self.params)), torch.Generator().manual_seed(1)
        self.right = self.encoded(RIGHT)
        self.state = self.anchor = None

    def encoded(self, some):
        decoder = Decoder(self.run)
        with torch.no_grad():
            return Encoder(self.model)(decoder.finish(decoder.start(some)), self.rng)

    def learn(self, batch, steps, rate=RATE):
        optimizer = torch.optim.Adam(self.params.values(), rate)
        for _ in range(steps):
            where = torch.randperm(len(batch.latents), generator=self.rng)[:BATCH]
            some = LatentBatch(batch.latents[where], {name: text[where] for name, text in batch.text.items()}, batch.geometry[where])
            self.model.loss(some, self.rng).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def flat(self):
        return flatten(self.params, torch.empty(self.wire.size))

    def begin(self):
        """The state that all members begin at."""
        self.learn(self.right, 20, rate=4e-3)
        self.anchor = self.flat()
        self.state = first_state(self.run.digest, Schema.of(self.params).digest, self.anchor, 0)

    def contribution(self, batch):
        self.learn(batch, STEPS)
        change = self.flat() - self.anchor
        Flat(self.params).write(0, self.anchor)
        return change

    def measuring(self, seed=0):
        return Measuring(
            model=self.model, params=self.params, precision=self.precision, run=self.run, samples=RIGHT, rng=random.Random(seed)
        )

    def reduced(self, contributions, share=None):
        """What a reducer of `share` (indices of parts; None: all) keeps of these members' contributions."""
        group = Group("p", tuple(Member(peer, 1, STEPS * BATCH) for peer in sorted(contributions)), ("reducer",))
        indices = share or list(range(len(self.wire.parts)))
        parts = [self.wire.parts[index] for index in indices]

        async def scenario():
            excerpts = Excerpts(parts, lambda num_bytes: contributions)
            run = Run(group, None, torch.empty(self.wire.num_bytes, dtype=torch.uint8), [0.0] * len(self.wire.parts))
            reducing = Reduction(run, parts, indices, self.wire, excerpts=excerpts)
            for peer, change in contributions.items():
                encoded = self.wire.encode(change)
                for index, part in enumerate(parts):
                    reducing.add(peer, index, part.bytes_of(encoded))
            await reducing.whole()
            return excerpts

        return asyncio.run(scenario())


@pytest.fixture(scope="module")
def toy(tiny_model):
    found = Toy(tiny_model)
    found.begin()
    return found


@pytest.fixture
def small_parts(monkeypatch):
    for room in (codec, reduction):
        monkeypatch.setattr(room, "PART_ELEMENTS", 2048)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr("peer.audit.measuring.PICTURES", 3)
    monkeypatch.setattr("peer.audit.measuring.DRAWS", 4)


def test_what_a_contribution_does_is_measured_at_equal_noise_and_the_model_is_as_before(toy, few):
    brought = {"honest": (change := toy.contribution(toy.right)), "turned round": -change, "nothing": torch.zeros(toy.wire.size)}
    before = toy.flat().clone()
    kept = toy.reduced(brought)
    found = toy.measuring().losses(toy.state, kept.parts, kept.of, {"turned round": RIGHT[:2]})
    assert len({losses.before for losses in found.values()}) == 1 and found["nothing"].after == found["nothing"].before
    assert found["honest"].after < found["turned round"].after and found["turned round"].before < found["turned round"].after
    assert found["turned round"].own_before < found["turned round"].own_after and found["nothing"].own_after is None
    assert torch.equal(toy.flat(), before)
    assert toy.measuring(seed=1).losses(toy.state, kept.parts, kept.of)["nothing"].before != found["nothing"].before


def test_who_turns_its_work_round_or_stretches_it_is_reported_and_the_honest_are_not(toy, few):
    tally, measuring = Tally(), toy.measuring()
    for _ in range(LEAST_ROUNDS):
        brought = {peer: toy.contribution(toy.right) for peer in ("a", "b", "c")}
        kept = toy.reduced(brought | {"turned round": -brought["a"], "x10": 10 * brought["b"]})
        for peer, losses in measuring.losses(toy.state, kept.parts, kept.of).items():
            tally.add(peer, losses.after - losses.before)
    print([(found.peer, round(found.change, 5), round(found.error, 5)) for found in tally.findings()])
    assert {found.peer for found in tally.findings() if found.reported} == {"turned round", "x10"}


def test_a_share_shows_the_same_of_a_work_that_is_turned_round(tiny_model, small_parts, few):
    toy = Toy(tiny_model)
    toy.begin()
    brought = {"honest": (change := toy.contribution(toy.right)), "turned round": -change}
    for share in share_out("parent", ("a", "b"), toy.wire.parts).values():
        kept = toy.reduced(brought, share)
        assert len(kept.parts) == len(share) < len(toy.wire.parts)
        found = toy.measuring().losses(toy.state, kept.parts, kept.of)
        assert found["honest"].after < found["turned round"].after


def test_what_is_far_out_of_all_bounds_is_counted_as_a_hundredfold_and_what_is_no_number_not_at_all(toy, few):
    brought = {"huge": torch.full((toy.wire.size,), 6e4)}
    kept = toy.reduced(brought)
    found = toy.measuring().losses(toy.state, kept.parts, kept.of)
    assert found["huge"].after == 100 * found["huge"].before
    kept.of["huge"].view(torch.float16).fill_(float("nan"))
    assert not toy.measuring().losses(toy.state, kept.parts, kept.of)


@pytest.mark.parametrize("sync", ["diloco", "gradients"])
def test_under_every_strategy_it_is_the_state_of_a_round_of_this_contribution_alone(tiny_model, few, sync):
    toy = Toy(tiny_model, sync=sync, learning_rate=1e-3)
    toy.anchor = toy.flat()
    slots = load_part("sync", sync).strategy(toy.run).slots
    toy.state = first_state(toy.run.digest, Schema.of(toy.params).digest, toy.anchor, slots)
    change = toy.contribution(toy.right)
    change = change if sync == "diloco" else -change  # a gradient points to where the loss grows
    kept = toy.reduced({"honest": change, "turned round": -change})
    found = toy.measuring().losses(toy.state, kept.parts, kept.of)
    assert found["honest"].after < found["turned round"].after
