"""Signatures of requests, with clocks passed in: near in time, once each, and no more remembered than there is room for."""

from types import SimpleNamespace

import pytest

from datasetserver.refused import Refused
from datasetserver.signed import Signatures
from swarm.signed_request import SERVER_TIME_HEADER, WINDOW_SECONDS, Signer
from tests.clock import Clock
from tests.datasetserver.test_book import refusal
from tests.identities import id_of, key


@pytest.fixture
def clock():
    return Clock(1e9)


@pytest.fixture
def ask(clock):
    """ask(signatures, signer): one request of alice's, signed anew; its headers."""

    def ask(signatures, signer, headers=None):
        headers = headers or signer.headers("POST", "/v1/leases", b"{}")
        signatures.check(id_of("alice"), "POST", "/v1/leases", headers, b"{}")
        return headers

    return ask


def test_a_request_is_taken_once_also_when_its_memory_was_pruned(clock, ask):
    signatures, signer = Signatures(clock), Signer(key("alice"), clock)
    first = ask(signatures, signer)
    for step in (0, WINDOW_SECONDS, 2 * WINDOW_SECONDS, 1):
        clock.now += step
        ask(signatures, signer)
        with pytest.raises(Refused, check=lambda refused: refused.code in ("replayed", "clock_differs")):
            ask(signatures, signer, first)
    clock.now += 10 * WINDOW_SECONDS
    ask(signatures, signer)
    assert len(signatures._seen) == 1


def test_what_was_signed_ahead_of_time_is_remembered_for_as_long_as_it_would_be_taken(clock, ask):
    signatures = Signatures(clock)
    ahead = ask(signatures, Signer(key("alice"), lambda: clock.now + WINDOW_SECONDS - 1))
    clock.now += 2 * WINDOW_SECONDS - 2
    ask(signatures, Signer(key("alice"), clock))
    with refusal("replayed"):
        ask(signatures, None, ahead)


def test_a_restart_takes_nothing_from_before(clock, ask):
    before = ask(Signatures(clock), Signer(key("alice"), clock))
    clock.now += 0.5
    with refusal("clock_differs"):
        ask(Signatures(clock), None, before)


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_wall_clock_that_is_set_refuses_nobody_for_long_and_lets_no_copy_in(clock, ask, monkeypatch, jump):
    ticks = Clock(1e9)
    monkeypatch.setattr("datasetserver.signed.time", SimpleNamespace(time=clock, monotonic=ticks))
    signatures = Signatures(most=2)
    first = ask(signatures, Signer(key("alice"), clock))
    clock.now += jump
    signer = Signer(key("alice"), clock)
    with refusal("clock_differs") as refused:
        ask(signatures, signer)
    assert signer.learn(refused.value.headers)
    for _ in range(5):
        ticks.now += 3 * WINDOW_SECONDS
        clock.now += 3 * WINDOW_SECONDS
        ask(signatures, signer)
    clock.now = 1e9
    with refusal("clock_differs"):
        ask(signatures, None, first)


@pytest.mark.parametrize("off", [-1e8, -WINDOW_SECONDS - 1, WINDOW_SECONDS + 1, 1e8])
def test_a_peer_with_a_wrong_clock_learns_the_servers(clock, ask, off):
    signatures, signer = Signatures(clock), Signer(key("alice"), lambda: clock.now + off)
    with refusal("clock_differs") as refused:
        ask(signatures, signer)
    assert signer.learn(refused.value.headers)
    clock.now += 5
    ask(signatures, signer)
    ask(signatures, signer)


@pytest.mark.parametrize("said", ["", "now", "nan", "inf", "1e300"])
def test_a_server_that_says_no_time_changes_no_clock(clock, ask, said):
    signer = Signer(key("alice"), clock)
    assert not signer.learn({SERVER_TIME_HEADER: said})
    ask(Signatures(clock), signer)


@pytest.mark.parametrize("at", ["nan", "inf", "-1", "x", "1" * 400])
def test_a_time_that_is_none_is_refused(clock, ask, at):
    headers = {**Signer(key("alice"), clock).headers("POST", "/v1/leases", b"{}"), "X-Peer-Time": at}
    with refusal("clock_differs"):
        ask(Signatures(clock), None, headers)


def test_when_there_is_no_room_to_remember_nothing_is_taken(clock, ask):
    signatures, signer = Signatures(clock, most=3), Signer(key("alice"), clock)
    for _ in range(3):
        ask(signatures, signer)
    with refusal("busy"):
        ask(signatures, signer)
    clock.now += 3 * WINDOW_SECONDS
    ask(signatures, signer)
