"""How slow the ends of a download may be."""

import random

import pytest

from peer.sync.engine.transfer.pace import FETCH_SECONDS, Credit, fetch_seconds
from tests.clock import Clock


def steady(bytes_per_second: float, seconds: int, *, rate=1000.0, first=10.0, most=60.0, share=1) -> Credit:
    """What is left of the credit of an end that kept us waiting all the time, and moved bytes once a second."""
    clock = Clock()
    credit = Credit(clock, rate, first, most)
    credit.wait()
    for clock.now in range(1, seconds + 1):
        credit.moved(int(bytes_per_second), share)
    return credit


def test_an_end_at_the_rate_never_runs_out_and_a_slower_one_does():
    assert steady(1000, 500).seconds == pytest.approx(10)
    assert steady(900, 99).seconds > 0 >= steady(900, 101).seconds
    assert steady(300, 500, share=4).seconds > 0, "four that reach the rate together"


def test_having_been_fast_is_saved_up_for_a_minute_and_not_for_hours():
    assert steady(10**6, 1000).seconds == 60


def test_time_in_which_nobody_waits_for_the_other_end_does_not_count():
    clock, rng = Clock(), random.Random(1)
    credit = Credit(clock, 1000.0, 10.0, 60.0)
    for _ in range(100):
        credit.rest()
        clock.now += rng.uniform(0, 100)
        credit.wait()
        clock.now += 0.05
    assert credit.seconds == pytest.approx(5)


def test_a_state_may_take_its_bytes_at_the_stated_rate_and_less_while_others_offer_another():
    assert fetch_seconds(0, contested=False) == FETCH_SECONDS
    assert fetch_seconds(125 * 10**6, contested=False) == FETCH_SECONDS + 1000
    assert fetch_seconds(125 * 10**6, contested=True) == FETCH_SECONDS + 100
