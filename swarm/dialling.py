"""Which addresses in a peer's record to dial. A record may name anybody's: a thousand peers that dial what a stranger wrote are a weapon.

So an address must carry the id of the peer that signed it, and be in the open internet, or in a network that we were led into ourselves.
Names are not dialled, since they may lead anywhere, nor are relays.
"""

import functools
import ipaddress
import re
from collections.abc import Collection, Iterable, Sequence

MOST_OF_A_RECORD = 3
"""A peer listens on IPv4 and IPv6, and may announce one more."""
_ADDRESS = re.compile(r"/ip[46]/([0-9A-Fa-f.:]{2,45})/(?:tcp|udp)/\d{1,5}(?:/quic|/quic-v1)?(?:/p2p/(\w{1,64}))?")
_PUBLIC, _LOOPBACK, _LINK, _PRIVATE = "public", "loopback", "link-local", "private"


def dialable(maddrs: Iterable[str], peer: str, grounds: Collection[str]) -> tuple[str, ...]:
    """Those of `maddrs`, in a record that `peer` signed, that may be dialled. grounds: kinds of closed networks that we are in."""
    return _dialable(tuple(maddrs), peer, frozenset(grounds))


def grounds(given: Iterable[Sequence[str]], ours: Sequence[str]) -> frozenset[str]:
    """The kinds of closed networks (loopback, private, link-local) that we may dial into on a record's word.

    given: addresses by which we came into the swarm, a list per peer; one that is in the internet tells nothing with its other addresses.
    ours: where we listen ourselves; only who listens on loopback alone is certainly in a swarm on this machine.
    """
    kinds = [{_kind(maddr) for maddr in maddrs} for maddrs in given]
    closed = set().union(*(kind for kind in kinds if _PUBLIC not in kind))
    if {_kind(maddr) for maddr in ours} == {_LOOPBACK}:
        closed.add(_LOOPBACK)
    return frozenset(closed & {_LOOPBACK, _LINK, _PRIVATE})


@functools.lru_cache(1024)  # every record is looked at once a second, and brings the same addresses
def _dialable(maddrs: tuple[str, ...], peer: str, grounds: frozenset[str]) -> tuple[str, ...]:
    allowed = {_PUBLIC, *grounds}
    return tuple(maddr for maddr in maddrs if _peer_in(maddr) == peer and _kind(maddr) in allowed)[:MOST_OF_A_RECORD]


def _peer_in(maddr: str) -> str | None:
    match = _ADDRESS.fullmatch(maddr)
    return match[2] if match else None


@functools.lru_cache(4096)
def _kind(maddr: str) -> str:
    """'' for what is never dialled."""
    match = _ADDRESS.fullmatch(maddr)
    try:
        ip = ipaddress.ip_address(match[1]) if match else None
    except ValueError:
        ip = None
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip is None or ip.is_multicast or ip.is_unspecified:
        return ""
    if ip.is_loopback:
        return _LOOPBACK
    if ip.is_link_local:
        return _LINK
    return _PUBLIC if ip.is_global else _PRIVATE
