"""The modelled network: what streams promise must hold there, too."""

import random
from types import SimpleNamespace

from simulation.network import SERVER, Host, Link, Network, SimPipe


class Timers:
    """A loop, as far as the network needs one."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def time(self):
        return self.now

    def call_at(self, when, call, *args, context=None):
        self.calls.append((when, len(self.calls), call, args))

    def run(self, until):
        while (due := min(self.calls, default=None)) is not None and due[0] <= until:
            self.calls.remove(due)
            self.now = due[0]
            due[2](*due[3])
        self.now = until


def test_nothing_overtakes_in_a_stream_while_it_waits_for_the_end_of_a_partition():
    """Seed 14000172: two parts of a mean came in the other order, and a member had another mean than the reducer."""
    loop = Timers()
    network = Network(loop, random.Random(1))
    hosts = [Host(name, Link(100.0, 100.0, 0.02), owner=SimpleNamespace()) for name in "ab"]
    network.hosts = {host.peer: host for host in hosts}
    here, there = (SimPipe(network, host) for host in hosts)
    here.other, there.other = there, here
    for number in range(40):
        network.carry(here, bytes([number]))
        loop.now += 0.1
    network.hang_up(here)
    network.sides = {"a": 1}
    loop.run(17.0)
    assert not there._data
    network.sides = {}
    loop.run(30.0)
    assert bytes(there._data) == bytes(range(40)) and there._ended


def test_the_end_of_a_partition_ends_no_other_one():
    network = Network(Timers(), random.Random(1))
    first, nobodys = network.part(["a", "b"]), network.part([])
    second = network.part(["b", "c", SERVER])

    def together():
        return {one + other for one in "abcd" for other in "abcd" if one < other and not network.parted(one, other)}, {*filter(network.reaches_server, "abcd")}

    assert together() == (set(), {"c"})
    network.heal(nobodys)
    network.heal(first)
    assert together() == ({"bc", "ad"}, {"b", "c"})
    network.heal(second)
    assert together() == ({"ab", "ac", "ad", "bc", "bd", "cd"}, {*"abcd"})
