"""Who answers for a peer: the token that used its id first, or where no token is asked for, the address that it calls from.

Ids cost nothing, so what one caller may hold is counted for all peers of one owner together.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from datasetserver.refused import Refused
from datasetserver.store import Store

NOBODY = ""
"""Another owner than any: stands behind what needs no second one."""
MOST_IDS = 4096
"""Of one owner, ever. Each new folder of a peer is one; the ledger remembers all, and looks at them."""


@dataclass(frozen=True)
class Sender:
    """Who sent a request. token: the name of the token it showed, '' where none is asked for; tokens: the names of all there are now.

    address: what `limits.subject` says; None for this machine.
    """

    token: str = ""
    tokens: Collection[str] = ()
    address: str | None = None


class Owners:
    """Peers and their owners. The ledger keeps tokens' names and addresses: a restart frees no id, and makes no two owners one."""

    def __init__(self, store: Store):
        self._store, self._token_of = store, dict(store.tokens_of_peers())
        self._owner_of: dict[str, str] = {}
        self._peers_of: defaultdict[str, set[str]] = defaultdict(set)
        addresses = dict(store.addresses_of_peers())
        for peer, address in addresses.items():
            if address:
                self._set(peer, f"address {address}")
        for peer, token in self._token_of.items():
            self._set(peer, f"token {token}")
        self._before = {*addresses, *store.contributors()} - self._owner_of.keys()
        """Peers that have not spoken since the server began, and whose owner we do not know: on this machine, or in a ledger from before 0.1.1."""

    def admit(self, peer: str, sender: Sender) -> None:
        """`sender` speaks for `peer`. Refused (403) when another token did so before, and is still there, or when it spoke for MOST_IDS others.

        Once that token is removed the id is free: who is given a new one, under whatever name, goes on with it.
        """
        by_address = f"address {sender.address}" if sender.address else ""
        owner = f"token {sender.token}" if sender.token else by_address
        self._refuse_a_crowd(peer, owner)
        bound = self._token_of.get(peer)
        if sender.token and bound != sender.token:
            if bound in sender.tokens:
                fix = "Use the token that this peer used first, or start it with another --identity_path."
                raise Refused(403, "other_token", f"{peer} came with another token before.", fix)
            self._token_of[peer] = sender.token
            self._store.set_token_of_peer(peer, sender.token)
        if not sender.token and self._owner_of.get(peer) != owner:
            self._store.set_address_of_peer(peer, sender.address or "")
        self._before.discard(peer)
        self._set(peer, owner)

    def of(self, peer: str) -> str:
        """A peer without an owner (on this machine, where no token is asked for) answers for itself."""
        return self._owner_of.get(peer) or f"peer {peer}"

    def knows(self, peer: str) -> bool:
        """Whether it ever spoke; of those without token and address, since the server began."""
        return peer in self._owner_of

    @property
    def one(self) -> bool:
        """Whether all peers that ever spoke are one owner's.

        Those of `_before` count as one owner together, and as several until anybody speaks. Else one member alone could vouch for its own states
        after a restart.
        """
        ownerless = len(self._owner_of) - sum(map(len, self._peers_of.values()))
        owners = sum(map(bool, self._peers_of.values())) + max(ownerless, bool(self._before))
        return owners < 2 and (bool(self._owner_of) or len(self._before) < 2)

    def total(self, peer: str, amounts: Mapping[str, int]) -> int:
        """The sum of `amounts`, by peer, over all peers of the owner of `peer`: ids cost nothing, so it may have 100,000 that hold nothing."""
        owner = self._owner_of.get(peer)
        if not owner:
            return amounts.get(peer, 0)
        mine = self._peers_of[owner]
        if len(mine) < len(amounts):
            return sum(amounts.get(one, 0) for one in mine)
        return sum(amount for one, amount in amounts.items() if one in mine)

    def _refuse_a_crowd(self, peer: str, owner: str) -> None:
        mine = self._peers_of.get(owner, ())
        if len(mine) >= MOST_IDS and peer not in mine:
            message = f"One owner has had {MOST_IDS:,} peers in this run, and no more are let in."
            raise Refused(403, "too_many_members", message, "Start with the --output_dir of before, or ask the host for another token.")

    def _set(self, peer: str, owner: str) -> None:
        before = self._owner_of.get(peer)
        if before == owner:
            return
        if before:
            self._peers_of[before].discard(peer)
        self._owner_of[peer] = owner
        if owner:
            self._peers_of[owner].add(peer)
