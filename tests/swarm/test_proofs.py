"""Proofs ban alone: what holds as one, and that nobody can be framed by one that does not."""

import dataclasses
import json
import logging

import pytest

from swarm.members import Members, sign_membership
from swarm.peer_key import PeerKey
from swarm.proofs import MOST_PROOFS, Proof, Proofs
from swarm.run_config import RunConfig
from swarm.signing import HostKey
from swarm.statements import statement


@pytest.fixture(scope="module")
def keys():
    return [PeerKey.draw() for _ in range(2)]


@pytest.fixture
def host(tmp_path):
    return HostKey(tmp_path / "host.key")


@pytest.fixture
def run(host):
    return RunConfig(model="x", members_of=host.public)


def proof(run, key, digests=("a", "b"), group="g") -> Proof:
    signatures = tuple(key.sign(statement(run.digest, group, digest)) for digest in digests)
    return Proof(accused=key.peer_id, key=key.public, group=group, digests=digests, signatures=signatures)


def test_who_signed_two_means_of_one_share_is_banned_by_the_proof_alone(host, run, keys):
    liar, _ = keys
    members = Members(run)
    members.hear(liar.peer_id, sign_membership(host, run, liar.peer_id))
    assert members.refusal(liar.peer_id) == ""
    assert members.proofs.hear([proof(run, liar)]) and not members.proofs.hear([proof(run, liar)])
    assert members.refusal(liar.peer_id) == "you are banned by a proof: it signed two different means of one share"


def forged(run, liar, other):
    good = proof(run, other)
    elsewhere = RunConfig(model="x", members_of=run.members_of, target_batch_size=7)
    one, two = good.signatures
    return {
        "one mean, twice": proof(run, other, ("a", "a")),
        "means of two groups": dataclasses.replace(good, signatures=(one, proof(run, other, group="h").signatures[1])),
        "of another run": proof(elsewhere, other),
        "of another group": dataclasses.replace(good, group="h"),
        "another digest": dataclasses.replace(good, digests=("a", "c")),
        "signed by the accuser": dataclasses.replace(proof(run, liar), accused=other.peer_id),
        "signed by the accuser, under the key of the accused": dataclasses.replace(proof(run, liar), accused=other.peer_id, key=other.public),
        "one signature only": dataclasses.replace(good, signatures=(one, one)),
        "no signature": dataclasses.replace(good, signatures=(one, "")),
        "signatures that are none": dataclasses.replace(good, signatures=(one, two[:-8] + "AAAAAA==")),
        "no key": dataclasses.replace(good, key="ssh-rsa AAAA"),
    }


def test_nobody_is_banned_by_what_is_no_proof(run, keys):
    for name, false in forged(run, *keys).items():
        proofs = Proofs(run)
        assert not proofs.hear([false]), name
        assert not proofs.all and not any(proofs.reason(key.peer_id) for key in keys), name


def test_a_proof_is_worth_nothing_in_an_open_run(keys):
    run = RunConfig(model="x")
    assert not Proofs(run).hear([proof(run, keys[0])])


def test_proofs_are_kept_and_read_again(tmp_path, run, keys, caplog):
    path = tmp_path / "proofs.json"
    Proofs(run, path=path).hear([proof(run, keys[0])])
    assert Proofs(run, path=path).reason(keys[0].peer_id)
    other = RunConfig(model="x", members_of=run.members_of, target_batch_size=7)
    assert not Proofs(other, path=path).all, "they are checked again: a file proves nothing by itself"
    path.write_text(json.dumps([{"accused": 1}, *json.loads(path.read_text())]))
    with caplog.at_level(logging.WARNING):
        assert Proofs(run, path=path).reason(keys[0].peer_id) and "ignored a proof" in caplog.text
        path.write_text("1")
        assert not Proofs(run, path=path).all and "cannot read the proofs" in caplog.text
    blocked = tmp_path / "a file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        proofs = Proofs(run, path=blocked / "proofs.json")
        assert proofs.hear([proof(run, keys[0])]) and "cannot keep the proofs" in caplog.text


def test_no_more_proofs_are_kept_than_a_message_holds(run):
    proofs = Proofs(run, lambda *said: True)
    invented = [Proof(accused=f"Qm{n}", key="ssh-rsa A", group="g", digests=("a", "b"), signatures=("A", "B")) for n in range(MOST_PROOFS + 1)]
    proofs.hear(invented[:-1])
    assert not proofs.hear(invented[-1:]) and len(proofs.all) == MOST_PROOFS


def invented(accused: str) -> Proof:
    return Proof(accused=accused, key="ssh-rsa A", group="g", digests=("a", "b"), signatures=("A", "B"))


def test_keys_that_nobody_let_in_leave_room_for_the_proof_of_a_member(run):
    """Anybody can sign two digests with 128 keys of its own: each is a proof that holds, of nobody."""
    members = {"QmLiar"}
    proofs = Proofs(run, lambda *said: True, members.__contains__)
    assert not proofs.hear([invented(f"Qm{number}") for number in range(MOST_PROOFS)]) and not proofs.all
    assert proofs.hear([invented("QmLiar")]) and proofs.reason("QmLiar")


def test_too_many_at_once_are_cut_to_what_a_message_holds(run):
    proofs = Proofs(run, lambda *said: True)
    assert proofs.hear([invented("Qm")]) and proofs.hear([invented(f"Qm{number}") for number in range(2 * MOST_PROOFS)])
    assert len(proofs.all) == MOST_PROOFS and proofs.all[0].accused == "Qm"


def test_where_they_are_too_many_those_whose_membership_has_ended_give_way(run):
    members = {f"Qm{number}" for number in range(MOST_PROOFS)}
    proofs = Proofs(run, lambda *said: True, members.__contains__)
    proofs.hear([invented(peer) for peer in sorted(members)])
    members |= {"QmLiar"}
    assert not proofs.hear([invented("QmLiar")]), "all of them are members still"
    members.discard("Qm7")
    assert proofs.hear([invented("QmLiar")]) and proofs.reason("QmLiar") and not proofs.reason("Qm7") and len(proofs.all) == MOST_PROOFS


def test_of_many_proofs_of_one_peer_one_is_looked_at(run):
    looked = []

    def signed(*said):
        looked.append(said)
        return False

    assert not Proofs(run, signed).hear([dataclasses.replace(invented("Qm"), group=f"g{number}") for number in range(100)])
    assert len(looked) == 1


def test_what_members_know_of_proofs_is_of_members(host, run, keys):
    liar, other = keys
    members = Members(run)
    assert not members.proofs.hear([proof(run, liar)]) and not members.proofs.reason(liar.peer_id)
    members.hear(liar.peer_id, sign_membership(host, run, liar.peer_id))
    assert members.proofs.hear([proof(run, liar), proof(run, other)]) and not members.proofs.reason(other.peer_id)
