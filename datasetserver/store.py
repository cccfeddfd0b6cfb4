"""What the ledger's rules keep in SQLite: rows in, rows out, in the caller's transaction. Deadlines are not kept."""

import json
import sqlite3
from collections.abc import Iterator, Sequence

from datasetserver.samples import UnitId
from datasetserver.tree import State
from datasetserver.units import Contribution, Lease

SCHEMA = """
CREATE TABLE IF NOT EXISTS lease (id TEXT, peer TEXT, epoch INT, shard INT, samples BLOB, PRIMARY KEY (id, epoch, shard)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contribution (peer TEXT, number INT, live INT, repeated INT, PRIMARY KEY (peer, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contribution_unit
    (peer TEXT, number INT, epoch INT, shard INT, samples BLOB, PRIMARY KEY (peer, number, epoch, shard)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (digest TEXT PRIMARY KEY, parent TEXT, round INT, samples INT, members TEXT, reporters TEXT) WITHOUT ROWID;
"""


class Store:
    """shards: samples of each."""

    def __init__(self, db: sqlite3.Connection, shards: Sequence[int]):
        self._db, self._shards = db, shards

    # -- leases

    def leases(self) -> Iterator[Lease]:
        """Their times are 0."""
        leases: dict[str, Lease] = {}
        for lease_id, peer, epoch, shard, samples in self._db.execute("SELECT id, peer, epoch, shard, samples FROM lease"):
            leases.setdefault(lease_id, Lease(lease_id, peer, 0.0, 0.0)).units[epoch, shard] = _unpack(samples)
        yield from leases.values()

    def add_lease(self, lease: Lease) -> None:
        rows = [(lease.id, lease.peer, *uid, self._pack(uid, mask)) for uid, mask in lease.units.items()]
        self._db.executemany("INSERT INTO lease VALUES (?, ?, ?, ?, ?)", rows)

    def set_lease_unit(self, lease_id: str, uid: UnitId, mask: int) -> None:
        """What the lease still holds of a unit; 0: nothing."""
        if mask:
            values = (self._pack(uid, mask), lease_id, *uid)
            self._db.execute("UPDATE lease SET samples = ? WHERE id = ? AND epoch = ? AND shard = ?", values)
        else:
            self._db.execute("DELETE FROM lease WHERE id = ? AND epoch = ? AND shard = ?", (lease_id, *uid))

    def remove_lease(self, lease_id: str) -> None:
        self._db.execute("DELETE FROM lease WHERE id = ?", (lease_id,))

    # -- contributions

    def contributions(self) -> Iterator[Contribution]:
        contributions = {
            (peer, number): Contribution(peer, number, {}, live=bool(live), repeated=repeated)
            for peer, number, live, repeated in self._db.execute("SELECT peer, number, live, repeated FROM contribution")
        }
        for peer, number, epoch, shard, samples in self._db.execute("SELECT peer, number, epoch, shard, samples FROM contribution_unit"):
            contributions[peer, number].units[epoch, shard] = _unpack(samples)
        yield from contributions.values()

    def add_contribution(self, contribution: Contribution) -> None:
        peer, number = contribution.peer, contribution.number
        self._db.execute("INSERT INTO contribution VALUES (?, ?, 1, ?)", (peer, number, contribution.repeated))
        rows = [(peer, number, *uid, self._pack(uid, mask)) for uid, mask in contribution.units.items()]
        self._db.executemany("INSERT INTO contribution_unit VALUES (?, ?, ?, ?, ?)", rows)

    def withdraw(self, contribution: Contribution) -> None:
        self._db.execute("UPDATE contribution SET live = 0 WHERE peer = ? AND number = ?", (contribution.peer, contribution.number))

    # -- settled states

    def states(self) -> Iterator[State]:
        """Parents before their children."""
        query = "SELECT digest, parent, round, samples, members, reporters FROM state ORDER BY round"
        for digest, parent, round_, samples, members, reporters in self._db.execute(query):
            pairs = tuple((peer, number, count) for peer, number, count in json.loads(members))
            yield State(digest, parent, round_, samples, pairs, json.loads(reporters))

    def add_state(self, state: State) -> None:
        row = (state.digest, state.parent, state.round, state.samples, json.dumps(state.members), json.dumps(state.reporters))
        self._db.execute("INSERT INTO state VALUES (?, ?, ?, ?, ?, ?)", row)

    def set_reporters(self, state: State) -> None:
        self._db.execute("UPDATE state SET reporters = ? WHERE digest = ?", (json.dumps(state.reporters), state.digest))

    def _pack(self, uid: UnitId, mask: int) -> bytes:
        return mask.to_bytes((self._shards[uid[1]] + 7) // 8, "little")


def _unpack(samples: bytes) -> int:
    return int.from_bytes(samples, "little")
