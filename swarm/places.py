"""Where a peer is, as far as its connection tells. A peer id costs nothing, an address costs something: budgets count both."""

import ipaddress

from hivemind.utils.multiaddr import Multiaddr

RELAYED = "relayed"
"""Behind a relay there is one place for all, since the address is the relay's."""
_NETWORK_BITS = 64
"""Of IPv6: whoever has one address has the other 2^64 of its network as well."""


def place_of(maddr: Multiaddr) -> str:
    """The IPv4 address or the IPv6 network at the other end of a connection; RELAYED where it is not told. Loopback is a place like any."""
    ip = ip_of(maddr)
    if not ip:
        return RELAYED
    parsed = ipaddress.ip_address(ip)
    return ip if parsed.version == 4 else str(ipaddress.ip_network((parsed, _NETWORK_BITS), strict=False))


def ip_of(maddr: Multiaddr) -> str:
    """The IP address that a multiaddr leads to directly; '' for names and relays."""
    if "p2p-circuit" in maddr:
        return ""
    return next((str(maddr[kind]) for kind in ("ip4", "ip6") if kind in maddr), "")
