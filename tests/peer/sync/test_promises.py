"""For whom a newcomer waits."""

import pytest

from peer.sync.engine.transfer.promises import REFUSING_SECONDS, UNASKED_SECONDS, Promises
from tests.clock import Clock


def test_one_that_failed_three_times_or_lied_once_counts_no_more_until_it_gives_a_state():
    promises = Promises(Clock())
    promises.asked(["slow", "liar"])
    promises.broken("slow")
    promises.broken("slow")
    promises.broken("liar", lied=True)
    assert promises.counts("slow") and not promises.counts("liar")
    promises.broken("slow")
    assert not promises.counts("slow")
    promises.kept(["slow"])
    assert promises.counts("slow")


def test_one_that_says_it_is_busy_counts_for_half_an_hour():
    clock = Clock()
    promises = Promises(clock)
    promises.asked(["busy"])
    clock.now = REFUSING_SECONDS - 1
    promises.asked(["busy"])
    assert promises.counts("busy")
    clock.now += 1
    assert not promises.counts("busy")


def test_one_that_is_not_worth_asking_counts_for_a_minute():
    clock = Clock()
    promises = Promises(clock)
    assert promises.counts("incredible")
    clock.now = UNASKED_SECONDS
    assert not promises.counts("incredible")
    promises.asked(["incredible"])
    assert promises.counts("incredible")


@pytest.mark.parametrize("strangers", [5000])
def test_what_is_remembered_is_bounded(strangers):
    promises = Promises(Clock())
    assert all(promises.counts(f"stranger{number}") for number in range(strangers))
    assert len(promises._promises) <= 1024
