"""What peers and their dataset server really say to each other: everything that is parsed in some rounds of a simulated world, with faults."""

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

from peer.sync.engine.net import streams
from peer.sync.engine.net.messages import HEAD, HEADER, JOIN_ANSWER, KIND_OF_STATE
from simulation import server
from simulation.records import Records
from simulation.world import Scenario, World
from swarm.bans import sign_word
from swarm.members import MEMBERSHIP

_FAULTS = ("kill", "partition", "reset", "server", "answers", "nat", "sidecar")
_WITHOUT_NAME = {"membership": MEMBERSHIP, "answer to join": JOIN_ANSWER, "kind of state": KIND_OF_STATE, "head": HEAD, "header": HEADER}
_KEPT = 64
"""Of one kind. What is said later displaces what was said first with a falling chance: all of a world is heard alike."""


class Recording:
    """kind -> examples. Of streams: (what it is read as, values); of HTTP: (method, path, body, answer); of records: bytes.

    world: the one that was played; its book stands where the world ended.
    """

    def __init__(self, seed: int, rounds: int):
        self._rng = random.Random(f"recording {seed}")
        self._heard: defaultdict[str, int] = defaultdict(int)
        self.messages: defaultdict[str, list[tuple[Any, bytes]]] = defaultdict(list)
        self.requests: defaultdict[str, list[tuple[str, str, bytes, bytes]]] = defaultdict(list)
        self.records: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
        self.world = World(Scenario(seed, peers=5, rounds=rounds, faults=_FAULTS, fault_seconds=20.0, assistants=1, members=True))
        server, run = self.world.server, self.world.run
        server.bans.hear(sign_word(server.dataset.key, run, peer, banned=True, reason="says so", clock=lambda: 1.0) for peer in ("QmOne", "QmOther"))
        with self._listening():
            outcome = self.world.play()
        if outcome.breach:
            raise RuntimeError(f"seed {seed} broke something by itself: {outcome.breach}")

    def _keep(self, kept: dict[str, list], kind: str, example: Any) -> None:
        self._heard[kind] += 1
        examples = kept[kind]
        if len(examples) < _KEPT:
            examples.append(example)
        elif (place := self._rng.randrange(self._heard[kind])) < _KEPT:
            examples[place] = example

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_around(streams, "read", self._message))
            stack.enter_context(_around(server.Server, "_response", self._request))
            stack.enter_context(_around(Records, "publish", self._record))
            stack.enter_context(_around(Records, "publish_run", self._run_record))
            yield

    def _message(self, read: Callable, kind: Any, values: Any) -> Any:
        name = next((name for name, known in _WITHOUT_NAME.items() if kind is known), None) or kind.__name__
        self._keep(self.messages, name, (kind, msgpack.packb(values)))
        return read(kind, values)

    async def _request(self, response: Callable, of: server.Server, request: Any) -> Any:
        answer = await response(of, request)
        endpoint = f"{request.method} {'/'.join(request.path.split('/')[:3])}"
        self._keep(self.requests, endpoint, (request.method, request.path, request._body, answer.body))
        return answer

    async def _record(self, publish: Callable, of: Records, record: Any, wall: float) -> bool:
        self._keep(self.records, "peer", (record.peer_id, record.pack()))
        return await publish(of, record, wall)

    async def _run_record(self, publish: Callable, of: Records, peer: str, record: Any) -> bool:
        self._keep(self.records, "run", (peer, record.pack()))
        return await publish(of, peer, record)


@contextlib.contextmanager
def _around(owner: Any, name: str, instead: Callable) -> Iterator[None]:
    """Within, `instead` is called with what stands there as its first argument."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: instead(original, *args))
    try:
        yield
    finally:
        setattr(owner, name, original)
