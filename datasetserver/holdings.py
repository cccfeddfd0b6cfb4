"""What peers hold and have registered and not seen in a final state yet, and how much of it one owner's peers may."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from datasetserver.owners import Owners
from datasetserver.refused import Refused
from swarm.protocol import MAX_KEYS

MOST_LEASES = 4096
"""Of one owner. A peer renews each of its leases every 20 s, and asks 50 times a second at most: it has no more than 1,000."""
_FEW, _MANY = 20_000, 2 * MAX_KEYS


def most_leased(target_batch_size: int) -> int:
    """What the peers of one owner need at most: 64 rounds' worth, and where rounds are small, ten seconds of a hundred fast peers.

    Never more than the samples of two contributions of the largest kind.
    """
    return min(max(64 * target_batch_size, _FEW), _MANY)


@dataclass
class Holdings:
    """Samples leased, number of leases, and samples pending, by peer.

    most_leased: samples that the peers of one owner may hold by leases, beyond which they get none. They may have as many more in
    contributions that are in no state yet, and as many again as were counted for them: after an outage some never will be.
    """

    most_leased: int
    leased: Counter[str] = field(default_factory=Counter)
    leases: Counter[str] = field(default_factory=Counter)
    pending: Counter[str] = field(default_factory=Counter)

    def lease(self, peer: str, samples: int) -> None:
        self.leased[peer] += samples
        self.leases[peer] += 1

    def end_lease(self, peer: str, samples: int) -> None:
        self.leased[peer] -= samples
        self.leases[peer] -= 1
        if not self.leases[peer]:
            del self.leased[peer], self.leases[peer]

    def refuse_more(self, owners: Owners, peer: str, counted: Mapping[str, int]) -> None:
        """Raises Refused (429) when the peers of the owner of `peer` hold enough."""
        leased, leases = owners.total(peer, self.leased.__getitem__), owners.total(peer, self.leases.__getitem__)
        pending, final = owners.total(peer, self.pending.__getitem__), owners.total(peer, lambda name: counted.get(name, 0))
        if leased >= self.most_leased or leases >= MOST_LEASES or leased + pending >= 2 * self.most_leased + final:
            message = f"{owners.of(peer)} holds {leased} samples by {leases} leases, and {pending} that wait for their round."
            raise Refused(429, "too_many_leased", message, "Register or release some of them, and ask again.")
