"""Limits of one address, by the clock."""

import pytest

from datasetserver.limits import AT_ONCE, BODY_BYTES_AT_ONCE, Limits, subject
from datasetserver.refused import Refused
from tests.clock import Clock


def asks(limits, address, count=1):
    """How many of `count` requests, one after the other, are let through."""
    passed = 0
    for _ in range(count):
        try:
            with limits.admit(address):
                passed += 1
        except Refused as refused:
            assert (refused.status, refused.code) == (429, "too_many_requests")
            assert int(refused.headers["Retry-After"]) >= 1
    return passed


def test_a_burst_passes_then_only_the_rate_and_others_are_not_concerned():
    clock = Clock()
    limits = Limits(2.0, clock)
    assert asks(limits, "203.0.113.1", 50) == 20
    assert asks(limits, "203.0.113.2", 5) == 5
    clock.now += 3
    assert asks(limits, "203.0.113.1", 50) == 6
    clock.now += 1000
    assert asks(limits, "203.0.113.1", 50) == 20


def test_retry_after_is_when_one_more_passes():
    clock = Clock()
    limits = Limits(0.1, clock)
    assert asks(limits, "203.0.113.1") == 1
    with pytest.raises(Refused) as refused, limits.admit("203.0.113.1"):
        pass
    clock.now += int(refused.value.headers["Retry-After"])
    assert asks(limits, "203.0.113.1") == 1


def test_requests_and_body_bytes_at_once_are_bounded_and_come_back():
    limits = Limits(1000.0, Clock())
    open_ones = [limits.admit("2001:db8::1") for _ in range(AT_ONCE)]
    for one in open_ones:
        one.__enter__()
    assert asks(limits, "2001:db8::2") == 0, "the same /64"
    assert asks(limits, "2001:db8:0:1::2") == 1
    for one in open_ones:
        one.__exit__(None, None, None)
    assert asks(limits, "2001:db8::2") == 1
    with limits.admit("203.0.113.1", BODY_BYTES_AT_ONCE):
        with pytest.raises(Refused), limits.admit("203.0.113.1", 1):
            pass
        assert asks(limits, "203.0.113.1") == 1
    with limits.admit("203.0.113.1", 1):
        pass


def test_this_machine_is_not_limited_and_zero_means_no_limit():
    assert asks(Limits(1.0, Clock()), "127.0.0.1", 100) == asks(Limits(1.0, Clock()), "::ffff:127.0.0.1", 100) == 100
    assert asks(Limits(0.0, Clock()), "203.0.113.1", 100) == 100


def test_what_is_no_address_is_one_caller():
    assert subject("") == subject("unix") == "elsewhere"
    assert subject("203.0.113.9") == subject("::ffff:203.0.113.9") == "203.0.113.9"
    assert subject("fe80::1%eth0") == "fe80::/64"


def test_many_addresses_take_bounded_memory_and_the_busy_are_not_forgotten():
    limits = Limits(0.01, Clock())
    with limits.admit("198.51.100.1"):
        for number in range(21_000):
            asks(limits, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
        assert len(limits._callers) <= 20_001
        assert asks(limits, "198.51.100.1") == 0
