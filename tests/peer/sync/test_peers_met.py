"""The file by which a peer finds the others again."""

import pytest

from peer.sync.engine.net.peers_met import PeersMet
from swarm import files

ALICE, BOB = (f"/ip4/8.8.4.4/tcp/{port}/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5{letter}" for port, letter in ((1000, "N"), (2000, "P")))


def test_the_file_is_written_when_a_peer_comes_or_moves_and_not_in_between(tmp_path):
    met, seen = PeersMet(tmp_path), []
    for addresses in ([], [(ALICE,)], [(ALICE,)], [(ALICE,), (BOB,)], [(ALICE,), (BOB,)], []):
        met.write(addresses)
        seen.append(files.version(tmp_path / "peers_met.json"))
    nothing, one, still_one, two, *still_two = seen
    assert nothing is None and None is not one == still_one != two == still_two[0] == still_two[1]
    assert PeersMet(tmp_path).read() == [[ALICE], [BOB]], "and a peer that knows nobody any more leaves the file"


def test_what_the_disk_refused_is_written_later(tmp_path):
    met = PeersMet(tmp_path / "there")
    met.write([(ALICE,)])
    assert PeersMet(tmp_path / "there").read() == []
    (tmp_path / "there").mkdir()
    met.write([(ALICE,)])
    assert PeersMet(tmp_path / "there").read() == [[ALICE]]


@pytest.mark.parametrize("text", ["", "7", "[7]", '["no address"]', '[["/ip4/8.8.4.4/tcp/1000"]]', "\0"])
def test_a_file_that_is_not_ours_is_nobody(tmp_path, text):
    (tmp_path / "peers_met.json").write_text(text)
    assert PeersMet(tmp_path).read() == []
