"""The same free port again after a restart: others remember this peer's addresses, and users pass them on."""

import contextlib
import json
import logging
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from hivemind.utils.multiaddr import Multiaddr

from swarm.errors import ExitCode, UserError

log = logging.getLogger(__name__)

_FROM, _TO = 20_000, 30_000
"""Below those that systems give to whoever asks for any, 32,768 and up: nobody gets it until p2pd listens, or while this peer is away."""
_TRIES = 100


def with_ports(host_maddrs: Sequence[str], remembered_in: Path) -> list[str]:
    """`host_maddrs` with a port in the place of each tcp/0: the last one if it is free, else any that is free now.

    remembered_in: a JSON file, {multiaddr: port}; without it, or when it cannot be written, ports are new at every start.
    """
    ports = _remembered(remembered_in)
    chosen = {maddr: _port(Multiaddr(maddr), ports.get(maddr, 0)) for maddr in host_maddrs if _is_free_choice(Multiaddr(maddr))}
    if chosen != ports:
        with contextlib.suppress(OSError):
            remembered_in.write_text(json.dumps(chosen))
    return [str(maddr).replace("/tcp/0", f"/tcp/{chosen[maddr]}", 1) if maddr in chosen else maddr for maddr in host_maddrs]


def refuse_busy(host_maddrs: Sequence[str]) -> None:
    """Raises UserError where another program has a port of these addresses."""
    for maddr in map(Multiaddr, host_maddrs):
        port = int(maddr["tcp"]) if "tcp" in maddr else 0
        if port and (error := can_listen(maddr, port)) is not None:
            raise UserError(
                f"Cannot listen on {maddr}: {error.strerror}.",
                fix="Choose another port in --host_maddrs, or tcp/0 for any free one.",
                code=ExitCode.NETWORK,
            )


def can_listen(maddr: Multiaddr, port: int) -> OSError | None:
    """None, or why nobody can listen on that TCP port there."""
    # libp2p listens with SO_REUSEPORT: two daemons on one port both start, and steal each other's connections (seen).
    with _bound(maddr) as probe:
        try:
            probe.bind((_host(maddr), port))
            return None
        except OSError as error:
            return error


def free_port(maddr: Multiaddr | None = None) -> int:
    """A TCP port on which nobody listens at `maddr` (127.0.0.1 without it); 0 where nobody could listen on any."""
    maddr = maddr or Multiaddr("/ip4/127.0.0.1")
    return next((port for port in random.sample(range(_FROM, _TO), _TRIES) if can_listen(maddr, port) is None), 0)


def _port(maddr: Multiaddr, last: int) -> int:
    """0: p2pd will say what is wrong with this address."""
    return last if last and can_listen(maddr, last) is None else free_port(maddr)


def _bound(maddr: Multiaddr) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if "ip6" in maddr else socket.AF_INET, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return probe


def _host(maddr: Multiaddr) -> str:
    return next((maddr[kind] for kind in ("ip6", "ip4") if kind in maddr), "0.0.0.0")


def _is_free_choice(maddr: Multiaddr) -> bool:
    return "tcp" in maddr and int(maddr["tcp"]) == 0


def _remembered(path: Path) -> dict[str, int]:
    try:
        ports = json.loads(path.read_text())
        return {maddr: port for maddr, port in ports.items() if isinstance(port, int) and 0 < port < 1 << 16}
    except (OSError, ValueError, AttributeError):
        return {}
