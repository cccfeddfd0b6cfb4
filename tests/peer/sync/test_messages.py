"""What may come over a stream, mutated in every place: it is read as what it should be, or refused with the one error."""

import dataclasses
import math
import random

import msgpack
import pytest

from peer.contracts import CommittedRound, Member
from peer.sync.engine.certificate import Certificate, Signer
from peer.sync.engine.net import messages
from peer.sync.engine.net.messages import (
    Announcement,
    Answer,
    BadMessage,
    Call,
    Certified,
    Chunk,
    Fetch,
    InputPart,
    Join,
    LinkPiece,
    Look,
    Looked,
    MeanOffer,
    MeanPart,
    Message,
    Nothing,
    Onward,
    PastRounds,
    Refusal,
    Share,
    Shares,
    SignedShare,
    Sought,
    StateOffer,
    Wait,
    WrongMeans,
    read,
    read_header,
)
from peer.sync.engine.state import ANCESTORS_KEPT, ELDER_CHARACTERS, ELDERS_KEPT, MAX_HEADER_BYTES, MOST_MEMBERS, BadState, Head, Header
from scripts.fuzzing.mutate import MSGPACK_NAMES, MSGPACK_VALUES, mutated
from swarm.proofs import Proof
from swarm.records import Membership
from swarm.statements import Input
from swarm.wrong_means import MOST_GROUP_BYTES, MOST_PATH_BYTES, MOST_SLICE_BYTES, Place, Slice, WrongMean

PEERS = ["Qm" + letter * 44 for letter in "abcdefgh"]
HEAD = Head("d" * 64, 12, ("e" * 64, "f" * 64))
CASES = 3000
"""Of all kinds together, some 5 s."""


def grown(rounds: int = 2, members: int = 3) -> Header:
    header = Header(run="r" * 64, schema="s" * 64)
    for number in range(1, rounds + 1):
        header = header.child(f"{number:064x}", [Member(peer, number, 7) for peer in PEERS[:members]], "m" * 64)
    return header


def sealed(round: CommittedRound) -> Certificate:
    membership = Membership(until=2_000_000_000, signature="f" * 128)
    return Certificate(round, tuple(Signer(each.peer, "ssh-rsa AAAA", "A" * 342 + "==", membership) for each in round.members))


INPUT = Input(peer=PEERS[0], digest="0a" * 32, signature="AAAA", key="ssh-rsa AAAA")
SLICE = Slice(data="AAAA", path="BBBB")
WRONG = WrongMean(
    accused="QmLiar", key="ssh-rsa AAAA", signature="AAAA", group="[]", means="0b" * 32, squares="0c" * 32, inputs=(INPUT,),
    place=Place(position=1, count=2, number=3, format="int8", elements=4096), mean=SLICE, sent=(SLICE,),
)  # fmt: skip
HONEST = [
    Nothing(),
    Refusal(error="the group is closed", culprits=tuple(PEERS), hearsay=True),
    Call(head=HEAD),
    Answer(coming=True, ready_seconds=2.5, head=HEAD, busy=False, behind=True, reason="it is averaging"),
    Join(parent="d" * 64, number=4, samples=16, norm=1.5, reduces=True, without=tuple(PEERS[:3])),
    Wait(),
    Onward(leader=PEERS[0]),
    Announcement(
        members=tuple((peer, 1, 8, 0.5) for peer in PEERS), reducers=tuple(PEERS[:5]), attempt="0123456789abcdef", late=tuple(PEERS[:1])
    ),
    Share(group="9" * 64),
    MeanPart(square=1.5),
    Fetch(digest="d" * 64, mean=True),
    StateOffer(header=grown(3)),
    MeanOffer(header=grown(), square_norm=2.25, num_bytes=1 << 20),
    PastRounds(rounds=grown(4).ancestors),
    Certified(certificate=sealed(grown(4).ancestors[0]), line="0123456789ab" * 5),
    Shares(
        group="0f" * 32,
        shares=(SignedShare(reducer="QmReducer", digest="0a" * 32, signature="AAAA"),),
        proofs=(Proof(accused="QmLiar", key="ssh-rsa AAAA", group="0f" * 32, digests=("0a", "0b"), signatures=("AAAA", "BBBB")),),
    ),
    InputPart(signature="AAAA", key="ssh-rsa AAAA"),
    Look(group="0f" * 32, lot="AAAA", key="ssh-rsa AAAA", sought=(Sought(reducer="QmReducer", position=3, number=7),)),
    Looked(inputs=(INPUT,), slices=(SLICE,)),
    WrongMeans(known=("QmLiar",), proof=WRONG),
    Chunk(chunk=3),
    LinkPiece(more=True, pieces=4),
]
KINDS = {type(message).__name__: (type(message), message.wire()) for message in HONEST} | {
    "answer to join": (messages.JOIN_ANSWER, HONEST[7].wire()),
    "kind of state": (messages.KIND_OF_STATE, {"schema": "s" * 64, "sizes": [1000, 7]}),
    "head": (messages.HEAD, {"digest": "d" * 64, "samples": 5, "parents": ["e" * 64]}),
    "header": (messages.HEADER, grown().to_json() | {"elders": ""}),
}


def travelled(values: object) -> object:
    return msgpack.unpackb(msgpack.packb(values))


def test_every_kind_of_message_is_mutated_here():
    assert {kind.__name__ for kind in Message.__subclasses__()} - {"MeanOffer"} <= KINDS.keys()


@pytest.mark.parametrize("message", HONEST, ids=lambda message: type(message).__name__)
def test_an_honest_message_arrives_as_it_was_said(message):
    assert read(type(message), travelled(message.wire())) == message


def test_a_field_that_a_later_version_adds_is_ignored():
    assert read(Call, Call(head=HEAD).wire() | {"mood": "good"}) == Call(head=HEAD)


# ------------------------------------------------------------------------------------------------------------ mutations


def test_whatever_a_message_is_turned_into_it_is_read_or_refused_with_the_one_error(seed):
    rng, read_on = random.Random(seed), 0
    for _ in range(CASES):
        name, (kind, wire) = rng.choice(list(KINDS.items()))
        values = travelled(wire)
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            values = mutated(values, rng, foreign=MSGPACK_VALUES, names=MSGPACK_NAMES)
        try:
            message = read(kind, values)
        except BadMessage as error:
            said = str(error)
            assert said and said.isprintable() and len(said) < 300, (name, values)
        else:
            read_on += 1
            within_bounds(message)
    assert 0 < read_on < CASES


def within_bounds(value: object) -> None:
    """Of everything in a message that was read: no text, number or list is larger than an honest one may be."""
    if isinstance(value, str):
        longest = (1 + ANCESTORS_KEPT + ELDERS_KEPT) * ELDER_CHARACTERS
        assert len(value) <= 400 or (len(value) <= longest and set(value) <= set("0123456789abcdef"))
    elif isinstance(value, bool) or value is None:
        pass
    elif isinstance(value, int | float):
        assert math.isfinite(value) and (value <= 1 << 53 or (isinstance(value, float) and value <= 1.8e308))
    elif isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        for inner in value.values():
            within_bounds(inner)
    elif isinstance(value, tuple):
        assert len(value) <= MOST_MEMBERS
        for inner in value:
            within_bounds(inner)
    elif isinstance(value, Slice):
        assert len(value.data) <= 4 * MOST_SLICE_BYTES // 3 + 4 and len(value.path) <= 4 * MOST_PATH_BYTES // 3 + 4
    elif isinstance(value, WrongMean) and value.group:
        assert len(value.group) <= MOST_GROUP_BYTES
        within_bounds(dataclasses.replace(value, group=""))
    elif dataclasses.is_dataclass(value):
        within_bounds({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, Message):
        within_bounds(dict(value))
    else:
        pytest.fail(f"{type(value)} in a message")


# ------------------------------------------------------------------------------------------------------------ bounds

BEYOND = {
    "more members than a round may have": (Announcement, {"members": [["a", 1, 1, 0.5]] * 513, "reducers": ["a"], "attempt": ""}),
    "more reducers than a round may have": (Announcement, {"members": [], "reducers": ["a"] * 513, "attempt": ""}),
    "a member without a norm": (Announcement, {"members": [["a", 1, 1]], "reducers": [], "attempt": ""}),
    "a number beyond what is counted": (Join, {"parent": "p", "number": (1 << 53) + 1, "samples": 1, "norm": 0.5}),
    "True for a number": (Join, {"parent": "p", "number": True, "samples": 1, "norm": 0.5}),
    "1 for true": (Join, {"parent": "p", "number": 1, "samples": 1, "norm": 0.5, "reduces": 1}),
    "a whole number for a norm": (Join, {"parent": "p", "number": 1, "samples": 1, "norm": 1}),
    "a text that is too long": (Share, {"group": "x" * 65}),
    "a text that is not ASCII": (Share, {"group": "é"}),
    "a text that no record could say": (Share, {"group": "\x01"}),
    "what no mean's digest is": (Shares, {"shares": [{"reducer": "a", "digest": "\x01", "signature": "AAAA"}]}),
    "nine ancestors": (Call, {"head": {"digest": "d", "samples": 1, "parents": ["p"] * 9}}),
    "seconds that are none": (Answer, HONEST[3].wire() | {"ready_seconds": math.inf}),
    "a whole number for a sum of squares": (MeanPart, {"square": 1}),
    "a sum of squares above all": (MeanPart, {"square": 2.0**1001}),
    "a norm that is not finite": (MeanOffer, HONEST[12].wire() | {"square_norm": math.nan}),
    "a leader that is no name": (messages.JOIN_ANSWER, {"leader": 5}),
    "nobody who waits": (messages.JOIN_ANSWER, {"wait": False}),
    "a vector of nothing": (messages.KIND_OF_STATE, {"schema": "x", "sizes": [0, 0]}),
}


@pytest.mark.parametrize("what", BEYOND)
def test_what_is_beyond_the_bounds_is_refused(what):
    with pytest.raises(BadMessage):
        read(*BEYOND[what])


def test_of_more_names_than_are_believed_the_first_count():
    assert read(Join, {"parent": "p", "number": 1, "samples": 1, "norm": 0.0, "without": list("abcdefghijk")}).without == tuple("abcdefgh")
    assert read(Refusal, {"error": "x" * 1000}).error == "x" * 200


@pytest.mark.parametrize(
    "included", [{f"Qm{number:044d}": "many" for number in range(5000)}, {number: 1 for number in range(100_000)}], ids=["many", "too many"]
)
def test_a_header_of_nothing_but_faults_is_refused_in_one_line(included):
    with pytest.raises(BadState) as caught:
        read_header(grown().to_json() | {"included": included})
    assert len(str(caught.value)) < 300


def test_a_header_of_a_thousand_peers_is_read_as_it_was_written():
    header = Header(run="r" * 64, schema="s" * 64)
    for number in (1, 2):
        members = [Member(f"Qm{number}{index:043d}", 1, 9) for index in range(MOST_MEMBERS)]
        header = header.child(f"{number:064x}", members, "m" * 64)
    assert header.num_bytes <= MAX_HEADER_BYTES and read_header(travelled(header.to_json())) == header
