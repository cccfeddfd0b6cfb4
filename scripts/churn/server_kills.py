"""Kill a real dataset server with SIGKILL under clients that keep asking: nothing that it acknowledged may be lost, nothing count twice.

    ./scripts/server-kills [--kills 50] [--clients 8] [--seed 0]

Each client leases, registers, gives back, and now and then repeats what it said; one of them at a time reports a final round. Whatever
gets no answer is asked again until it gets one, except for a lease, which is lost with its answer. Each kill comes up to a second
after the server has answered again. At the end the ledger's file is read and held against what the clients were told. The last line is
JSON; the exit status is 0 only if nothing is wrong.
"""

import argparse
import http.client
import json
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import argument_parser, heed_sigterm, print_result, start
from datasetserver.book import Book
from datasetserver.samples import indices
from scripts.churn.swarm import Server
from swarm.peer_key import PeerKey
from swarm.signed_request import Signer

LEASE_SECONDS = 86_400.0
"""Nothing expires here: what was leased must be there at the end."""
FLAGS = ("--no_dht", "--lease_seconds", str(LEASE_SECONDS), "--max_requests_per_second", "0")
ANSWER_SECONDS = 240.0
_NO_LEASE = "0" * 32


@dataclass
class Told:
    """What the server acknowledged, and the clients' swarm: one chain of states. Guarded by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    leases: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    """By id: the peer, and what it still holds."""
    contributions: dict[tuple[str, int], frozenset[str]] = field(default_factory=dict)
    pending: list[tuple[str, int]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    requests: int = 0
    faults: list[str] = field(default_factory=list)


class Client(threading.Thread):
    def __init__(self, key: PeerKey, url: str, run_id: str, told: Told, stop: threading.Event, seed: int):
        super().__init__(name=key.peer_id, daemon=True)
        self._signer = Signer(key)
        self._netloc, self._told, self._over, self._rng = urlsplit(url).netloc, told, stop, random.Random(seed)
        self._envelope, self._number = {"run_id": run_id, "peer": key.peer_id}, 0
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        try:
            while not self._over.is_set():
                self._turn()
        except Exception as error:
            self._told.faults.append(f"{self.name} stopped: {error!r}")
        finally:
            if self._connection:
                self._connection.close()

    def _turn(self) -> None:
        lease_id, keys = self._lease()
        if not keys:
            return
        self._rng.shuffle(keys)
        mine = keys[: self._rng.randint(1, len(keys))]
        self._register(lease_id, mine)
        action = self._rng.random()
        if action < 0.3:
            self._insist(f"/v1/leases/{lease_id}/renew", {})
        elif action < 0.6:
            with self._told.lock:  # from now on another may have them, before we are told
                self._told.leases[lease_id][1].clear()
            self._insist(f"/v1/leases/{lease_id}/release", {"keys": keys[len(mine) :]})
        if self._told.lock.acquire(blocking=False):
            try:
                self._report()
            finally:
                self._told.lock.release()

    def _lease(self) -> tuple[str, list[str]]:
        """A new lease; nothing when its answer was lost."""
        answer = self._ask("/v1/leases", {"want_samples": self._rng.randint(1, 64)})
        if answer is None:
            return _NO_LEASE, []
        given = answer["shard_epochs"]
        keys = [f"{item['epoch']}:{item['shard']}:{i}" for item in given for i in range(item["samples"]) if i not in item["skip"]]
        with self._told.lock:
            taken = [peer for peer, held in self._told.leases.values() if held & set(keys)]
            if taken:
                self._told.faults.append(f"{self.name} was leased what {taken[0]} holds")
            self._told.leases[answer["lease_id"]] = (self.name, set(keys))
        return answer["lease_id"], keys

    def _register(self, lease_id: str, keys: list[str]) -> None:
        self._number += 1
        body = {"number": self._number, "keys": keys}
        for _ in range(self._rng.choice((1, 1, 2))):
            answer = self._insist("/v1/contributions", body)
            if answer["registered"] != len(keys):
                self._told.faults.append(f"{self.name} registered {len(keys)} samples, of which {answer['registered']} count")
        with self._told.lock:
            self._told.contributions[self.name, self._number] = frozenset(keys)
            self._told.leases[lease_id][1].difference_update(keys)
            self._told.pending.append((self.name, self._number))

    def _report(self) -> None:
        """Report a round of what is registered, of each peer one contribution; the lock is held."""
        members = dict(reversed(self._told.pending))  # the oldest of each: a later one would pass it
        if len(members) < 4:
            return
        before = self._told.rounds[-1] if self._told.rounds else {"digest": "f" * 64, "round": 0, "samples": 0}
        triples = [{"peer": p, "number": n, "samples": len(self._told.contributions[p, n])} for p, n in sorted(members.items())]
        said = {"digest": f"{before['round'] + 1:064x}", "parent": before["digest"], "round": before["round"] + 1, "members": triples}
        said["samples"] = before["samples"] + sum(member["samples"] for member in triples)
        head = self._insist("/v1/rounds", said)["head"]
        if head["digest"] != said["digest"]:
            self._told.faults.append(f"the head is {head['round']}, not {said['round']}, which was reported last")
        self._told.rounds.append(said)
        self._told.pending = [pair for pair in self._told.pending if members[pair[0]] != pair[1]]

    def _insist(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        for _ in range(int(ANSWER_SECONDS / 0.02)):
            if (answer := self._ask(path, body)) is not None:
                return answer
            if self._told.faults:
                break
            time.sleep(0.02)
        raise RuntimeError(f"{path} was not answered")

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None when there was none. A refusal is a fault of the server's here."""
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._netloc, timeout=60)
            data = json.dumps({**self._envelope, **body}).encode()
            headers = {"Content-Type": "application/json", **self._signer.headers("POST", path, data)}
            self._connection.request("POST", path, data, headers)
            response = self._connection.getresponse()
            status, data = response.status, response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            self._connection = None
            return None
        if status == 403 and self._signer.learn(response.headers):  # signed before the server started: it takes what is signed since
            return None
        self._told.requests += 1
        if status >= 300:
            raise RuntimeError(f"{path} was answered {status}: {data.decode(errors='replace')[:300]}")
        return json.loads(data)


def kill_often(server: Server, kills: int, rng: random.Random, alive: Callable[[], bool], say: Callable[[str], None]) -> None:
    for number in range(1, kills + 1):
        server.wait()
        if not alive():
            return
        time.sleep(rng.uniform(0, 1))
        server.kill()
        if number % 10 == 0:
            say(f"killed {number} times")
        server.start()
    server.wait()


def verdict(told: Told, ledger: Path, shards: Sequence[int]) -> dict[str, int]:
    """Hold the ledger's file against what was acknowledged; adds to `told.faults`. Returns what it holds."""
    db = sqlite3.connect(ledger, isolation_level=None)
    book = Book(db, shards=shards, seed=0, lease_seconds=LEASE_SECONDS, clock=time.monotonic)
    db.close()
    registered = {pair: keys_of(contribution.shard_epochs) for pair, contribution in book._contributions.items()}
    for pair, keys in told.contributions.items():
        if registered.get(pair) != keys or not book._contributions[pair].live:
            told.faults.append(f"contribution {pair} was acknowledged and is lost")
    times = Counter(key for keys in registered.values() for key in keys)
    told.faults += [f"sample {key} is in {times[key]} contributions" for key in times if times[key] > 1]
    for state in told.rounds:
        if book.tree.get(state["digest"]) is None:
            told.faults.append(f"round {state['round']} was acknowledged and is lost")
    for lease_id, (peer, keys) in told.leases.items():
        if keys and (lease_id not in book._leases or not keys <= keys_of(book._leases[lease_id].shard_epochs)):
            told.faults.append(f"a lease of {peer} was acknowledged and is lost")
    final = {(member["peer"], member["number"]) for state in told.rounds for member in state["members"]}
    counted, expected = book.shard_epochs.totals()["counted"], sum(len(told.contributions[pair]) for pair in final)
    unsaid = set(registered) - told.contributions.keys()
    if counted != expected or book.tree.head.samples != expected:
        told.faults.append(f"{counted} samples are counted, {book.tree.head.samples} in the head, of {expected} that became final")
    return {"counted": counted, "contributions": len(told.contributions), "not_answered": len(unsaid), "rounds": len(told.rounds)}


def keys_of(shard_epochs: dict[tuple[int, int], int]) -> set[str]:
    return {f"{epoch}:{shard}:{index}" for (epoch, shard), mask in shard_epochs.items() for index in indices(mask)}


def run(folder: Path, *, kills: int, clients: int, seed: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    server = Server(folder, target=64, sync="parameters", flags=FLAGS)
    try:
        server.wait()
        answer = server.ask("/v1/run")
        shards = [shard["samples"] for shard in server.ask(f"/v1/manifest/{answer['manifest']}")["shards"]]
        told, stop = Told(), threading.Event()
        threads = [Client(PeerKey.draw(), server.url, answer["run_id"], told, stop, seed + n) for n in range(clients)]
        for thread in threads:
            thread.start()
        kill_often(server, kills, random.Random(seed), lambda: not told.faults, say)
        stop.set()
        for thread in threads:
            thread.join(ANSWER_SECONDS)
            if thread.is_alive():
                told.faults.append(f"{thread.name} got no answer in the end")
    finally:
        server.kill()
    found = verdict(told, server.ledger, shards)
    return {"kills": kills, "clients": clients, "seed": seed, "requests": told.requests, **found, "faults": told.faults}


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    heed_sigterm()
    return start(parser, _program)


def _program(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="server-kills-") as folder:
        result = run(Path(folder), kills=options.kills, clients=options.clients, seed=options.seed)
    for fault in result["faults"][:20]:
        print(f"fault: {fault}")
    print_result({**result, "faults": len(result["faults"])})
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
