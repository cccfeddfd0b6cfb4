import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from swarm import protocol

LEASE = {"run_id": "0" * 16, "peer": "alice", "want_samples": 5}


def test_a_request_survives_its_way_over_the_wire():
    asked = protocol.ContributionRequest(run_id="a" * 16, peer="QmAlice", number=3, keys=["0:1:2", "4:5:6"])
    assert protocol.ContributionRequest.model_validate_json(asked.model_dump_json()) == asked


@pytest.mark.parametrize(
    "change",
    [
        {"surprise": 1},
        {"run_id": "0" * 15},
        {"run_id": "../" * 5 + "x"},
        {"peer": ""},
        {"peer": "a" * 129},
        {"peer": "a/b"},
        {"peer": "a\n"},
        {"want_samples": 0},
        {"want_samples": -1},
        {"want_samples": protocol.MAX_KEYS + 1},
        {"want_samples": "5"},
        {"want_samples": 5.5},
        {"want_samples": True},
    ],
)
def test_what_is_out_of_bounds_is_refused(change):
    with pytest.raises(ValidationError):
        protocol.LeaseRequest.model_validate_json(json.dumps({**LEASE, **change}))


@pytest.mark.parametrize("answer", [{"renew_every": 0.0}, {"renew_every": -5.0}, {"expires_in": 1e300}])
def test_no_server_has_its_peers_ask_without_a_pause(answer):
    with pytest.raises(ValidationError):
        protocol.RenewAnswer.model_validate_json(json.dumps({"renew_every": 20.0, "expires_in": 60.0, **answer}))


def test_no_host_has_its_peers_keep_a_shard_that_fills_their_disk():
    shard = {"epoch": 0, "shard": 0, "digest": "a" * 64, "bytes": (1 << 30) + 1, "samples": 1, "skip": []}
    with pytest.raises(ValidationError, match="bytes"):
        protocol.LeasedShard(**shard)


@pytest.mark.parametrize("key", ["", "1:2", "1:2:3:4", "-1:2:3", "a:b:c", "1:2:3\n", "1:2:" + "9" * 10, "1:2:３"])
def test_what_is_no_sample_key_is_refused(key):
    with pytest.raises(ValidationError):
        protocol.ReleaseRequest(run_id="0" * 16, peer="alice", keys=[key])


@given(st.integers(0, 300), st.integers(), st.integers(0, 5))
def test_shuffling_is_a_permutation_of_its_seed(count, seed, epoch):
    order = protocol.shuffled(count, seed, "units", epoch)
    assert sorted(order) == list(range(count))
    assert order == protocol.shuffled(count, seed, "units", epoch)


def test_shuffling_is_the_same_everywhere_and_for_ever():
    assert protocol.shuffled(10, 42, "units", 0) == GOLDEN
    assert protocol.shuffled(10, 42, "units", 1) != GOLDEN


GOLDEN = [1, 9, 0, 2, 4, 5, 6, 7, 8, 3]
