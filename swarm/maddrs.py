"""Multiaddrs, libp2p's addresses of peers: those that a user typed, checked, and those of several peers, told apart."""

from collections.abc import Iterable, Sequence

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from swarm.errors import UserError


def parse_maddrs(texts: Iterable[str], *, need_peer_id: bool) -> list[str]:
    """Check multiaddrs a user typed. Raises UserError showing what a right one looks like."""
    for text in texts:
        try:
            parsed = Multiaddr(text)
            if need_peer_id and "p2p" not in parsed:
                raise ValueError("it does not end in /p2p/<peer id>")
        except Exception as error:
            example = "/ip4/203.0.113.7/tcp/31337" + ("/p2p/Qm..." if need_peer_id else "")
            raise UserError(f"'{text}' is not a multiaddr: {error}.", fix=f"It looks like {example}; copy it whole.") from None
    return list(texts)


def peer_at(maddr: str) -> PeerID | None:
    """None for an address that does not end in a peer's id: some are a server's words, or were on the disk."""
    try:
        return PeerID.from_base58(maddr.rpartition("/p2p/")[2])
    except ValueError:
        return None


def by_peer(maddrs: Sequence[str]) -> list[list[str]]:
    """The addresses of each peer, peers in the order of their first one."""
    groups: dict[str, list[str]] = {}
    for maddr in maddrs:
        groups.setdefault(maddr.rpartition("/p2p/")[2], []).append(maddr)
    return list(groups.values())
