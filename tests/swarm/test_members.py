"""A membership is the host's word for one peer, one run and a week; a ban comes before it."""

import dataclasses
import random

import pytest

from swarm import members
from swarm.bans import Bans, sign_word
from swarm.end import End
from swarm.members import LIFE_SECONDS, NOT_A_MEMBER, Members, is_signed, read_membership, said, sign_membership
from swarm.records import Membership
from swarm.run_config import RunConfig
from swarm.signing import MOST_SIGNATURE, HostKey
from tests.clock import Clock

SEED = 23


@pytest.fixture
def run(key):
    return RunConfig(model="x", members_of=key.public)


def test_a_peer_is_a_member_from_the_hosts_word_until_it_ends_and_with_a_newer_one_again(key, run):
    wall = Clock(1.7e9)
    known = Members(run, wall=wall)
    assert known.needed and known.refusal("a") == NOT_A_MEMBER
    first = sign_membership(key, run, "a", wall)
    known.hear("a", first)
    assert known.refusal("a") == "" and known.refusal("b") == NOT_A_MEMBER
    wall.now += LIFE_SECONDS - 1
    assert known.refusal("a") == ""
    wall.now += 1
    known.hear("a", first)
    assert known.refusal("a") == NOT_A_MEMBER
    known.hear("a", sign_membership(key, run, "a", wall))
    known.hear("a", first)  # an older one takes nothing away
    assert known.refusal("a") == ""


def test_what_is_countersigned_counts_for_ten_minutes_and_not_before_its_time(key, run):
    """A server whose clock was a day ahead would else have it count for a day."""
    wall = Clock(1.7e9)
    known, at = Members(run, Bans(run), wall=wall), wall.now
    assert known.bans.hear([sign_word(key, run, "a" * 64, trusted=True, clock=lambda: at)])
    counts = []
    for seconds in (-3600, -59, 0, 599, 601):
        wall.now = at + seconds
        counts.append(known.countersigned != "")
    assert counts == [False, True, True, True, False]


def test_the_word_of_another_key_or_for_another_peer_run_or_time_is_none(key, run, tmp_path):
    good, wall = sign_membership(key, run, "a"), Clock(1.7e9)
    other_run = dataclasses.replace(run, seed=run.seed + 1)
    forged = [
        sign_membership(HostKey(tmp_path / "other.key"), run, "a"),
        sign_membership(key, other_run, "a"),
        sign_membership(key, run, "b"),
        dataclasses.replace(good, until=good.until + 1),
        dataclasses.replace(good, signature=""),
        dataclasses.replace(good, signature="zz"),
        dataclasses.replace(good, signature=key.sign("ban", members._digest(run.digest, "a", good.until))),
    ]
    known = Members(run, wall=wall)
    for shown in [*forged, None]:
        known.hear("a", shown)
        assert known.refusal("a") == NOT_A_MEMBER, shown
    assert is_signed(run, "a", good) and not any(is_signed(run, "a", shown) for shown in forged)


def test_a_ban_comes_before_a_membership(key, run):
    bans = Bans(run, key.public, [sign_word(key, run, "a", banned=True, reason="it lies")])
    known = Members(run, bans)
    known.hear("a", sign_membership(key, run, "a"))
    assert known.refusal("a") == "you are banned by the host: it lies"
    bans.hear([sign_word(key, run, "a", banned=False, clock=lambda: 4e9)])
    assert known.refusal("a") == ""


def test_the_hosts_words_count_in_its_run_for_members_also_where_nobody_named_its_key(key, run):
    """A peer that starts while the server is away knows the run alone."""
    bans, end = Bans(run), End(dataclasses.replace(run, total_samples=100))
    bans.hear([sign_word(key, run, "a", banned=True)])
    assert bans.peers() == {"a"} and end.host_key == key.public
    assert not Bans(RunConfig(model="x")).hear([sign_word(key, RunConfig(model="x"), "a", banned=True)])


def test_a_run_for_everybody_asks_nobody_for_a_membership(key):
    known = Members(RunConfig(model="x"))
    assert not known.needed and known.refusal("a") == "" and not known.has_ended()


def test_a_peers_own_ends_with_its_time(key, run):
    wall = Clock(1.7e9)
    known = Members(run, wall=wall)
    assert known.has_ended()
    known.own = sign_membership(key, run, "me", wall)
    assert not known.has_ended()
    wall.now += LIFE_SECONDS
    assert known.has_ended()


def test_a_signature_is_verified_once_for_all_records_that_bring_it(key, run, monkeypatch):
    checked = []
    monkeypatch.setattr(members, "check_signature", lambda *words: checked.append(words))
    members._is_signed.cache_clear()
    shown = sign_membership(key, run, "a")
    for known in (Members(run), Members(run)):
        for _ in range(3):
            known.hear("a", shown)
    members._is_signed.cache_clear()
    assert len(checked) == 1


def test_what_is_remembered_of_members_has_a_bound_and_those_whose_time_ends_first_go_first(key, run, monkeypatch):
    monkeypatch.setattr(members, "_MOST_REMEMBERED", 3)
    wall = Clock(1.7e9)
    known = Members(run, wall=wall)
    for name in "dcba":
        known.hear(name, sign_membership(key, run, name, wall))
        wall.now += 1
    assert [known.refusal(name) for name in "abc"] == ["", "", ""] and known.refusal("d") == NOT_A_MEMBER


def test_what_is_no_membership_is_read_as_none(key, run):
    shown = sign_membership(key, run, "a")
    assert read_membership(said(shown)) == shown and said(None) is None and read_membership(None) is None
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    values = [None, True, -1, 1.5, "x", "x" * (MOST_SIGNATURE + 1), "\n", [], {}, 1 << 60, float("nan")]
    for _ in range(500):
        broken = {**said(shown), rng.choice(["until", "signature"]): rng.choice(values)}
        found = read_membership(broken)
        assert found is None or isinstance(found, Membership)
        assert found is None or not is_signed(run, "a", found)
    assert read_membership({"until": shown.until}) is None and read_membership([shown.until]) is None
