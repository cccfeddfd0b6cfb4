"""What this node keeps of other peers' records: little of each peer, of each key and in all, and nothing makes way for strangers.

A node that is full refuses what is new, and goes on taking renewals: a flood cannot push out the records of peers that are here. Not
promised: that a peer which comes during the flood finds a place at this node, unless we know it (`is_known`).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

MOST_OF_A_KEY, BYTES_OF_A_KEY = 512, 1 << 20
"""Of a run's peers, each of which takes 1.7 kB. An answer of more than 4 MiB would not travel (docs/internals.md)."""
MOST_OF_AN_OWNER = 4
"""Keys under which one peer has a record: its run's and that of all runs, and those of a run that it left within 10 minutes."""
MOST_OTHER_KEYS, BYTES_OF_OTHER_KEYS = 64, 4 << 20
"""For runs that this node has nothing to do with; its own have their place besides."""
_SWEEP_SECONDS = 1.0


@dataclass
class _Key:
    records: dict[bytes, ValueWithExpiration] = field(default_factory=dict)
    num_bytes: int = 0


class RecordStore:
    """In place of hivemind's `DHTLocalStorage`, which keeps whatever it is given.

    What comes here has passed the rules and its signature. clock: in UNIX seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self.ours = b""
        """The owner that is this node itself, for which there is always room."""
        self._keys: dict[DHTID, _Key] = {}
        self._of_owner: Counter[bytes] = Counter()
        self._reserved: set[DHTID] = set()
        self._swept = clock()
        self.is_known: Callable[[bytes], bool] = lambda owner: False
        """Whether an owner is one of whom we know more than its key: where a key is full, it takes the place of one that is not."""

    def reserve(self, key: DHTID) -> None:
        """This node itself reads or writes `key`: it has a place whatever else is stored here."""
        self._reserved.add(key)

    def drop(self, key: DHTID) -> None:
        """Forget all records under `key`; their owners renew those that are right."""
        for owner in list(self._keys[key].records if key in self._keys else ()):
            self._drop(key, owner)

    def store(self, key: DHTID, value: bytes, expiration_time: float, subkey: bytes | None = None) -> bool:
        """Whether the record is kept: it is newer than the one before, and there is room."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: bytes, value: bytes, expiration_time: float) -> bool:
        """As `store`; the names are hivemind's."""
        self._sweep()
        before = self._keys[key].records.get(subkey) if key in self._keys else None
        if expiration_time <= (before.expiration_time if before else self._clock()):
            return False
        if not self._has_room(key, subkey, value, before) and not self._makes_room(key, subkey, value, before):
            return False
        self._drop(key, subkey)
        kept = self._keys.setdefault(key, _Key())
        kept.records[subkey] = ValueWithExpiration(value, expiration_time)
        kept.num_bytes += len(subkey) + len(value)
        self._of_owner[subkey] += 1
        return True

    def get(self, key: DHTID) -> ValueWithExpiration | None:
        """All records under `key`, in a dictionary of its own: hivemind merges what others answer into it."""
        found = DictionaryDHTValue()
        for subkey, (value, expiration_time) in self._keys.get(key, _Key()).records.items():
            found.store(subkey, value, expiration_time)  # takes nothing that is over
        return ValueWithExpiration(found, found.latest_expiration_time) if len(found) else None

    def items(self) -> Iterator[tuple[DHTID, ValueWithExpiration]]:
        return ((key, found) for key in list(self._keys) if (found := self.get(key)) is not None)

    @property
    def num_bytes(self) -> int:
        """Of everything kept."""
        return sum(kept.num_bytes for kept in self._keys.values())

    def __len__(self) -> int:
        return sum(len(kept.records) for kept in self._keys.values())

    def _has_room(self, key: DHTID, subkey: bytes, value: bytes, before: ValueWithExpiration | None) -> bool:
        kept, more = self._keys.get(key, _Key()), len(value) - (len(before.value) if before else -len(subkey))
        if before is None and (len(kept.records) >= MOST_OF_A_KEY or self._of_owner[subkey] >= MOST_OF_AN_OWNER):
            return subkey == self.ours
        if kept.num_bytes + more > BYTES_OF_A_KEY:
            return subkey == self.ours
        return key in self._reserved or self._has_room_besides(key, more)

    def _has_room_besides(self, key: DHTID, more: int) -> bool:
        """For more bytes under a key that is not ours."""
        others = [name for name in self._keys if name not in self._reserved]
        of_others = sum(self._keys[name].num_bytes for name in others)
        return (key in self._keys or len(others) < MOST_OTHER_KEYS) and of_others + more <= BYTES_OF_OTHER_KEYS

    def _makes_room(self, key: DHTID, subkey: bytes, value: bytes, before: ValueWithExpiration | None) -> bool:
        """A known owner takes the place of the stranger under the same key whose record would end first."""
        kept = self._keys.get(key, _Key()).records
        if before is not None or not self.is_known(subkey):
            return False
        strangers = [owner for owner in kept if owner != self.ours and not self.is_known(owner)]
        if not strangers:
            return False
        first = min(strangers, key=lambda owner: kept[owner].expiration_time)
        more = len(subkey) + len(value) - len(first) - len(kept[first].value)
        fits = key in self._reserved or self._has_room_besides(key, more)
        if self._of_owner[subkey] >= MOST_OF_AN_OWNER or self._keys[key].num_bytes + more > BYTES_OF_A_KEY or not fits:
            return False
        self._drop(key, first)
        return True

    def _drop(self, key: DHTID, subkey: bytes) -> None:
        kept = self._keys.get(key)
        if kept is None or subkey not in kept.records:
            return
        kept.num_bytes -= len(subkey) + len(kept.records.pop(subkey).value)
        self._of_owner[subkey] -= 1
        if not self._of_owner[subkey]:
            del self._of_owner[subkey]
        if not kept.records:
            del self._keys[key]

    def _sweep(self) -> None:
        """Drop what is over, once a second."""
        now = self._clock()
        if now < self._swept:  # the clock was ahead: what came meanwhile would outlive its owners, and ours would refuse our renewals
            for key in list(self._keys):
                self.drop(key)
        elif now - self._swept < _SWEEP_SECONDS:
            return
        self._swept = now
        over = [(key, owner) for key, kept in self._keys.items() for owner, item in kept.records.items() if item.expiration_time < now]
        for key, owner in over:
            self._drop(key, owner)
