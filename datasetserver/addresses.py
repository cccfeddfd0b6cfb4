"""Which of our addresses to hand to whom: an address that the caller cannot dial costs it a timeout, and tells it about our network.

A caller on this machine gets all; one in a private network gets private and public ones; one from the internet public ones.
"""

import functools
import ipaddress
from collections.abc import Iterable

_CONTAINERS = ipaddress.ip_network("172.16.0.0/12")  # where Docker puts its bridges: 172.17.0.0/16 to 172.31.0.0/16
_SHARED = ipaddress.ip_network("100.64.0.0/10")  # carrier NAT and overlay networks: private between those who are in it

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def visible_maddrs(maddrs: Iterable[str], caller: str) -> list[str]:
    """Those of `maddrs` that a caller with this IP address should be told, in their order.

    caller: '' or anything that is no address counts as public. Names (dns4, dns6, dnsaddr) are for everybody.
    """
    source = parse(caller)
    return [maddr for maddr in maddrs if _visible(maddr, source)]


def caller_address(remote: str | None, forwarded_for: str | None) -> str:
    """The caller's address; `X-Forwarded-For` is believed only from a proxy on this machine, and only its last entry."""
    address = parse(remote or "")
    if address and address.is_loopback and forwarded_for:
        return forwarded_for.split(",")[-1].strip()
    return remote or ""


def is_this_machine(address: str) -> bool:
    parsed = parse(address)
    return parsed is not None and parsed.is_loopback


def _visible(maddr: str, source: IpAddress | None) -> bool:
    parts = maddr.split("/")
    if len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return len(parts) >= 3
    address = parse(parts[2])
    if address is None:
        return False
    if source is not None and source.is_loopback:
        return True
    if address.is_loopback or address.is_unspecified or address.is_link_local or address.is_multicast:
        return False
    if not _is_private(address):
        return True
    if source is None or not _is_private(source):
        return False
    return address not in _CONTAINERS or source in _CONTAINERS


def _is_private(address: IpAddress) -> bool:
    return address.is_private or address.is_link_local or (address.version == 4 and address in _SHARED)


@functools.lru_cache(maxsize=4096)  # every request's caller, three times
def parse(text: str) -> IpAddress | None:
    try:
        address = ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
