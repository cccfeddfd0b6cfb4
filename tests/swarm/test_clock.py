import logging
import random
import statistics

import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2PContext
from hivemind.proto import dht_pb2

from swarm import clock
from swarm.clock import SwarmClock, check_clock, clock_error
from swarm.errors import ExitCode, UserError


def test_a_clock_is_wrong_only_by_what_the_answers_travel_cannot_explain():
    assert clock_error(105.0, 100.0, 110.0) == 0
    assert clock_error(117.0, 100.0, 110.0) == 7
    assert clock_error(96.0, 100.0, 110.0) == -4


def test_a_wrong_clock_is_warned_of_and_refused_where_the_swarm_would_refuse_it(caplog):
    caplog.set_level(logging.WARNING, "swarm.clock")
    check_clock(1.0, "the server", refuse=True)
    assert not caplog.records
    check_clock(-2.5, "the server", refuse=True)
    check_clock(900.0, "the server", refuse=False)  # of a run in which nothing is averaged
    assert "2.5 s ahead of that of the server" in caplog.messages[0] and "900.0 s behind" in caplog.messages[1]
    with pytest.raises(UserError, match=r"clock is 3\.5 s behind that of the server") as refused:
        check_clock(3.5, "the server", refuse=True)
    assert refused.value.code == ExitCode.CLOCK


def test_the_records_of_most_peers_show_a_wrong_clock_once():
    swarm, now = SwarmClock(), 1000.0
    assert swarm.look([], now) == swarm.look([now - 9, now - 1, now + 60], now) == ""  # one of three is wrong: it is not ours
    assert "8.0 s behind that of 2 peers" in swarm.look([now + 8, now + 8], now)
    assert swarm.look([now + 8], now) == ""
    assert swarm.look([now - 1], now) == ""
    assert "20.0 s ahead of" in swarm.look([now - 30], now)


def test_a_clock_is_as_wrong_as_the_median_of_what_the_records_show():
    rng = random.Random(5)
    for _ in range(300):
        signed = [rng.uniform(-30, 12) for _ in range(rng.randrange(1, 8))]
        error = statistics.median(difference if difference > 0 else min(difference + 10, 0) for difference in signed)
        assert bool(SwarmClock().look(signed, 0.0)) == (abs(error) > clock.WARN_IN_SWARM_SECONDS)


def test_peers_that_refuse_our_clock_are_a_circumstance_of_its_own(nodes, monkeypatch):
    async def scenario(start):
        one = await start("one")
        monkeypatch.setattr("hivemind.dht.protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS", -1000.0)
        with pytest.raises(UserError, match="refuse this machine's clock") as refused:
            await start("two", initial_peers=await one.maddrs())
        assert refused.value.code == ExitCode.CLOCK and clock.FIX in str(refused.value)

    nodes(scenario)


def test_a_peer_that_is_not_called_back_at_once_tries_again(nodes, monkeypatch, caplog):
    """It was told to set its clock, and ended: hivemind raises one error for both."""
    ask, calls = DHTProtocol.rpc_ping, []

    async def deaf_at_first(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        calls.append(request.validate)
        response = await ask(self, request, context)
        if calls.count(True) == 1:
            response.available = False
        return response

    async def scenario(start):
        monkeypatch.setattr(DHTProtocol, "rpc_ping", deaf_at_first)
        one = await start("one")
        await start("two", initial_peers=await one.maddrs())

    nodes(scenario)
    assert calls.count(True) >= 2 and "cannot call this one back" in caplog.text
