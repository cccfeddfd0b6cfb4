"""A peer draws its lot for a state once: its key makes one, and others can tell it from all else that the key signs."""

import base64

import pytest

from swarm.dht import SwarmNode
from swarm.identity import Identity
from swarm.peer_key import PeerKey, has_signed, is_lot

SAID = b"distributed-diffusion check 0f"


@pytest.fixture(scope="module")
def keys():
    return [PeerKey.draw() for _ in range(2)]


def respelt(text):
    """The same bytes: the last character of a base64 text holds four bits that count for nothing."""
    return text[:-3] + chr(ord(text[-3]) + 1) + text[-2:]


def test_a_key_draws_the_same_lot_each_time_and_signs_otherwise_each_time(keys):
    one, other = keys
    lot = one.lot(SAID)
    assert lot == one.lot(SAID) != other.lot(SAID) and one.lot(SAID + b"0") != lot
    assert is_lot(one.peer_id, SAID, one.public, lot)
    assert one.sign(SAID) != one.sign(SAID), "who could choose among signatures would draw until it likes the lot"


def test_nothing_else_is_a_lot(keys):
    one, other = keys
    lot = one.lot(SAID)
    assert base64.b64decode(respelt(lot)) == base64.b64decode(lot) and respelt(lot) != lot
    for name, said in {
        "a signature": one.sign(SAID), "another's": other.lot(SAID), "of something else": one.lot(b"x"), "in another spelling": respelt(lot),
        "cut": lot[:-4], "none": "", "no base64": "?",
    }.items():  # fmt: skip
        assert not is_lot(one.peer_id, SAID, one.public, said), name
    assert not is_lot(other.peer_id, SAID, one.public, lot) and not is_lot(one.peer_id, SAID, other.public, lot)
    assert not has_signed(one.peer_id, SAID, one.public, lot), "nor is a lot a signature"


def test_a_node_draws_with_the_key_of_its_identity(tmp_path):
    node = SwarmNode.__new__(SwarmNode)
    node._identity = Identity(tmp_path / "identity.key")
    node.peer_id = node._identity.peer_id
    try:
        assert node.is_lot(node.peer_id, SAID, node.key_of(node.peer_id), node.lot(SAID))
    finally:
        node._identity.close()
