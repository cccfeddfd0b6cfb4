"""Which state a wrong mean has made: shown by its header, and by nothing else."""

import base64
import dataclasses

import pytest
from blake3 import blake3

from swarm.digest import canonical_json
from swarm.proofs import Proofs
from swarm.run_config import RunConfig
from swarm.statements import inputs_digest, share_digest, statement
from swarm.wrong_means import WrongMean
from swarm.wrong_states import MOST_CHUNKS, MOST_HEADER_CHARACTERS, WrongState, group_of
from tests.identities import key

RUN = RunConfig(model="x", members_of="0" * 64)
HASHES = (b"a" * 32, b"b" * 32)


def wrong_mean(run=RUN, liar="liar", *, parent="p" * 64, members=(("QmAnn", 7, 8),), reducers=None, attempt="1") -> WrongMean:
    """What `liar` signed for a group: a mean of nothing, which has members."""
    signer = key(liar)
    said = [parent, [list(member) for member in members], reducers or [signer.peer_id], ["d"], attempt, [], []]
    group = canonical_json(said).decode()
    proof = WrongMean(accused=signer.peer_id, key=signer.public, signature="", group=group, means="m", squares="s", inputs=())
    signature = signer.sign(statement(run.digest, group_of(proof), share_digest("m", "s", inputs_digest(()))))
    return dataclasses.replace(proof, signature=signature)


def wrong_state(proof, run=RUN, *, accused="", hashes=HASHES, **changes) -> WrongState:
    """The state of round 3 that `proof`'s group made. changes: to its header, whose digest it has all the same."""
    header = canonical_json({"run": run.digest, "group": group_of(proof), "round": 3, "samples": 24} | changes)
    digest = blake3(header + b"".join(hashes)).hexdigest()
    shown = WrongState.of(proof, digest, header, hashes)
    return dataclasses.replace(shown, accused=accused) if accused else shown


def test_a_state_is_of_the_wrong_mean_whose_group_its_header_names():
    proof = wrong_mean()
    assert Proofs(RUN).holds(proof)
    assert wrong_state(proof).round_by(proof, RUN) == 3


def lies(proof):
    shown = wrong_state(proof)
    nested = "[" * 50_000
    return {
        "another group's": wrong_state(proof, group=group_of(wrong_mean(attempt="2"))),
        "of no group": wrong_state(proof, group=""),
        "another run's": wrong_state(proof, dataclasses.replace(RUN, target_batch_size=7)),
        "another digest": dataclasses.replace(shown, digest="f" * 64),
        "another header": dataclasses.replace(shown, header=shown.header.replace('"round":3', '"round":4')),
        "other bytes": dataclasses.replace(shown, chunks=base64.b64encode(b"c" * 64).decode()),
        "no base64": dataclasses.replace(shown, chunks="A"),
        "no JSON": of_header("{"),
        "no header": of_header("[]"),
        "a header without a group": of_header("{}"),
        "nested too deep": of_header(nested),
        "a round that is none": wrong_state(proof, round=True),
        "a negative round": wrong_state(proof, round=-3),
        "a round that no database takes": wrong_state(proof, round=10**30),
    }


def of_header(text):
    return WrongState(accused=key("liar").peer_id, digest=blake3(text.encode()).hexdigest(), header=text, chunks="")


def test_no_other_state_is():
    proof = wrong_mean()
    for name, shown in lies(proof).items():
        assert shown.round_by(proof, RUN) is None, name


def test_who_was_no_reducer_of_a_group_makes_none_of_its_states_wrong():
    """Anybody can sign a wrong mean in the name of any group."""
    proof = wrong_mean(liar="mallory", reducers=["QmHonest"])
    assert Proofs(RUN).holds(proof), "it costs it its own membership"
    assert wrong_state(proof).round_by(proof, RUN) is None
    assert wrong_state(proof, accused="QmHonest").round_by(wrong_mean(), RUN) is None


@pytest.mark.parametrize("header, chunks", [(MOST_HEADER_CHARACTERS - 2, MOST_CHUNKS + 1), (MOST_HEADER_CHARACTERS - 1, 1)])
def test_what_is_too_large_to_be_shown_is_not(header, chunks):
    proof = wrong_mean()
    assert WrongState.of(proof, "f" * 64, b'"' + b"h" * (MOST_HEADER_CHARACTERS - 2) + b'"', HASHES[:1] * MOST_CHUNKS) is not None
    assert WrongState.of(proof, "f" * 64, b'"' + b"h" * header + b'"', HASHES[:1] * chunks) is None
