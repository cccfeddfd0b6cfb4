"""Where peers of this run could be reached, so that those we lost are found again: after a partition, or when we start again."""

from collections.abc import Collection, Container, Iterable, Mapping

from swarm.dialling import dialable
from swarm.records import PeerRecord

_REMEMBERED = 32
_UNKNOWN = 8
"""Peers among them with whom we never averaged: their addresses are a stranger's word."""


class AddressBook:
    """met: the peers that we have averaged with."""

    def __init__(self, met: Container[str]):
        self._met = met
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._dialled: dict[str, int] = {}
        self._dials = 0

    @property
    def addresses(self) -> Mapping[str, tuple[str, ...]]:
        """Of each peer, also when it is gone; those seen last at the end."""
        return self._addresses

    def see(self, records: Iterable[PeerRecord], grounds: Collection[str]) -> None:
        """Note where live peers are; grounds: as `dialling.dialable` takes them."""
        for record in records:
            if maddrs := dialable(record.maddrs, record.peer_id, grounds):
                self._addresses.pop(record.peer_id, None)
                self._addresses[record.peer_id] = maddrs
        strangers = [peer for peer in self._addresses if peer not in self._met]
        for peer in strangers[: max(0, len(strangers) - _UNKNOWN)]:
            self._forget(peer)
        while len(self._addresses) > _REMEMBERED:
            self._forget(next(iter(self._addresses)))

    def next_lost(self, live: Collection[str]) -> tuple[str, ...]:
        """Addresses of the lost peer dialled longest ago; of those not dialled yet, one that we have met. () when none is lost."""
        lost = [peer for peer in self._addresses if peer not in live]
        if not lost:
            return ()
        peer = min(lost, key=lambda peer: (self._dialled.get(peer, 0), peer not in self._met))
        self._dials += 1
        self._dialled[peer] = self._dials
        return self._addresses[peer]

    def _forget(self, peer: str) -> None:
        del self._addresses[peer]
        self._dialled.pop(peer, None)
