"""Links between namespaces: what the hub does to packets, by an exact clock; then real ones, where this machine allows them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import links
from benchmarks.links import Hub, Link, linked, wire_bytes
from swarm.errors import UserError
from tests.conftest import ROOT

real = pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/net/tun"), reason="needs root and /dev/net/tun")


def packet(size: int, target: int = 1) -> bytes:
    """`size` bytes of IPv4 for host `target`, behind an empty virtio header."""
    return bytes(links._HEADER.size) + b"\x45" + bytes(15) + bytes([10, 77, 0, target + 1]) + bytes(size - 20)


class Devices:
    """Files that stand for TUN devices: what the hub writes there has come to that host."""

    def __init__(self, folder, count: int):
        self._files = [(folder / str(number)).open("wb+", buffering=0) for number in range(count)]
        self.numbers = [file.fileno() for file in self._files]
        self._seen = [0] * count

    def came(self, host: int) -> int:
        """Packets of 1,000 bytes since the last call."""
        size, before = os.fstat(self.numbers[host]).st_size, self._seen[host]
        self._seen[host] = size
        return (size - before) // len(packet(1000))

    def close(self):
        for file in self._files:
            file.close()


@pytest.fixture
def devices(tmp_path):
    made = Devices(tmp_path, 3)
    yield made
    made.close()


def test_a_packet_takes_both_lines_and_the_delay(devices):
    hub = Hub(devices.numbers, Link(megabits=8, delay_ms=100))  # a megabyte a second
    hub._send(0.0, 0, 1, packet(1000))
    hub._move(0.1015)
    assert devices.came(1) == 0
    hub._move(0.1025)
    assert devices.came(1) == 1 and devices.came(0) == 0


def test_packets_queue_behind_each_other_and_a_full_queue_drops(devices):
    hub = Hub(devices.numbers, Link(megabits=8, delay_ms=0))
    for _ in range(300):
        hub._send(0.0, 0, 1, packet(1000))
    hub._move(0.1005)
    assert devices.came(1) == 99
    hub._move(1.0)
    carried = hub.traffic()
    passed = 99 + devices.came(1)
    assert passed in (200, 201) and carried.dropped == 300 - passed  # 0.2 s of a megabyte a second
    assert carried.megabytes == pytest.approx(passed / 1000)
    assert hub.traffic().megabytes == 0


def test_two_senders_share_the_receivers_line(devices):
    hub = Hub(devices.numbers, Link(megabits=8, delay_ms=0))
    for _ in range(50):
        hub._send(0.0, 0, 1, packet(1000))
        hub._send(0.0, 2, 1, packet(1000))
    hub._move(0.0515)
    assert devices.came(1) == 50
    hub._move(0.2)
    assert devices.came(1) == 50


def test_a_large_packet_counts_a_header_for_each_of_its_segments():
    header = links._HEADER.pack(0, 1, 52, 1348, 0, 0)
    assert wire_bytes(header + bytes(52 + 10 * 1348)) == 10 * 1400
    assert wire_bytes(packet(1400)) == 1400


def test_without_root_or_the_device_it_is_one_line(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="root"), linked(2):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with pytest.raises(UserError, match="/dev/net/tun"), linked(2):
        pass


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@real
def test_a_real_link_is_no_faster_than_it_says():
    link = Link(megabits=20, delay_ms=30)
    with linked(2, link) as net:
        net.traffic()
        began = time.monotonic()
        links._stream(net, [(0, 1)], 2)
        carried, seconds = net.traffic(), time.monotonic() - began
    # Over all of the time: what a late process finds waiting for it would make any part of it look faster. A twentieth: answers, the other way.
    assert 0 < 8 * carried.megabytes <= 1.05 * 20 * seconds
    figures = links.given(link, seconds=1)
    assert figures["megabits"] > 0 and figures["round_trip_ms"] >= 60
    assert f"{links._PREFIX}-{os.getpid()}-" not in namespaces()


@real
def test_what_runs_at_a_host_ends_with_it_also_after_an_error():
    with pytest.raises(RuntimeError), linked(2) as net:
        left = subprocess.Popen(net.command(1, ["sleep", "1000"]))
        subprocess.run(net.command(0, ["true"]), check=True)
        names = [host.namespace for host in net.hosts]
        assert all(name in namespaces() for name in names)
        raise RuntimeError
    assert left.wait(60) == -signal.SIGKILL
    assert not any(name in namespaces() for name in names)


@real
def test_namespaces_of_a_killed_benchmark_are_removed_by_the_next():
    program = "from benchmarks.links import linked\nwith linked(1) as net:\n    print(net.hosts[0].namespace, flush=True)\n    input()"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        name = killed.stdout.readline().strip()
        killed.kill()
    assert name and name in namespaces()
    with linked(1):
        assert name not in namespaces()


@real
def test_hosts_that_each_send_to_the_next_without_limit_have_a_ceiling():
    assert links.ceiling(3, seconds=0.5) > 0


def test_the_ceiling_is_printed_as_json(monkeypatch, capsys):
    monkeypatch.setattr(links, "ceiling", lambda count: 1000 / count)
    monkeypatch.setattr(links, "given", lambda link: {"megabits": 0.9 * link.megabits, "round_trip_ms": 2 * link.delay_ms})
    links.main([])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    ceilings = {"ceiling_megabits_2": 500.0, "ceiling_megabits_4": 250.0, "ceiling_megabits_8": 125.0}
    assert figures == {**ceilings, "megabits": 90.0, "round_trip_ms": 80.0}
