"""The row `two-faced` of `scripts/strangers`: what it counts, with the logs and files of a swarm that is not started."""

import os
from types import SimpleNamespace

import pytest

from scripts.attacks.band import Band
from scripts.attacks.rows import ROWS
from scripts.attacks.swarm import Swarm
from swarm.members import is_signed
from swarm.records import Membership
from swarm.run_config import RunConfig
from swarm.signing import HostKey

LIED = '{"event": "lied", "time": 100.0, "parent": "p", "members": []}\n'


def toy(folder, rounds, proven_at=None):
    (folder / "state").mkdir(parents=True)
    (folder / "rounds.jsonl").write_text("".join(f'{{"time": {at}, "digest": "d{at}"}}\n' for at in rounds))
    if proven_at is not None:
        path = folder / "state" / "proofs.json"
        path.write_text("[]")
        os.utime(path, (proven_at, proven_at))
    return SimpleNamespace(name=folder.name, folder=folder, memory_mib=lambda: 0.0, rounds=lambda: [{"time": at, "digest": f"d{at}"} for at in rounds])


def swarm_of(said, *toys):
    swarm = Swarm.__new__(Swarm)
    swarm.row, swarm.began, swarm._memory, swarm.newcomer, swarm.helper = ROWS["two-faced"], 90.0, 0.0, None, None
    swarm._toys, swarm.stranger = list(toys), SimpleNamespace(text=lambda: said)
    return swarm


def test_the_rounds_from_the_first_lie_to_the_last_proof_are_counted(tmp_path):
    times = range(91, 200, 2)
    one, two = toy(tmp_path / "one", times, 103.0), toy(tmp_path / "two", times, 109.0)
    swarm = swarm_of(LIED + LIED.replace("100", "104"), one, two)
    assert swarm.figures(200.0, 0.0)["banned_after_rounds"] == 4.0 and swarm._unproven() == []


def test_a_peer_without_a_proof_counts_to_the_end_and_is_named(tmp_path):
    one, two = toy(tmp_path / "one", range(91, 200, 2), 103.0), toy(tmp_path / "two", range(91, 200, 2))
    swarm = swarm_of(LIED, one, two)
    assert swarm.figures(200.0, 0.0)["banned_after_rounds"] == 50.0 and swarm._unproven() == ["two has no proof"]


def test_a_stranger_that_came_to_no_lie_shows_nothing(tmp_path):
    swarm = swarm_of('{"event": "arrived", "peers": []}\n', toy(tmp_path / "one", range(91, 200, 2)))
    assert swarm._unproven() == ["the stranger came to no lie"] and "banned_after_rounds" not in swarm.figures(200.0, 0.0)


@pytest.mark.parametrize("is_let_in", [True, False])
def test_a_stranger_is_a_member_where_the_host_has_let_it_in(tmp_path, is_let_in):
    key = HostKey(tmp_path / "host.key")
    run = RunConfig(model="x", members_of=key.public)
    band = Band("", tmp_path, None, None, host_key=tmp_path / "host.key" if is_let_in else None, run={"run_id": "r", "run": run.to_mapping()})
    stranger = SimpleNamespace(peer_id="QmStranger", membership=None)
    band._let_in(stranger)
    assert (stranger.membership is not None) is is_let_in
    assert not is_let_in or is_signed(run, "QmStranger", Membership(**stranger.membership))
