"""The arithmetic of links and rounds, against counting by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.advice import UTILISATION, Traffic, duration, measured, promise, round_traffic, share_lost, size, smallest_target


def count_by_hand(wire_bytes: int, peers: int, reducers: int, peer: int) -> tuple[float, float]:
    """Every message of the all-reduce, one by one: peers 0..reducers-1 reduce a slice each."""
    up = down = 0.0
    part = wire_bytes / reducers
    for sender in range(peers):
        for reducer in range(reducers):
            if sender != reducer:
                for source, target in ((sender, reducer), (reducer, sender)):  # the slice there, its average back
                    up += part * (source == peer)
                    down += part * (target == peer)
    return up, down


@given(st.integers(2, 8), st.integers(1, 8), st.integers(0, 7))
def test_the_traffic_is_what_counting_the_messages_gives(peers, reducers, peer):
    reducers, peer = min(reducers, peers), min(peer, peers - 1)
    traffic = round_traffic(1000, peers, reducers, reduces=peer < reducers)
    assert (traffic.up, traffic.down) == pytest.approx(count_by_hand(1000, peers, reducers, peer))


def test_a_swarm_of_one_sends_nothing():
    assert round_traffic(1000, 1, 1) == Traffic(0, 0)


def test_the_slower_direction_decides():
    assert Traffic(100, 100).seconds(10, 100) == 10
    assert Traffic(100, 100).seconds(100, 10) == 10
    assert Traffic(100, 100).seconds(0, 10) == math.inf


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.booleans())
def test_a_round_of_the_recommended_size_reaches_the_utilisation_and_a_much_smaller_one_does_not(seconds, rate, overlap):
    target = smallest_target(seconds, rate, overlap)
    assert share_lost(seconds, target / rate, overlap) <= 1 - UTILISATION + 1e-9
    if target > 100:
        assert share_lost(seconds, 0.9 * target / rate, overlap) > 1 - UTILISATION


def test_with_overlap_a_round_longer_than_its_transfer_costs_nothing():
    assert share_lost(10, 11, overlap=True) == 0
    assert share_lost(10, 10, overlap=False) == 0.5


def test_what_a_round_will_cost_is_said_before_anything_is_measured():
    assert (
        promise(1.966e9)
        == "averaging sends and receives up to 3.93 GB each a round: 52 min at 10 Mbit/s, 5 min at 100 Mbit/s, 31 s at 1,000 Mbit/s"
    )


def test_what_a_round_cost_is_said_with_the_round_that_would_be_worth_it():
    told = measured(Traffic(500e6, 250e6), 40.0, 4.0, 0.125)
    assert told.startswith("averaging took 40 s: sent 500 MB at 100 Mbit/s, received 250 MB at 50; 12.5% of the time is lost to rounds;")
    assert told.endswith("for 95% training, rounds of 3,040 samples or more (152 with --overlap)")
    assert "rounds of" not in measured(Traffic(500e6, 250e6), 40.0, 0.0, 0.0)


def test_figures_are_written_for_people():
    assert [size(n) for n in (12, 2_300, 4_930_000, 1_520_000_000)] == ["12 bytes", "2.3 kB", "4.93 MB", "1.52 GB"]
    assert [duration(n) for n in (0.003, 0.25, 24, 600)] == ["less than 0.1 s", "0.2 s", "24 s", "10 min"]
