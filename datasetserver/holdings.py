"""What peers hold and have registered and not seen in a final state yet, and how much of it one owner's peers may."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from datasetserver.owners import Owners
from datasetserver.refused import Refused
from swarm.protocol import MAX_KEYS

MOST_LEASES = 4096
"""Of one owner. A peer renews each of its leases every 20 s, and asks 50 times a second at most: it has no more than 1,000."""

ENOUGH_FOR_A_STEP = 256
"""Samples of one peer. It asks for two batches at least: here two of 128."""


@dataclass(frozen=True)
class Allowance:
    """How many samples the peers of one owner may hold by leases, and how many may have a receipt while they are in no state.

    first: as long as nothing of theirs is settled; one more for each sample that was counted for them; never more than `most`.
    """

    first: int
    most: int

    @classmethod
    def of(cls, target_batch_size: int) -> "Allowance":
        """first: four rounds' worth. A peer that is alone closes no round with less than one, and stops at two. most: 64.

        Where rounds are small: 5,000 (ten seconds of a peer that trains 500 a second) and 20,000. Never more than the samples of two
        contributions of the largest kind.
        """
        return cls(*(min(max(rounds * target_batch_size, few), 2 * MAX_KEYS) for rounds, few in ((4, 5_000), (64, 20_000))))

    def samples(self, counted: int) -> int:
        return min(self.first + counted, self.most)


@dataclass
class Holdings:
    """Samples leased, number of leases, and samples pending, by peer.

    allowance: beyond it the peers of one owner get no samples, but for a step of each. They may have as many more in contributions that are in no
    state yet, and as many again as were counted for them: after an outage some never will be.
    vouched: by owner the samples of contributions that got a receipt and may still come into a state, withdrawn or not; receipts: by peer and number
    the owner at that time, and the samples.
    """

    allowance: Allowance
    leased: Counter[str] = field(default_factory=Counter)
    leases: Counter[str] = field(default_factory=Counter)
    pending: Counter[str] = field(default_factory=Counter)
    vouched: Counter[str] = field(default_factory=Counter)
    receipts: defaultdict[str, dict[int, tuple[str, int]]] = field(default_factory=lambda: defaultdict(dict))

    def lease(self, peer: str, samples: int) -> None:
        self.leased[peer] += samples
        self.leases[peer] += 1

    def end_lease(self, peer: str, samples: int) -> None:
        self.leased[peer] -= samples
        self.leases[peer] -= 1
        if not self.leases[peer]:
            del self.leased[peer], self.leases[peer]

    def not_pending(self, peer: str, samples: int) -> None:
        self.pending[peer] -= samples
        if not self.pending[peer]:
            del self.pending[peer]

    def room(self, owners: Owners, peer: str, counted: Mapping[str, int]) -> int:
        """How many samples more the peers of the owner of `peer` may lease. Raises Refused (429) when they hold enough.

        A peer may hold ENOUGH_FOR_A_STEP in any case, so that each of an owner's many peers trains. With one shard of 8 samples it would wait for a
        step's others. That ends at the most that any owner may hold.
        """
        leased, leases = owners.total(peer, self.leased), owners.total(peer, self.leases)
        pending, final = owners.total(peer, self.pending), owners.total(peer, counted)

        def left(allowed: int) -> int:
            return min(allowed - leased, 2 * allowed + final - leased - pending)

        allowed = self.allowance.samples(final)
        room = left(allowed)
        if room <= 0:
            room = min(left(self.allowance.most), ENOUGH_FOR_A_STEP - self.leased[peer])
        if room <= 0 or leases >= MOST_LEASES:
            message = f"{owners.of(peer)} holds {leased} samples by {leases} leases, of {allowed}, and {pending} that wait for their round."
            raise Refused(429, "too_many_leased", message, "Register or release some of them, and ask again.")
        return room

    def may_vouch(self, owners: Owners, peer: str, samples: int, counted: Mapping[str, int]) -> bool:
        """Whether `samples` more keep the owner's receipts that wait for a state within its allowance."""
        return self.vouched[owners.of(peer)] + samples <= self.allowance.samples(owners.total(peer, counted))

    def vouch(self, owner: str, peer: str, number: int, samples: int) -> None:
        """A receipt was given. The owner answers for it, also when another speaks for `peer` later."""
        if number not in self.receipts[peer]:
            self.receipts[peer][number] = owner, samples
            self.vouched[owner] += samples

    def settle(self, contributions: Iterable[tuple[str, int]], witnesses: Set[str]) -> None:
        """They are in the head's chain: no state takes an earlier one of the same peer any more. witnesses: the owners whose peers say so.

        An owner's word about its own receipts is not enough: it could make up a state, and have more receipts for samples that nobody trains.
        """
        for peer, number in contributions:
            receipts = self.receipts.get(peer, {})
            for passed in [one for one, (owner, _) in receipts.items() if one <= number and witnesses - {owner}]:
                owner, samples = receipts.pop(passed)
                self.vouched[owner] -= samples

    def awaits(self, peer: str, number: int) -> bool:
        """Whether the receipt of this contribution still counts against its owner's allowance."""
        return number in self.receipts.get(peer, ())
