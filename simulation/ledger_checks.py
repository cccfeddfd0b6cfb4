"""What must hold of the server's ledger: each sample is counted once, waits once, or is leased once; and it agrees with the states."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from datasetserver.book import Book, Grant
from datasetserver.samples import Masks, ShardEpochId, indices, size, union
from datasetserver.shard_epochs import Contribution, ShardEpoch

if TYPE_CHECKING:
    from simulation.checks import Checks
    from simulation.machine import Machine

_WHOLE_SECONDS = 10.0
"""The interval at which all of it is worked out anew."""


class LedgerChecks:
    def __init__(self, checks: "Checks", clock: Callable[[], float]):
        self._checks, self._clock = checks, clock
        self.keys: dict[tuple[str, int], tuple[str, ...]] = {}
        """The samples of each contribution, as its trainer told the server."""
        self._masks: dict[tuple[str, int], Tally] = {}
        """The same, by shard epoch."""
        self._shared: Counter[ShardEpochId] = Counter()
        """Samples that were leased to a second peer while a first one was late with them."""
        self._right: dict[tuple[str, int], tuple[Masks, int]] = {}
        """Of each contribution, the masks and the repeated samples that it had when the whole ledger was last looked at."""
        self._whole: dict[ShardEpochId, tuple[int, int, int, int]] = {}
        """Of each shard epoch that nobody held then: counted and pending, by its own word and by the contributions."""
        self._looked = 0.0

    def registers(self, machine: "Machine", number: int, keys: Sequence[str]) -> None:
        """A trainer tells the server what a contribution holds; before it is offered."""
        pair, keys = (machine.peer, number), tuple(keys)
        if pair not in self.keys:
            self.keys[pair], self._masks[pair] = keys, _masks_of(keys)
        if self.keys[pair] != keys:
            self._checks.breach(f"contribution {number} was registered with two lists of samples", machine)

    def watch(self, book: Book) -> None:
        """Look at each lease and each registration when it is granted: what of a sample is a copy, and what a mistake."""
        lease, contribute = book.lease, book.contribute

        def leased(peer: str, want_samples: int) -> Grant:
            grant = lease(peer, want_samples)
            for uid, mask in book._leases[grant.lease_id].shard_epochs.items():
                others = union(each.shard_epochs[uid] for each in book.shard_epochs[uid].holders if each.id != grant.lease_id)
                self._shared[uid] |= mask & others
            return grant

        def contributed(peer: str, number: int, keys: Sequence[str], *, offered: bool = False) -> Contribution:
            is_known = (peer, number) in book._contributions
            contribution = contribute(peer, number, keys, offered=offered)
            again = {} if is_known or offered else {uid: mask & ~contribution.shard_epochs.get(uid, 0) for uid, mask in _masks_of(keys).once.items()}
            if foreign := _keys_of({uid: mask & ~self._allowed(book, uid) for uid, mask in again.items()}):
                self._checks.breach(f"contribution {number} of {peer[-6:]} is registered with sample {foreign[0]}, which somebody else has")
            return contribution

        book.lease, book.contribute = leased, contributed

    def _allowed(self, book: Book, uid: ShardEpochId) -> int:
        """What a peer may hold, and others have: copies, and what counts by the word of one owner alone."""
        return self._shared[uid] | union(book._contributions[pair].shard_epochs.get(uid, 0) for pair in book.unsure)

    def look(self, book: Book) -> None:
        """After a commit: what it changed, and now and then all of it."""
        now = self._clock()
        if now - self._looked >= _WHOLE_SECONDS:
            self._looked = now
            self.whole(book)

    def whole(self, book: Book) -> None:
        """Worked out anew from the contributions and the head's chain: each sample is counted once, waits once, or is leased once.

        What is as it was when it was last looked at is compared with that, and no more: a ledger grows by eight contributions a round.
        """
        chain = {pair for state in book.tree.back() for pair in state.contributions()}
        counted, pending, repeated = Tally(), Tally(), 0
        for pair, contribution in book._contributions.items():
            masks = contribution.shard_epochs
            if self._right.get(pair) != (masks, contribution.repeated) and pair in self.keys:
                self._registered(pair, contribution)
            if contribution.counted != (pair in chain):
                self._checks.breach(f"contribution {pair[1]} of {pair[0][-6:]} is {'' if contribution.counted else 'not '}counted, and its state says otherwise")
            if pair in chain:
                counted.add(masks)
                repeated += contribution.repeated
            elif contribution.live:
                pending.add(masks)
        for item in book.shard_epochs.known():
            masks = item.counted, item.pending, counted.once.get(item.uid, 0), pending.once.get(item.uid, 0)
            if item.holders or self._whole.get(item.uid) != masks:
                self._shard_epoch(book, item, *masks[2:])
                self._whole[item.uid] = masks
        if twice := _keys_of(pending.twice):
            self._checks.breach(f"sample {twice[0]} waits in two contributions")
        # One that was counted on a branch that lost, trained by another peer and is on the head's chain again counts once, and as repeated.
        once = size(counted.once)
        repeated += counted.total - once
        if (book.counted_samples, book.repeated_samples) != (once + repeated, repeated):
            said = f"{book.counted_samples} samples are counted, {book.repeated_samples} of them repeated"
            self._checks.breach(f"{said}, and there are {once} and {repeated}")

    def _registered(self, pair: tuple[str, int], contribution: Contribution) -> None:
        """The ledger has no other samples in it than its trainer told of."""
        samples, keys, masks = contribution.samples + contribution.repeated, self.keys[pair], contribution.shard_epochs
        if len(keys) != samples or not self._masks[pair].holds(masks):
            self._checks.breach(f"the ledger has {samples} samples in contribution {pair[1]} of {pair[0][-6:]}, which has {len(keys)}")
        self._right[pair] = dict(masks), contribution.repeated

    def _shard_epoch(self, book: Book, item: ShardEpoch, counted: int, pending: int) -> None:
        """counted, pending: masks of its samples in contributions."""
        epoch, shard = item.uid
        for mask, known, name in ((item.counted, counted, "counted"), (item.pending, pending, "pending")):
            if mask & ~known:
                self._checks.breach(f"samples of {epoch}:{shard} are {name} without a contribution")
        if foreign := _keys_of({item.uid: item.counted & item.held & ~self._allowed(book, item.uid)}):
            self._checks.breach(f"sample {foreign[0]} is counted, and leased to be trained once more")
        missing = counted & ~item.counted | pending & ~(item.pending | item.counted)
        if missing or item.counted & item.pending:
            self._checks.breach(f"samples of {epoch}:{shard} are lost, or in two states: {_keys_of({item.uid: missing})[:3]}")
        once = twice = again = 0
        of_peer: Counter[str] = Counter()
        for lease in item.holders:
            mask = lease.shard_epochs[item.uid]
            once, twice, again = once | mask, twice | once & mask, again | (twice | of_peer[lease.peer]) & mask
            of_peer[lease.peer] |= mask
        if again or once != item.held:
            self._checks.breach(f"samples of {epoch}:{shard} are in two states: leased to others than one peer and a second one that may have what is late")

    def agrees(self, book: Book, recent: Sequence[str], gone: Collection[str]) -> str:
        """Why ledger and states do not agree to the sample; empty: they do. gone: peers that may have died before they could register, or
        report the round.

        A head that died with all who held it stays the ledger's until those who began again have trained more than it counts. Where all who could
        report a state died, the ledger takes the best one that may have come before: perhaps one of a branch that lost.
        """
        head = book.tree.head
        if head is not None and self._checks.is_lost(head.digest, gone) and head.samples > self._checks.commits[recent[0]].samples:
            return ""
        if head is None or head.digest not in recent:
            return f"the ledger's head is {head.digest[:8] if head else 'none'}, the swarm's {next(iter(recent), '')[:8]}"
        chain = {state.digest: state for state in book.tree.chain()}
        counted = {(p, n): samples for state in chain.values() for p, n, samples in state.members if (p, n) in book._contributions}
        held, bridged = {}, False
        for digest in self._checks.lineage(head.digest):
            for peer, number, samples in self._checks.commits[digest].members:
                held[peer, number] = samples
                if peer not in gone and (book.tree.get(digest) is None or ((peer, number) not in counted and not bridged)):
                    return f"contribution {number} of {peer[-6:]} in {digest[:8]} is not in the ledger"
            bridged = bridged or digest not in chain
        unsaid = sum(samples for pair, samples in held.items() if pair not in counted)
        strays = sum(samples for pair, samples in counted.items() if pair not in held)
        if book.counted_samples + unsaid - strays != head.samples:
            return f"{head.samples} samples are in the state, {book.counted_samples} in the ledger, {unsaid} of peers that died, {strays} of a lost branch"
        return ""


class Tally:
    """Samples of many contributions, as masks by shard epoch: Python's own integers, since a world's ledger has thousands of keys."""

    def __init__(self) -> None:
        self.once: Masks = {}
        self.twice: Masks = {}
        self.total = 0

    def add(self, masks: Masks) -> None:
        for uid, mask in masks.items():
            known = self.once.get(uid, 0)
            if known & mask:
                self.twice[uid] = self.twice.get(uid, 0) | known & mask
            self.once[uid] = known | mask
            self.total += mask.bit_count()

    def holds(self, masks: Masks) -> bool:
        return not any(mask & ~self.once.get(uid, 0) for uid, mask in masks.items())


def _masks_of(keys: Sequence[str]) -> Tally:
    tally = Tally()
    for key in keys:
        epoch, shard, index = map(int, key.split(":"))
        tally.add({(epoch, shard): 1 << index})
    return tally


def _keys_of(shard_epochs: Masks) -> list[str]:
    return [f"{epoch}:{shard}:{index}" for (epoch, shard), mask in shard_epochs.items() for index in indices(mask)]
