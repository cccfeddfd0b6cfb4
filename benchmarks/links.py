"""Hosts on this machine joined by links of a given rate and delay: network namespaces, and a hub between them in user space.

    with linked(4, Link(megabits=100, delay_ms=40)) as net:
        subprocess.Popen(net.command(0, [sys.executable, "-m", "something", net.hosts[1].address]))

Every host has a line of its own to a hub that is never full: `megabits` up, `megabits` down, `delay_ms` from host to host. A full queue
drops. Needs root and /dev/net/tun (Linux); nothing leaves the namespaces. Not promised: losses, jitter, or that a busy machine keeps
time, so ask `Net.traffic()` how late the hub was, and compare with `ceiling()`.

    .venv/bin/python -m benchmarks.links        prints the ceiling, and what a link of 100 Mbit/s and 40 ms really gives
"""

import contextlib
import fcntl
import heapq
import itertools
import json
import math
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.common import ROOT, argument_parser
from swarm.errors import UserError, run_program
from swarm.lifeline import die_with_parent

MTU = 1400
QUEUE_SECONDS = 0.2
"""What a line holds before it drops: 2.5 MB at 100 Mbit/s, as home routers do."""
_PREFIX = "ddlink"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x1, 0x2
_HEADER = struct.Struct("=BBHHHH")
"""virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset."""


@dataclass(frozen=True)
class Link:
    """A host's line. megabits: per second and direction, inf: as fast as this machine can. delay_ms: one way, host to host."""

    megabits: float = 100.0
    delay_ms: float = 40.0


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str


@dataclass(frozen=True)
class Traffic:
    """What the hub carried since it was last asked. late_ms: by how much 99 of 100 packets came later than they should, at most."""

    megabytes: float
    busiest_megabits: float
    """Through the whole hub in its busiest second, per second."""
    dropped: int
    late_ms: float
    cpu_seconds: float


class Net:
    """Hosts that are joined; made by `linked`."""

    def __init__(self, hosts: Sequence[Host], hub: subprocess.Popen):
        self.hosts, self._hub = hosts, hub

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command`, to be run at a host."""
        return ["ip", "netns", "exec", self.hosts[host].namespace, *command]

    def traffic(self) -> Traffic:
        self._hub.stdin.write("\n")
        self._hub.stdin.flush()
        return Traffic(**json.loads(self._hub.stdout.readline()))


@contextlib.contextmanager
def linked(count: int, link: Link = Link()) -> Iterator[Net]:
    """`count` hosts, each with the line `link`; ends whatever still runs at them. Raises UserError where it cannot be made."""
    _check_able(count)
    _remove_stale()
    hosts = [Host(f"{_PREFIX}-{os.getpid()}-{next(_serial)}", f"10.77.0.{i + 1}") for i in range(count)]
    devices, hub = [], None
    try:
        for host in hosts:
            devices.append(_open_device(host))
        hub = _start_hub(devices, link)
        net = Net(hosts, hub)
        net.traffic()  # answered once it runs
        yield net
    finally:
        if hub is not None:
            hub.kill()
            hub.communicate()
        for device in devices:
            os.close(device)
        for host in hosts:
            _remove(host.namespace)


def ceiling(count: int = 2, seconds: float = 3.0) -> float:
    """Mbit/s that the hub carries here among `count` hosts, each sending to the next as fast as it can, without limit or delay."""
    with linked(count, Link(megabits=math.inf, delay_ms=0.0)) as net:
        _stream(net, [(i, (i + 1) % count) for i in range(count)], seconds)
        return net.traffic().busiest_megabits


def given(link: Link, seconds: float = 4.0) -> dict[str, float]:
    """What one TCP stream gets over `link`: megabits (after its start), round trip in ms."""
    with linked(2, link) as net:
        ((rate, rtt),) = _stream(net, [(0, 1)], seconds)
        return {"megabits": rate, "round_trip_ms": rtt}


# -------------------------------------------------------------------- namespaces

_serial = itertools.count()


def _check_able(count: int) -> None:
    fix = "Run it on Linux as root (sudo), in a container with --cap-add NET_ADMIN --cap-add SYS_ADMIN --device /dev/net/tun."
    if os.geteuid() != 0:
        raise UserError("Making network namespaces needs root.", fix=fix)
    if not os.path.exists("/dev/net/tun"):
        raise UserError("There is no /dev/net/tun.", fix=fix)
    if shutil.which("ip") is None:
        raise UserError("There is no program 'ip'.", fix="Install iproute2.")
    assert 1 <= count <= 250


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"ip {' '.join(arguments)} failed: {done.stderr.strip()}.", fix="Is this container allowed to make network namespaces?"
        )


def _open_device(host: Host) -> int:
    """A TUN device inside a new namespace; what its host sends is read from the descriptor, what is written there it receives."""
    name = f"dd{host.namespace.removeprefix(_PREFIX + '-')}"
    _ip("netns", "add", host.namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # With the virtio header the kernel hands over up to 64 KiB of one stream at a time; 45 times fewer calls than packets of 1400.
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    _ip("link", "set", name, "netns", host.namespace)
    inside = ("-n", host.namespace)
    _ip(*inside, "addr", "add", f"{host.address}/24", "dev", name)
    _ip(*inside, "link", "set", name, "up", "mtu", str(MTU), "txqueuelen", "2000")
    _ip(*inside, "link", "set", "lo", "up")
    return device


def _remove(namespace: str) -> None:
    """End the processes that were started there, and the namespace with them."""
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _remove_stale() -> None:
    """Namespaces of a benchmark that was killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        if name.startswith(_PREFIX + "-") and not os.path.exists(f"/proc/{name.split('-')[1]}"):
            _remove(name)


def _start_hub(devices: Sequence[int], link: Link) -> subprocess.Popen:
    # A process of its own: the benchmark's Python must not make packets late.
    numbers = [str(device) for device in devices]
    command = [sys.executable, "-m", "benchmarks.links", "hub", str(link.megabits), str(link.delay_ms), *numbers]
    return subprocess.Popen(command, cwd=ROOT, pass_fds=devices, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


# -------------------------------------------------------------------- the hub


class Hub:
    """Moves packets between devices. A packet leaves its sender's line, then its receiver's, then waits for the delay."""

    def __init__(self, devices: Sequence[int], link: Link):
        self._devices, self._seconds_per_byte, self._delay = devices, 8e-6 / link.megabits, link.delay_ms / 1000
        self._up_free, self._down_free = [0.0] * len(devices), [0.0] * len(devices)
        self._due: list[tuple[float, int, bool, int, int, bytes]] = []
        self._order = itertools.count()
        self._reset()

    def _reset(self) -> None:
        self._bytes, self._dropped, self._seconds = 0, 0, Counter()
        self._late: Counter[int] = Counter()
        self._cpu = time.process_time()

    def traffic(self) -> Traffic:
        """Since the last call."""
        megabits = max(self._seconds.values(), default=0) * 8e-6
        carried = Traffic(self._bytes / 1e6, megabits, self._dropped, self._late_ms(0.99), time.process_time() - self._cpu)
        self._reset()
        return carried

    def _late_ms(self, share: float) -> float:
        left = share * sum(self._late.values())
        for ms, count in sorted(self._late.items()):
            left -= count
            if left <= 0:
                return float(ms)
        return 0.0

    def run(self, control: int) -> None:
        """Until `control` is closed; a line that comes there is answered with the traffic on stdout."""
        sources = {device: index for index, device in enumerate(self._devices)}
        while True:
            self._move(time.monotonic())
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else 1.0
            for ready in select.select([*self._devices, control], [], [], wait)[0]:
                if ready != control:
                    self._take(ready, sources[ready])
                elif not os.read(control, 100):
                    return
                else:
                    print(json.dumps(vars(self.traffic())), flush=True)

    def _take(self, device: int, source: int) -> None:
        for _ in range(16):
            try:
                packet = os.read(device, 1 << 17)
            except BlockingIOError:
                return
            if packet[_HEADER.size] >> 4 != 4:
                continue  # the kernel's own IPv6 calls
            target = packet[_HEADER.size + 19] - 1
            if target < len(self._devices):
                self._send(time.monotonic(), source, target, packet)

    def _send(self, now: float, source: int, target: int, packet: bytes) -> None:
        size = wire_bytes(packet)
        if self._up_free[source] - now > QUEUE_SECONDS:
            self._dropped += 1
            return
        self._up_free[source] = max(self._up_free[source], now) + size * self._seconds_per_byte
        heapq.heappush(self._due, (self._up_free[source], next(self._order), False, target, size, packet))

    def _move(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            due, _, arrived, target, size, packet = heapq.heappop(self._due)
            if arrived:
                self._deliver(now - due, target, size, packet)
            elif self._down_free[target] - due > QUEUE_SECONDS:
                self._dropped += 1
            else:
                self._down_free[target] = max(self._down_free[target], due) + size * self._seconds_per_byte
                heapq.heappush(self._due, (self._down_free[target] + self._delay, next(self._order), True, target, size, packet))

    def _deliver(self, late: float, target: int, size: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # a host that is being taken down
            os.write(self._devices[target], packet)
        self._bytes += size
        self._seconds[int(time.monotonic())] += size
        self._late[int(late * 1000)] += 1


def wire_bytes(packet: bytes) -> int:
    """Bytes that the segments of one packet with its virtio header take on a line, a header for each."""
    _, _, header_bytes, segment_bytes, _, _ = _HEADER.unpack_from(packet)
    size = len(packet) - _HEADER.size
    segments = math.ceil((size - header_bytes) / segment_bytes) if segment_bytes else 1
    return size + (segments - 1) * header_bytes


# -------------------------------------------------------------------- streams to measure with

_PORT = 7000


def _stream(net: Net, pairs: Sequence[tuple[int, int]], seconds: float) -> list[tuple[float, float]]:
    """Mbit/s and the round trip in ms of one TCP stream for each pair (from, to), all at once."""
    program = [sys.executable, "-m", "benchmarks.links"]
    sinks = [
        subprocess.Popen(net.command(to, [*program, "sink", str(seconds)]), cwd=ROOT, stdout=subprocess.PIPE, text=True) for _, to in pairs
    ]
    sources = []
    try:
        for sink in sinks:
            sink.stdout.readline()  # it listens
        for come, to in pairs:
            command = net.command(come, [*program, "source", net.hosts[to].address])
            sources.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        rates = [float(sink.communicate(timeout=seconds + 30)[0]) for sink in sinks]
        return [(rate, float(source.communicate(timeout=30)[0])) for rate, source in zip(rates, sources, strict=True)]
    finally:
        for process in (*sinks, *sources):
            process.kill()
            process.communicate()


def _sink(seconds: float) -> None:
    """Take one stream for `seconds`; print what the second half of that brought, in Mbit/s."""
    with socket.create_server(("0.0.0.0", _PORT)) as server:
        server.settimeout(20)
        print("listening", flush=True)
        stream, _ = server.accept()
        with stream:
            stream.settimeout(20)
            began, half, count = time.monotonic(), None, 0
            while (now := time.monotonic()) < began + seconds and (data := stream.recv(1 << 20)):
                count += len(data)
                if half is None and now >= began + seconds / 2:
                    half, count = now, 0
            print(count * 8e-6 / (now - (half or began)), flush=True)


def _source(address: str) -> None:
    """Send until the other side has enough; print the round trip that connecting took, in ms."""
    began = time.monotonic()
    with socket.create_connection((address, _PORT), timeout=20) as stream:
        print((time.monotonic() - began) * 1000, flush=True)
        block = bytes(1 << 20)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while True:
                stream.sendall(block)


def main(argv: Sequence[str]) -> None:
    if argv[:1] == ["hub"]:
        die_with_parent()
        os.nice(-10)  # packets must not wait until peers have had their share of the core
        Hub([int(device) for device in argv[3:]], Link(float(argv[1]), float(argv[2]))).run(sys.stdin.fileno())
    elif argv[:1] == ["sink"]:
        _sink(float(argv[1]))
    elif argv[:1] == ["source"]:
        _source(argv[1])
    else:
        argument_parser(__doc__).parse_args(argv)
        figures = {f"ceiling_megabits_{count}": ceiling(count) for count in (2, 4, 8)}
        figures.update(given(Link()))
        print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    sys.exit(run_program(lambda: main(sys.argv[1:])))
