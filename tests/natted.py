"""A small internet in network namespaces: one public host, and homes behind routers that translate addresses (NAPT), in user space.

Needs root, iproute2 and /dev/net/tun; nothing of the host's own network is touched. A router keeps one mapping per connection and
lets in nothing that answers none ("symmetric", the strictest kind of NAT): a host behind it can dial, and cannot be dialled.
"""

import fcntl
import os
import re
import select
import socket
import struct
import subprocess
import threading
from pathlib import Path

PUBLIC = "11.0.0.1"
"""Not one of the private or documentation ranges, for which libp2p would offer no relays; it is never routed out of the namespace."""
_HOME = "192.168.77.2"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000
_TCP, _UDP = 6, 17
_FIRST_PORT = 20_000


def missing() -> str:
    """Why namespaces cannot be made here, or ''."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    probe = f"ddprobe{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"cannot make a network namespace: {error}"
    return ""


class NattedNetwork:
    """`with NattedNetwork(homes=2) as network`: run commands with `network.prefix(name)`; names: "public", "home1", "home2" ..."""

    def __init__(self, homes: int):
        self._names = ["public", *(f"home{number}" for number in range(1, homes + 1))]
        self._devices: dict[str, int] = {}
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._route, daemon=True)

    def namespace(self, name: str) -> str:
        """That host's, as `ip netns` names it."""
        return _namespace(name)

    def prefix(self, name: str) -> list[str]:
        """What to put before a command so that it runs on that host."""
        return ["ip", "netns", "exec", _namespace(name)]

    def __enter__(self) -> "NattedNetwork":
        _remove_stale()
        try:
            for name in self._names:
                self._devices[name] = _host(name, PUBLIC if name == "public" else _HOME)
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._stopped)
        self._thread.join(10)
        self._remove()

    def _remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", _namespace(name)], capture_output=True, check=False)
        for device in self._devices.values():
            os.close(device)
        os.close(self._stop)

    def _route(self) -> None:
        nats = {name: Nat(f"11.0.0.{10 + number}") for number, name in enumerate(self._names) if name != "public"}
        by_device = {device: name for name, device in self._devices.items()}
        public = self._devices["public"]
        waiting = select.poll()
        for device in (self._stop, *by_device):
            waiting.register(device, select.POLLIN)
        while True:
            ready = [device for device, _ in waiting.poll()]
            if self._stop in ready:
                return
            for device in ready:
                name, packet = by_device[device], bytearray(os.read(device, 4096))
                if name != "public":
                    if nats[name].outwards(packet) and packet[16:20] == socket.inet_aton(PUBLIC):
                        os.write(public, packet)
                    continue
                for home, nat in nats.items():
                    if nat.inwards(packet):
                        os.write(self._devices[home], packet)


class Nat:
    """One router: changes IPv4 packets in place, both ways; says whether they may pass."""

    def __init__(self, address: str):
        self._address = socket.inet_aton(address)
        self._ports: dict[tuple[bytes, int], int] = {}
        self._flows: dict[tuple[int, bytes], tuple[bytes, int]] = {}

    def outwards(self, packet: bytearray) -> bool:
        """From the home: its address and port become the router's."""
        start = _transport(packet)
        if not start:
            return False
        source, port, remote = bytes(packet[12:16]), struct.unpack_from("!H", packet, start)[0], _remote(packet, packet[16:20], start + 2)
        flow = (source, port)
        outer = self._ports.setdefault((source + remote, port), _FIRST_PORT + len(self._ports))
        self._flows[outer, remote] = flow
        _rewrite(packet, start, 12, self._address, start, outer)
        return True

    def inwards(self, packet: bytearray) -> bool:
        """From the internet: passes only when it answers something that went out."""
        start = _transport(packet)
        if not start or packet[16:20] != self._address:
            return False
        port, remote = struct.unpack_from("!H", packet, start + 2)[0], _remote(packet, packet[12:16], start)
        if (port, remote) not in self._flows:
            return False
        address, inner = self._flows[port, remote]
        _rewrite(packet, start, 16, address, start + 2, inner)
        return True


def _transport(packet: bytearray) -> int:
    """Where a TCP or UDP header starts; 0 for anything else."""
    if len(packet) < 28 or packet[0] >> 4 != 4 or packet[9] not in (_TCP, _UDP):
        return 0
    return (packet[0] & 15) * 4


def _remote(packet: bytearray, address: bytes, port_at: int) -> bytes:
    return bytes(packet[9:10]) + bytes(address) + bytes(packet[port_at : port_at + 2])


def _rewrite(packet: bytearray, start: int, address_at: int, address: bytes, port_at: int, port: int) -> None:
    old_address, old_port = bytes(packet[address_at : address_at + 4]), bytes(packet[port_at : port_at + 2])
    new_port = struct.pack("!H", port)
    packet[address_at : address_at + 4], packet[port_at : port_at + 2] = address, new_port
    _adjust(packet, 10, old_address, address)
    sum_at = start + (16 if packet[9] == _TCP else 6)
    _adjust(packet, sum_at, old_address + old_port, address + new_port)


def _adjust(packet: bytearray, at: int, old: bytes, new: bytes) -> None:
    """Bring the checksum at `at` up to date (RFC 1624)."""
    total = ~struct.unpack_from("!H", packet, at)[0] & 0xFFFF
    for before, after in zip(struct.iter_unpack("!H", old), struct.iter_unpack("!H", new), strict=True):
        total += (~before[0] & 0xFFFF) + after[0]
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", packet, at, ~total & 0xFFFF)


def _host(name: str, address: str) -> int:
    """A namespace whose only way out is a TUN device; the device."""
    namespace, link = _namespace(name), f"dd{os.getpid() % 100_000}{name[0]}{name[-1]}"
    _ip("netns", "add", namespace)
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", link.encode(), _IFF_TUN | _IFF_NO_PI))
    _ip("link", "set", link, "netns", namespace)
    _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", link)
    _ip("-n", namespace, "link", "set", link, "up", "mtu", "1400", "txqueuelen", "2000")
    _ip("-n", namespace, "link", "set", "lo", "up")
    _ip("-n", namespace, "route", "add", "default", "dev", link)
    return device


def _remove_stale() -> None:
    """Namespaces of a test that was killed: its number may be ours one day."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in [line.split()[0] for line in listed.splitlines()]:
        if re.fullmatch(r"dd-\d+-(public|home\d+)", name) and not os.path.exists(f"/proc/{name.split('-')[1]}"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _namespace(name: str) -> str:
    return f"dd-{os.getpid()}-{name}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
