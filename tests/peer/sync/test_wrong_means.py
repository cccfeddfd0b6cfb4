"""A proof of a wrong mean holds where a reducer signed one. None holds against an honest reducer, whatever others sign or say."""

import asyncio
import dataclasses
import itertools
import random

import msgpack
import numpy as np
import pytest
import torch

import peer.sync.engine.round.reduction as reduction_module
from peer.contracts import Member
from peer.sync.engine.codec import PART_ELEMENTS, WIRES, Wire
from peer.sync.engine.net.messages import WrongMeans, read
from peer.sync.engine.net.streams import MAX_MESSAGE_BYTES
from peer.sync.engine.outer import load_strategy
from peer.sync.engine.round.clipping import Clipping
from peer.sync.engine.round.groups import Group
from peer.sync.engine.round.reduction import Reduction, Run
from peer.sync.engine.round.share_seals import Given, ShareSeals, part_hash
from peer.sync.engine.trainer.port import Port
from peer.sync.engine.trainer.sidecar import TrainerLine
from simulation.records import signed
from swarm.centres import LEAST_OF_ALL, MOST_OF_A_SHARE, _furthest
from swarm.proofs import MOST_PROOFS, PROOFS, Proofs
from swarm.run.strategy import strategies
from swarm.run_config import RunConfig
from swarm.signing import HostKey
from swarm.slices import tree_digest
from swarm.statements import Input, input_statement, inputs_digest, statement
from swarm.weights import even_shares
from swarm.wrong_means import MOST_GROUP_BYTES, MOST_SENDERS, MOST_SLICE_BYTES, Place, Slice, WrongMean
from swarm.wrong_states import ACCUSATIONS, MOST_CHUNKS, MOST_HEADER_CHARACTERS, WrongState
from tests.swarm.test_proofs import invented

REDUCER = "Qmreducer"


class Node:
    """Signs as the simulator's nodes do, at no cost."""

    def __init__(self, peer_id):
        self.peer_id = peer_id

    def sign(self, said):
        return signed(self.peer_id, said)

    def key_of(self, peer):
        return f"ssh-rsa {peer}"

    def has_signed(self, peer, said, key, signature):
        return key == f"ssh-rsa {peer}" and signature == signed(peer, said)


def has_signed(*said):
    return Node("").has_signed(*said)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunConfig(model="x", members_of=HostKey(tmp_path_factory.mktemp("host") / "host.key").public)


def averaged(run, wire, group, vectors) -> list[tuple]:
    """What an honest reducer makes of all parts: (part, bytes, square) of each."""

    async def reduce():
        clipping = Clipping(run.clip_members, per_sample=run.sync != "gradients", centered=run.averaging == "centered")
        average = Run(group, None, torch.empty(wire.num_bytes, dtype=torch.uint8), [0.0] * len(wire.parts))
        reduction = Reduction(average, wire.parts, range(len(wire.parts)), wire, clipping)
        for index, part in enumerate(wire.parts):
            for member, vector in zip(group.members, vectors, strict=True):
                reduction.add(member.peer, index, part.bytes_of(vector))
        return [(part, *await reduction.mean(index)) for index, part in enumerate(wire.parts)]

    return asyncio.run(reduce())


class Share:
    """One reducer's share: all parts of the vector. lie: (part, bytes) -> the bytes that it gives and signs."""

    def __init__(self, run, wire, group, vectors, lie=lambda part, data: data, inputs=None):
        self.run, self.wire, self.group, self.vectors = run, wire, group, vectors
        self.parts = [(part, lie(part, data), square) for part, data, square in averaged(run, wire, group, vectors)]
        self.given = Given(self.parts)
        self.hashes = [tuple(part_hash(part, part.bytes_of(vector)) for part in wire.parts) for vector in vectors]
        peers = [member.peer for member in group.members]
        own = tuple(ShareSeals(run.digest, Node(peer)).sign_input(group.id, REDUCER, hashes) for peer, hashes in zip(peers, self.hashes, strict=True))
        self.inputs = own if inputs is None else inputs(own)
        self.signature, self.key = ShareSeals(run.digest, Node(REDUCER)).sign(group.id, self.given.digest(inputs_digest(self.inputs)))

    def proof(self, position=0, number=0) -> WrongMean:
        """As a checker lays it together, of a liar or of an honest one."""
        part, data, _ = self.parts[position]
        place = Place(position=position, count=len(self.parts), number=number, format=part.layout.format, elements=part.layout.elements)
        sent = [place.show(memoryview(part.bytes_of(each).numpy()), hashes) for each, hashes in zip(self.vectors, self.hashes, strict=True)]
        return WrongMean(
            accused=REDUCER, key=self.key, signature=self.signature, group=self.group.described, means=tree_digest(self.given.hashes),
            squares=self.given.squares, inputs=self.inputs, place=place, mean=place.show(memoryview(data.numpy()), self.given.hashes), sent=tuple(sent),
        )  # fmt: skip

    def proofs(self):
        return [self.proof(position, number) for position, (part, *_) in enumerate(self.parts) for number in range(part.layout.slices)]


def group_of(wire, vectors, samples, receipts=()):
    members = tuple(Member(f"Qm{number}", 7, count) for number, count in enumerate(samples))
    return Group("p" * 64, members, (REDUCER,), "x", tuple(wire.norm(vector) for vector in vectors), receipts, ("draw",))


def vectors_of(wire, count, seed, spread=0.0):
    numbers = torch.Generator().manual_seed(seed)
    draws = (torch.randn(wire.size, generator=numbers) * 10.0 ** (spread * torch.randn(1, generator=numbers)) for _ in range(count))
    return [wire.encode(vector) for vector in draws]


def share(run, name="int8", lie=lambda part, data: data, samples=(8, 5, 12), **options):
    wire = Wire(name, 20_000, 300)
    vectors = vectors_of(wire, len(samples), 3)
    return Share(run, wire, group_of(wire, vectors, samples), vectors, lie, **options)


def holds(run, proof):
    return Proofs(run, has_signed).holds(proof)


# ---------------------------------------------------------------- the honest


@pytest.mark.parametrize("averaging", ["mean", "centered"])
@pytest.mark.parametrize("name", WIRES)
def test_nothing_is_proven_of_an_honest_reducer(run, name, averaging):
    """Whatever comes: other sizes, weights, receipts, lengths that are clipped, tiny and huge values, zeros."""
    for seed in range(24):
        rng = random.Random(seed)
        wire, count = Wire(name, rng.choice([64 * 3, 10_000, 33_000]), rng.choice([0, 1, 3000])), rng.choice([1, 2, 3, 5, 9])
        scale = rng.choice([1.0, 1e-7, 1e-30, 1e4, 1e30])
        vectors = [wire.encode(wire.decode(vector) * scale) for vector in vectors_of(wire, count, seed, spread=rng.choice([0.0, 2.0]))]
        if seed % 6 == 0:
            vectors[0] = wire.encode(torch.zeros(wire.size))
        if seed % 6 == 1 and count > 1:  # the mean of two opposites is next to nothing
            vectors[1] = wire.encode(-wire.decode(vectors[0]))
        samples = [rng.randint(1, 40) for _ in range(count)]
        receipts = tuple(rng.choice(["", "a" * 128]) for _ in samples) if seed % 2 else ()
        here = dataclasses.replace(run, clip_members=rng.choice([0.0, 1.0, 2.0, 20.0]), averaging=averaging)
        made = Share(here, wire, group_of(wire, vectors, samples, receipts), vectors)
        assert not any(holds(here, proof) for proof in made.proofs()), seed


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_one_members_scales_are_not_its_reducers_fault(run, name):
    """Its bytes are copied as they came, however coarse they are."""
    wire = Wire(name, 20_000, 300)
    (coarse,) = vectors_of(wire, 1, 3)
    for part in wire.parts:
        part.bytes_of(coarse)[2 * part.layout.blocks :] = 1 if name == "int8" else 0x99  # a code of 1 everywhere: the scales could be smaller
    made = Share(run, wire, group_of(wire, [coarse], [8]), [coarse])
    assert not any(holds(run, proof) for proof in made.proofs())
    assert holds(run, Share(run, wire, group_of(wire, [coarse], [8]), [coarse], turned).proof())


@pytest.mark.parametrize("name", WIRES)
def test_a_norm_that_leaves_float32_nothing_of_its_member_frames_nobody(run, name):
    """The reducer multiplied by a float32 of zero, its checkers by 2 ** -150: of values of 2 ** 127 that was 1e-7, in place of honest 1e-4."""
    wire = Wire(name, 20_000, 300)
    huge = 60_000.0 if name == "fp16" else 2.0**127
    vectors = [wire.encode(torch.full((wire.size,), value)) for value in (1e-4, 1e-4, huge)]
    group = group_of(wire, vectors, [8, 5, 12])
    group = dataclasses.replace(group, norms=(*group.norms[:2], 2.0**148))
    made = Share(dataclasses.replace(run, clip_members=1.0), wire, group, vectors)
    assert not any(holds(made.run, proof) for proof in made.proofs())


def test_weights_are_the_same_for_every_strategy(run):
    """Whether a norm grows with samples is a fact of the strategy, which the proof takes from the one that needs no torch."""
    assert {name for name in strategies() if strategies()[name].swarms} == {"parameters", "diloco", "gradients"}
    for name, strategy in strategies().items():
        if strategy.swarms:
            assert load_strategy(f"peer.sync.{name}:strategy", dataclasses.replace(run, sync=name)).steps_locally is not bool(strategy.optimizer)


def framings(honest, run):
    """Proofs that members, a leader and others make up against an honest reducer. Members sign what they like."""
    proof = honest.proof()
    liar = honest.inputs[0]
    turned = honest.wire.encode(-honest.wire.decode(honest.vectors[0]))
    hashes = [part_hash(part, part.bytes_of(turned)) for part in honest.wire.parts]
    later = ShareSeals(run.digest, Node(liar.peer)).sign_input(honest.group.id, REDUCER, hashes)
    other = Share(run, honest.wire, dataclasses.replace(honest.group, attempt="y", norms=honest.group.norms[::-1]), honest.vectors[::-1])
    by_liar = Node(liar.peer).sign(statement(run.digest, honest.group.id, honest.given.digest(inputs_digest(honest.inputs))))
    shown = proof.place.show(memoryview(honest.wire.parts[0].bytes_of(turned).numpy()), hashes)
    described = honest.group.described
    return {
        "a sender signs other bytes later": dataclasses.replace(proof, inputs=(later, *proof.inputs[1:]), sent=(shown, *proof.sent[1:])),
        "other bytes than were signed": dataclasses.replace(proof, sent=(shown, *proof.sent[1:])),
        "another's bytes": dataclasses.replace(proof, sent=proof.sent[::-1]),
        "one left out": dataclasses.replace(proof, inputs=proof.inputs[1:], sent=proof.sent[1:]),
        "no signature of a sender": dataclasses.replace(proof, inputs=(dataclasses.replace(liar, signature=""), *proof.inputs[1:])),
        "the mean of another group": dataclasses.replace(proof, mean=other.proof().mean),
        "the mean of another slice": dataclasses.replace(proof, mean=honest.proof(1).mean),
        "another group's signature": dataclasses.replace(proof, signature=other.signature),
        "other weights": dataclasses.replace(proof, group=described.replace('"Qm0",7,8', '"Qm0",7,80')),
        "other norms": dataclasses.replace(proof, group=dataclasses.replace(honest.group, norms=(1e-9, 1e-9, 1e9)).described),
        "a group that is none": dataclasses.replace(proof, group="[]"),
        "another format": dataclasses.replace(proof, place=dataclasses.replace(proof.place, format="fp32")),
        "other squares": dataclasses.replace(proof, squares="0" * 64),
        "signed by the accuser": dataclasses.replace(proof, signature=by_liar),
        "signed by the accuser, with its key": dataclasses.replace(proof, signature=by_liar, key=liar.key),
        "no slices": dataclasses.replace(proof, place=None, mean=None, sent=()),
        "too few slices": dataclasses.replace(proof, sent=proof.sent[1:]),
        "a text that is no base64": dataclasses.replace(proof, mean=dataclasses.replace(proof.mean, data="A")),
    }


def test_no_honest_reducer_can_be_framed(run):
    honest = share(run)
    for name, proof in framings(honest, run).items():
        assert not holds(run, proof), name


# ---------------------------------------------------------------- liars


def turned(part, data):
    return part.encode(-part.decode(data))


def longer(part, data):
    return part.encode(1.3 * part.decode(data))


def off_by_one(part, data):
    values = part.decode(data)
    values[5] += 3 * values.abs().max()
    return part.encode(values)


@pytest.mark.parametrize("lie", [turned, longer, off_by_one])
@pytest.mark.parametrize("name", WIRES)
def test_who_signed_a_wrong_mean_is_banned_by_the_proof_alone(run, name, lie):
    lying = share(run, name, lie)
    proofs = Proofs(run, has_signed)
    assert proofs.hear([lying.proof()]) and proofs.reason(REDUCER) == "it signed a mean that is not that of what members sent it"
    assert proofs.of_wrong_means and not proofs.of_two_means
    if lie is not off_by_one:
        assert all(holds(run, proof) for proof in lying.proofs())


def test_a_mean_so_coarse_that_it_could_hide_anything_is_a_wrong_one(run):
    def coarse(part, data):
        values = part.decode(data)
        values[::128] = 1e6
        return part.encode(values)

    assert holds(run, share(run, "int8", coarse).proof())


def test_who_took_inputs_that_nobody_signed_or_others_than_the_members_is_banned(run):
    def forged(own):
        return (dataclasses.replace(own[0], signature=Node(REDUCER).sign(input_statement(run.digest, "g", REDUCER, own[0].digest))), *own[1:])

    for inputs in (forged, lambda own: own[1:], lambda own: (own[0], own[0], own[2])):
        proof = dataclasses.replace(share(run, inputs=inputs).proof(), place=None, mean=None, sent=())
        assert holds(run, proof)


def test_only_runs_for_members_have_such_proofs(run):
    lying = share(run, lie=turned)
    assert holds(run, lying.proof())
    here = dataclasses.replace(run, members_of="")
    assert not holds(here, share(here, lie=turned).proof())


# ---------------------------------------------------------------- centered averages


def zeros(part, data):
    return part.encode(torch.zeros(part.end - part.start))


@pytest.mark.parametrize("lie", [turned, longer, off_by_one, zeros])
@pytest.mark.parametrize("name", WIRES)
def test_a_mean_that_no_weights_make_of_what_was_sent_is_proven_of_a_centered_average(run, name, lie):
    """Played with real processes: for 66 rounds a member gave all a centre that was turned round, and nobody even looked."""
    centered = dataclasses.replace(run, averaging="centered")
    for samples in ((8, 5), (8, 5, 12), (8, 5, 12, 6, 8)):
        lying = share(centered, name, lie, samples=samples)
        assert holds(centered, lying.proof()), samples
        if lie is not off_by_one:
            assert all(holds(centered, proof) for proof in lying.proofs()), samples


def test_what_other_weights_within_the_bounds_make_is_no_proof(run):
    """Nobody but a reducer has the whole parts from which the weights follow; another CPU's may be a little different."""
    centered, wire = dataclasses.replace(run, averaging="centered"), Wire("int8", 20_000, 300)
    vectors = vectors_of(wire, 4, 3)
    for weights, wrong in (((0.3, 0.3, 0.2, 0.2), False), ((0.43, 0.43, 0.04, 0.0), False), ((0.6, 0.2, 0.1, 0.1), True), ((0.2,) * 4, True)):
        made = sum(weight * wire.decode(vector) for weight, vector in zip(weights, vectors, strict=True))

        def lie(part, data, made=made):
            return part.encode(part.of(made))

        shown = Share(centered, wire, group_of(wire, vectors, (8, 8, 8, 8)), vectors, lie)
        assert {holds(centered, proof) for proof in shown.proofs()} == {wrong}, weights


@pytest.mark.parametrize("name", WIRES)
def test_nothing_is_proven_of_a_centre_whatever_the_products_of_whole_parts_were(run, name, monkeypatch):
    """On another CPU they are a little different; here they are anything, and nothing is proven of who averaged so."""
    centered, wire = dataclasses.replace(run, averaging="centered"), Wire(name, 20_000, 300)
    for seed in range(12):
        numbers = torch.Generator().manual_seed(seed)
        made_up = torch.randn(5, 5, generator=numbers, dtype=torch.float64) * 10.0 ** (seed - 6)
        monkeypatch.setattr(reduction_module, "products", lambda vectors, made_up=made_up: made_up @ made_up.T)
        vectors = vectors_of(wire, 5, seed, spread=1.0)
        made = Share(centered, wire, group_of(wire, vectors, [random.Random(seed).randint(1, 40) for _ in vectors]), vectors)
        assert not any(holds(centered, proof) for proof in made.proofs()), seed


def test_the_furthest_weights_within_the_bounds_are_found(seed):
    """Beside all corners of a small case, found without a thought of the bounds' shape."""
    rng = np.random.default_rng(seed)
    for _ in range(50):
        shares = even_shares([int(count) for count in rng.integers(1, 40, size=4)])
        most, pulls = MOST_OF_A_SHARE * np.array(shares), rng.normal(size=4) - rng.choice([0.0, 3.0, -3.0])
        best = _furthest(most, pulls)
        assert LEAST_OF_ALL - 1e-12 <= best.sum() <= 1 + 1e-12 and (best >= 0).all() and (best <= most + 1e-12).all()
        corners = []
        for full in itertools.product([False, True], repeat=4):
            for total, last in itertools.product((LEAST_OF_ALL, 1.0), range(4)):
                corner = np.where(full, most, 0.0)
                corner[last] = total - (corner.sum() - corner[last])
                corners += [corner @ pulls] if 0 <= corner[last] <= most[last] else []
            corner = np.where(full, most, 0.0)
            corners += [corner @ pulls] if LEAST_OF_ALL <= corner.sum() <= 1 else []
        assert corners and best @ pulls == pytest.approx(max(corners))


def test_a_proof_is_kept_and_told_as_json(run, tmp_path):
    path, lying = tmp_path / "proofs.json", share(run, lie=turned)
    assert Proofs(run, has_signed, path=path).hear([lying.proof()])
    again = Proofs(run, has_signed, path=path)
    assert again.all == (lying.proof(),) and again.reason(REDUCER)
    assert PROOFS.validate_python([dataclasses.asdict(lying.proof())]) == again.all


def largest(accused="Q" * 46):
    """A proof of as many members, in as large a group, as one may have, of RSA keys of 4,096 bits."""
    key, signature, digest = "ssh-rsa " + "A" * 716, "A" * 684, "f" * 64
    piece = Slice(data="A" * (4 * MOST_SLICE_BYTES // 3), path="A" * (4 * (8 + 12) * 32 // 3))
    place = Place(position=4000, count=4001, number=255, format="int4", elements=PART_ELEMENTS)
    inputs = (Input(peer=accused, digest=digest, signature=signature, key=key),) * MOST_SENDERS
    return WrongMean(
        accused=accused, key=key, signature=signature, group="g" * MOST_GROUP_BYTES, means=digest, squares=digest, inputs=inputs, place=place,
        mean=piece, sent=(piece,) * MOST_SENDERS,
    )  # fmt: skip


def test_the_largest_proof_fits_into_one_message_to_a_peer():
    said = WrongMeans(known=("Q" * 46,) * MOST_PROOFS, proof=largest())
    assert len(msgpack.packb(said.wire())) < MAX_MESSAGE_BYTES
    assert read(WrongMeans, msgpack.unpackb(msgpack.packb(said.wire()))) == said


def test_the_trainer_is_told_of_wrong_means_and_states_one_at_a_time_after_the_others():
    ours, theirs = Port.pair()
    line, told = TrainerLine(ours), []
    state = WrongState.of(largest("QmOne"), "f" * 64, b"h" * MOST_HEADER_CHARACTERS, (b"c" * 32,) * MOST_CHUNKS)
    accusations = [largest("QmOne"), invented("QmTwo"), largest("QmThree"), state]
    for _ in range(6):
        line.proven(accusations)
        if (message := theirs.receive(0)) is not None:
            told.append(ACCUSATIONS.validate_python(message.accusations))
    assert told == [(accusations[1],), (accusations[0],), (accusations[2],), (state,)]
    ours.close()
    theirs.close()
