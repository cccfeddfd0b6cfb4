"""Who may download from us: MAX_DOWNLOADS at a time, and no single address, stranger or dawdler keeps the others out."""

import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from peer.sync.engine.net.streams import Channel, PeerLost
from peer.sync.engine.transfer.pace import Credit

MAX_DOWNLOADS = 4
DAWDLING_BYTES_PER_SECOND = 125_000
"""Below 1 Mbit/s a taker gives way to whoever else asks. It is what averaging asks of every member."""
_FIRST_SECONDS, _MOST_SECONDS = 10.0, 90.0
"""Two chunks may wait in the buffers on the way: 67 s at that rate, in which a taker asks for nothing."""
_REMEMBERED = 256


@dataclass(eq=False)
class Slot:
    """One download. `credit`: how long its taker may still keep us waiting before it counts as a dawdler. `lost`: it gave way to another."""

    channel: Channel
    credit: Credit
    lost: bool = False

    def check(self) -> None:
        """Raises PeerLost."""
        if self.lost:
            raise PeerLost("this download gave way to another, try another peer")


class Slots:
    """met: the peers that we have averaged with."""

    def __init__(self, met: Container[str] = (), clock: Callable[[], float] = time.monotonic):
        self._met, self._clock = met, clock
        self._slots: dict[str, Slot] = {}
        self._credits: dict[str, Credit] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def take(self, channel: Channel) -> Slot:
        """A slot for the peer of `channel`, if need be another's. Raises PeerLost when all have as good a claim."""
        if channel.peer in self._slots:  # nobody wants two at once: it gave that one up, which we may hear of only a minute later
            earlier = self._slots[channel.peer]
            self.leave(earlier)
            earlier.channel.close()
        if len(self._slots) >= MAX_DOWNLOADS:
            last = self._gives_way_to(channel)
            if last is None:
                raise PeerLost("too many downloads at once, try another peer")
            last.lost = True
            self.leave(last)
        slot = self._slots[channel.peer] = Slot(channel, self._credit(channel.peer))
        return slot

    def leave(self, slot: Slot) -> None:
        """Also of one that gave way: its credit must not run out while nobody serves it."""
        slot.credit.rest()
        if self._slots.get(slot.channel.peer) is slot:
            del self._slots[slot.channel.peer]

    def _credit(self, peer: str) -> Credit:
        """Of all its downloads: a new stream is no new beginning."""
        credit = self._credits.pop(peer, None) or Credit(self._clock, DAWDLING_BYTES_PER_SECOND, _FIRST_SECONDS, _MOST_SECONDS)
        self._credits[peer] = credit
        while len(self._credits) > _REMEMBERED:
            del self._credits[next(iter(self._credits))]
        return credit

    def _gives_way_to(self, newcomer: Channel) -> Slot | None:
        """Whose slot it gets: a dawdler's; else that of a stranger whose address has two more, or of anybody there if we have met the newcomer;
        else a stranger's, if we have met the newcomer. Of several such the slowest."""
        slots, has_met = list(self._slots.values()), newcomer.peer in self._met
        strangers = [slot for slot in slots if slot.channel.peer not in self._met]
        dawdlers = [slot for slot in slots if slot.credit.seconds <= 0]
        crowded = [slot for slot in (slots if has_met else strangers) if self._at(slot.channel.place) >= self._at(newcomer.place) + 2]
        for those in (dawdlers, crowded, strangers if has_met else []):
            if those:
                return min(those, key=lambda slot: (-self._at(slot.channel.place), slot.credit.seconds))
        return None

    def _at(self, place: str) -> int:
        return sum(slot.channel.place == place for slot in self._slots.values())
