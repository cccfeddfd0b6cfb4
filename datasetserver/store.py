"""What the ledger's rules keep in SQLite: rows in, rows out. Deadlines are not kept.

Changes are gathered, and written when the caller says `flush`, in its transaction and with as few statements as there can be: each
lets go of the interpreter's lock, which a busy event loop gives back after 5 ms, and one row changed twice is written once.
"""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from datasetserver.samples import ShardEpochId
from datasetserver.shard_epochs import Contribution, Lease
from datasetserver.tree import State

SCHEMA = """
CREATE TABLE IF NOT EXISTS lease (id TEXT, peer TEXT, epoch INT, shard INT, samples BLOB, PRIMARY KEY (id, epoch, shard)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contribution (peer TEXT, number INT, live INT, repeated INT, PRIMARY KEY (peer, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contribution_unit
    (peer TEXT, number INT, epoch INT, shard INT, samples BLOB, PRIMARY KEY (peer, number, epoch, shard)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS vouched (peer TEXT, number INT, owner TEXT, PRIMARY KEY (peer, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS charged (peer TEXT, number INT, owner TEXT, PRIMARY KEY (peer, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (digest TEXT PRIMARY KEY, parent TEXT, round INT, samples INT, members TEXT, reporters TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS bridge (digest TEXT PRIMARY KEY, ancestor TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS place (reporter TEXT PRIMARY KEY, digest TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS discarded (digest TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS after_discarded (digest TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS countersigned (name TEXT PRIMARY KEY, digest TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS wrong_state
    (accused TEXT, owner TEXT, digest TEXT, round INT, why_left TEXT, PRIMARY KEY (accused, owner)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS peer_token (peer TEXT PRIMARY KEY, token TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS peer_address (peer TEXT PRIMARY KEY, address TEXT) WITHOUT ROWID;
"""


_KEYS = {
    "lease": (0, 2, 3),
    "contribution": (0, 1),
    "contribution_unit": (0, 1, 2, 3),
    "vouched": (0, 1),
    "charged": (0, 1),
    "state": (0,),
    "bridge": (0,),
    "place": (0,),
    "discarded": (0,),
    "after_discarded": (0,),
    "countersigned": (0,),
    "wrong_state": (0, 1),
    "peer_token": (0,),
    "peer_address": (0,),
}
"""Where in a table's row its primary key is."""
_ROWS = 500  # in one statement; SQLite takes 32,766 values


class Store:
    """shards: samples of each."""

    def __init__(self, db: sqlite3.Connection, shards: Sequence[int]):
        self._db, self._shards = db, shards
        self._changed: dict[str, dict[tuple, tuple]] = {table: {} for table in _KEYS}
        self._ended_leases: list[str] = []
        self._gone_contributions: list[tuple[str, int]] = []
        self._gone_states: list[str] = []
        self._cleared: list[str] = []

    def flush(self) -> None:
        """Write what has changed since the last time. Raises sqlite3.Error."""
        for table in ("state", "bridge"):  # first, for one that is gone may have been reported again since
            self._delete(table, "digest", self._gone_states)
        self._delete("after_discarded", "digest", self._cleared)
        for table in ("contribution", "contribution_unit", "vouched", "charged") if self._gone_contributions else ():
            self._db.executemany(f"DELETE FROM {table} WHERE peer = ? AND number = ?", self._gone_contributions)
        for table, rows in self._changed.items():
            for some in _parts(list(rows.values())):
                row = f"({', '.join('?' * len(some[0]))})"
                self._db.execute(f"REPLACE INTO {table} VALUES {', '.join([row] * len(some))}", [value for row in some for value in row])
            rows.clear()
        self._delete("lease", "id", self._ended_leases)
        self._ended_leases.clear()
        self._gone_contributions.clear()
        self._gone_states.clear()
        self._cleared.clear()

    def _delete(self, table: str, column: str, keys: list[str]) -> None:
        for some in _parts(keys):
            self._db.execute(f"DELETE FROM {table} WHERE {column} IN ({', '.join('?' * len(some))})", some)

    def _put(self, table: str, *row: Any) -> None:
        self._changed[table][tuple(row[place] for place in _KEYS[table])] = row

    # -- leases

    def leases(self) -> Iterator[Lease]:
        """Their times are 0."""
        leases: dict[str, Lease] = {}
        for lease_id, peer, epoch, shard, samples in self._db.execute("SELECT id, peer, epoch, shard, samples FROM lease"):
            lease = leases.setdefault(lease_id, Lease(lease_id, peer, 0.0, 0.0))
            if mask := _unpack(samples):
                lease.shard_epochs[epoch, shard] = mask
        yield from leases.values()

    def set_lease_shard(self, lease: Lease, uid: ShardEpochId, mask: int) -> None:
        """What the lease holds of a shard epoch; 0: nothing any more."""
        self._put("lease", lease.id, lease.peer, *uid, self._pack(uid, mask))

    def remove_lease(self, lease: Lease) -> None:
        self._ended_leases.append(lease.id)

    # -- contributions

    def contributions(self) -> Iterator[Contribution]:
        vouched, charged = (
            {(peer, number): owner for peer, number, owner in self._db.execute(f"SELECT peer, number, owner FROM {table}")}
            for table in ("vouched", "charged")
        )
        contributions = {
            (peer, number): Contribution(
                peer, number, {}, live=bool(live), repeated=repeated, vouched=vouched.get((peer, number), ""), charged=charged.get((peer, number), "")
            )
            for peer, number, live, repeated in self._db.execute("SELECT peer, number, live, repeated FROM contribution")
        }
        for peer, number, epoch, shard, samples in self._db.execute("SELECT peer, number, epoch, shard, samples FROM contribution_unit"):
            contributions[peer, number].shard_epochs[epoch, shard] = _unpack(samples)
        yield from contributions.values()

    def add_contribution(self, contribution: Contribution) -> None:
        self.set_contribution(contribution)
        if contribution.owner:
            self.set_owner(contribution)
        for uid, mask in contribution.shard_epochs.items():
            self._put("contribution_unit", contribution.peer, contribution.number, *uid, self._pack(uid, mask))

    def set_contribution(self, contribution: Contribution) -> None:
        """All but its shard epochs, which never change."""
        self._put("contribution", contribution.peer, contribution.number, int(contribution.live), contribution.repeated)

    def remove_contribution(self, contribution: Contribution) -> None:
        for table in ("contribution", "vouched", "charged"):
            self._changed[table].pop(contribution.id, None)
        for uid in contribution.shard_epochs:
            self._changed["contribution_unit"].pop((*contribution.id, *uid), None)
        self._gone_contributions.append(contribution.id)

    def set_owner(self, contribution: Contribution) -> None:
        """Who answers for its receipt, or for what was registered without a lease."""
        self._put("vouched", contribution.peer, contribution.number, contribution.vouched)
        self._put("charged", contribution.peer, contribution.number, contribution.charged)

    # -- final states

    def states(self) -> Iterator[State]:
        """Parents before their children."""
        bridges = dict(self._db.execute("SELECT digest, ancestor FROM bridge"))
        query = "SELECT digest, parent, round, samples, members, reporters FROM state ORDER BY round"
        for digest, parent, round_, samples, members, reporters in self._db.execute(query):
            pairs = tuple((peer, number, count) for peer, number, count in json.loads(members))
            yield State(digest, parent, round_, samples, pairs, json.loads(reporters), bridges.get(digest))

    def set_state(self, state: State) -> None:
        """All but who stands there."""
        members, reporters = json.dumps(state.members), json.dumps(state.reporters)
        self._put("state", state.digest, state.parent, state.round, state.samples, members, reporters)
        if state.bridge is not None:
            self._put("bridge", state.digest, state.bridge)

    def places(self) -> Iterator[tuple[str, str]]:
        """Of each reporter the state on which it stands."""
        yield from self._db.execute("SELECT reporter, digest FROM place")

    def set_place(self, reporter: str, digest: str) -> None:
        """digest: '' for none."""
        self._put("place", reporter, digest)

    def remove_state(self, digest: str) -> None:
        for table in ("state", "bridge"):
            self._changed[table].pop((digest,), None)
        self._gone_states.append(digest)

    def discarded(self) -> set[str]:
        """Digests of the states that are not to be taken."""
        return {digest for (digest,) in self._db.execute("SELECT digest FROM discarded")}

    def discard(self, digest: str) -> None:
        self._put("discarded", digest)

    def after_discarded(self) -> set[str]:
        """Digests of the states that went with a discarded one, as they were said to descend from it."""
        return {digest for (digest,) in self._db.execute("SELECT digest FROM after_discarded")}

    def set_after_discarded(self, digest: str) -> None:
        self._put("after_discarded", digest)

    def clear_after_discarded(self, digest: str) -> None:
        self._changed["after_discarded"].pop((digest,), None)
        self._cleared.append(digest)

    def countersigned(self) -> str:
        """Digest of the state that was countersigned last; '' for none."""
        return next((digest for (digest,) in self._db.execute("SELECT digest FROM countersigned")), "")

    def set_countersigned(self, digest: str) -> None:
        self._put("countersigned", "last", digest)

    def wrong_states(self) -> Iterator[tuple[str, str, str, int, str]]:
        """(accused, owner of who showed it, digest, round, why it is left to the host) of each."""
        yield from self._db.execute("SELECT accused, owner, digest, round, why_left FROM wrong_state")

    def set_wrong_state(self, accused: str, owner: str, digest: str, number: int, why_left: str) -> None:
        self._put("wrong_state", accused, owner, digest, number, why_left)

    # -- who answers for a peer

    def tokens_of_peers(self) -> Iterator[tuple[str, str]]:
        yield from self._db.execute("SELECT peer, token FROM peer_token")

    def set_token_of_peer(self, peer: str, token: str) -> None:
        self._put("peer_token", peer, token)

    def addresses_of_peers(self) -> Iterator[tuple[str, str]]:
        """From where each peer called last without a token; '' for this machine. Versions before 0.1.1 wrote none."""
        yield from self._db.execute("SELECT peer, address FROM peer_address")

    def set_address_of_peer(self, peer: str, address: str) -> None:
        self._put("peer_address", peer, address)

    def contributors(self) -> set[str]:
        """All peers that ever registered a contribution."""
        return {peer for (peer,) in self._db.execute("SELECT DISTINCT peer FROM contribution")}

    def _pack(self, uid: ShardEpochId, mask: int) -> bytes:
        return mask.to_bytes((self._shards[uid[1]] + 7) // 8, "little")


def _parts(rows: list) -> Iterator[list]:
    return (rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS))


def _unpack(samples: bytes) -> int:
    return int.from_bytes(samples, "little")
