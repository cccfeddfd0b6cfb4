"""What a full node keeps."""

import random

from hivemind.dht.routing import DHTID

from swarm.dht_storage import BYTES_OF_A_KEY, BYTES_OF_OTHER_KEYS, MOST_OF_A_KEY, MOST_OF_AN_OWNER, MOST_OTHER_KEYS, RecordStore
from tests.clock import Clock

OURS, OTHER = DHTID.generate(source="ours"), DHTID.generate(source="other")
LIFE = 20.0


def a_store(monkeypatch) -> tuple[RecordStore, Clock]:
    clock = Clock(1e9)
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", clock)
    kept = RecordStore(clock)
    kept.reserve(OURS)
    return kept, clock


def owners(kept: RecordStore, key: DHTID) -> set[bytes]:
    found = kept.get(key)
    return set(dict(found.value.items())) if found else set()


def flood(kept: RecordStore, key: DHTID, clock: Clock, seed: int, count: int = 2 * MOST_OF_A_KEY) -> int:
    """How many invented identities, each with a record of its own, were taken."""
    rng = random.Random(seed)
    return sum(kept.store(key, rng.randbytes(1700), clock.now + LIFE, subkey=rng.randbytes(300)) for _ in range(count))


def test_a_flood_pushes_nobody_out_and_those_who_are_here_renew(monkeypatch):
    kept, clock = a_store(monkeypatch)
    honest = [f"honest {number}".encode() for number in range(5)]
    for second in range(60):
        assert all(kept.store(OURS, b"%d" % second, clock.now + LIFE, subkey=owner) for owner in honest)
        flood(kept, OURS, clock, seed=second, count=200)
        clock.now += 1
    assert owners(kept, OURS) >= set(honest) and len(kept) <= MOST_OF_A_KEY and kept.num_bytes <= BYTES_OF_A_KEY
    assert not kept.store(OURS, b"x", clock.now + LIFE, subkey=b"newcomer"), "promised to those who are here, not to those who come"


def test_a_known_peer_and_we_ourselves_have_a_place_in_a_full_key(monkeypatch):
    kept, clock = a_store(monkeypatch)
    kept.ours, kept.is_known = b"me", lambda owner: owner == b"friend"
    assert 0 < flood(kept, OURS, clock, seed=1) <= MOST_OF_A_KEY
    full = len(kept)
    assert kept.store(OURS, b"x" * 1000, clock.now + LIFE, subkey=b"friend") and len(kept) == full
    assert kept.store(OURS, b"x" * 1000, clock.now + LIFE, subkey=b"me")
    assert not kept.store(OURS, b"x" * 1000, clock.now + LIFE, subkey=b"stranger")
    assert {b"friend", b"me"} <= owners(kept, OURS)


def test_a_known_peer_that_has_too_many_records_or_too_large_a_one_takes_nobodys_place(monkeypatch):
    kept, clock = a_store(monkeypatch)
    kept.is_known = lambda owner: owner == b"friend"
    for number in range(MOST_OF_AN_OWNER):
        assert kept.store(DHTID.generate(source=f"run {number}"), b"x", clock.now + LIFE, subkey=b"friend")
    flood(kept, OURS, clock, seed=1)
    before = owners(kept, OURS)
    assert not kept.store(OURS, b"x", clock.now + LIFE, subkey=b"friend") and owners(kept, OURS) == before
    kept.is_known = lambda owner: owner == b"other"
    assert not kept.store(OURS, bytes(BYTES_OF_A_KEY), clock.now + LIFE, subkey=b"other") and owners(kept, OURS) == before
    assert kept.store(OURS, bytes(1000), clock.now + LIFE, subkey=b"other") and b"other" in owners(kept, OURS)


def test_other_runs_have_so_many_bytes_and_keys_and_never_those_of_ours(monkeypatch):
    kept, clock = a_store(monkeypatch)
    rng = random.Random(2)
    for number in range(200):
        flood(kept, DHTID.generate(source=f"made up {number}"), clock, seed=number, count=40)
    keys = [key for key, _ in kept.items()]
    assert len(keys) <= MOST_OTHER_KEYS and kept.num_bytes <= BYTES_OF_OTHER_KEYS
    assert kept.store(OURS, rng.randbytes(1700), clock.now + LIFE, subkey=b"honest")


def test_what_is_over_is_dropped_and_makes_room(monkeypatch):
    kept, clock = a_store(monkeypatch)
    assert flood(kept, OURS, clock, seed=3) > 0
    clock.now += LIFE + 2
    assert kept.get(OURS) is None
    assert kept.store(OURS, b"x", clock.now + LIFE, subkey=b"honest") and len(kept) == 1
    assert not kept.store(OURS, b"y", clock.now + LIFE, subkey=b"honest"), "not newer"
    assert not kept.store(OURS, b"y", clock.now - 1, subkey=b"late") and not kept.store(OURS, b"y", clock.now + LIFE)


def test_what_came_while_the_clock_was_ahead_is_forgotten_once_it_is_right(monkeypatch):
    """It would have outlived its owners by as much, kept their places, and refused their renewals."""
    kept, clock = a_store(monkeypatch)
    clock.now += 3600
    flood(kept, OURS, clock, seed=3)
    assert kept.store(OTHER, b"x", clock.now + LIFE, subkey=b"we")
    clock.now -= 3600
    assert kept.store(OTHER, b"y", clock.now + LIFE, subkey=b"we") and kept.store(OURS, b"x", clock.now + LIFE, subkey=b"honest") and len(kept) == 2


def test_what_is_merged_into_an_answer_does_not_come_into_the_store(monkeypatch):
    """hivemind merges the answers of others into the first dictionary that it has, which was the node's own."""
    kept, clock = a_store(monkeypatch)
    kept.store(OURS, b"x", clock.now + LIFE, subkey=b"honest")
    kept.get(OURS).value.store(b"stranger", b"y", clock.now + LIFE)
    assert owners(kept, OURS) == {b"honest"}
