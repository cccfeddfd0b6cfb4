"""Samples leased from a dataset server: shards fetched ahead in the background, every sample reported for once, and only once.

One thread with its own event loop talks to the server; the training thread never waits for the network unless it runs out of
samples. While the server is away, what was leased is trained, then what is on the disk; what there is to report waits in an outbox, in order.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peer.contracts import CommittedRound, LeaseLost, Sample, SourceContext
from peer.data.client.background import Background
from peer.data.client.download import Corrupt, fetch
from peer.data.client.manifest import SignedShards
from peer.data.client.outage import Seen, choose
from peer.data.client.outbox import CONTRIBUTIONS, PROOFS, ROUNDS, Letter, Outbox
from peer.data.client.runs import round_body
from peer.data.client.transport import Refusal, ServerAway, Transport, open_session
from peer.data.client.work import Lease, ShardEpoch, Work
from peer.data.shards import Row, ShardCache, read_shard
from peer.data.unsaid import Unsaid
from swarm import protocol
from swarm.bans import Bans
from swarm.end import End
from swarm.errors import ExitCode, UserError
from swarm.peer_key import PeerKey
from swarm.run_config import RunConfig
from swarm.signed_request import Signer
from swarm.signing import KnownHosts
from swarm.tasks import set_within
from swarm.wrong_states import Accusation

log = logging.getLogger(__name__)
REGISTER_SECONDS = 5.0
CLOSE_SECONDS = 5.0
OUTAGE_SECONDS = 10.0
"""A server that has been away for this long is not waited for. What is leased ahead lasts as long."""
_NO_SHARD_PAUSE_SECONDS = 30.0
"""The server may lease the same shard at once again."""


def build(context: SourceContext) -> "DatasetServer":
    """Raises UserError when the cache cannot be written."""
    return DatasetServer(
        context.url,
        context.run,
        key=PeerKey.read(context.peer.identity_file),
        token=context.token,
        cache_dir=context.peer.cache_folder,
        cache_bytes=int(context.peer.cache_gib * 2**30),
        batch_samples=context.batch_samples,
        window_samples=context.window_samples,
        known_hosts=context.known_hosts,
        end=context.end,
        bans=context.bans,
    )


class DatasetServer:
    """The source; see `build`. key: this peer's, which signs all that it says. Its methods are for one training thread.

    clock: in seconds; wall: UNIX seconds. rows: reads a shard's file. session, uniform: see `Transport`. background: see there.
    """

    def __init__(
        self,
        url: str,
        run: RunConfig,
        *,
        key: PeerKey,
        token: str = "",
        cache_dir: Path,
        cache_bytes: int,
        batch_samples: int,
        window_samples: int = 0,
        known_hosts: KnownHosts | None = None,
        end: End | None = None,
        bans: Bans | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rows: Callable[[Path, int], Sequence[Row]] = read_shard,
        session: Callable[[], Any] = open_session,
        uniform: Callable[[float, float], float] = random.uniform,
        background: Background | None = None,
    ):
        self._background = background or Background()
        self._run, self._peer_id, self._end = run, key.peer_id, end or End(run)
        self._bans = bans or Bans(run)
        self._work, self._rows = Work(batch_samples, clock, self._background.condition(), window_samples), rows
        self._cache = ShardCache(cache_dir, cache_bytes, pinned=self._work.pinned)
        self._transport = Transport(
            url, token, signer=Signer(key, wall), clock=clock, session=session, uniform=uniform, found_away=lambda: self._outbox.keep_rounds()
        )
        name = f"{run.run_id}-{key.peer_id}"
        self._shards = SignedShards(run, known_hosts, cache_dir / f"manifest-{name}.json")
        self._seen = Seen(cache_dir / f"seen-{name}.json" if known_hosts is not None else None)
        self._seen.pass_over(len(self._shards.of_epoch(self._seen.epoch)) if self._seen.epoch >= 0 else 0)
        unsaid = Unsaid(cache_dir / f"unsaid-{name}.jsonl")
        self._outbox = Outbox(unsaid, news=self._post, hear=self._bans.hear, result=self._background.result)
        self._renew_every = 20.0
        self._stop, self._hungry, self._must_renew, self._mail, self._short = (asyncio.Event() for _ in range(5))
        self._held_out: Sequence[Sample] | None = None
        self._accused: set[tuple[type, str]] = set()
        """Of whom the server was told a proof, and a state."""
        self._started = False

    # -- for the training thread

    def __iter__(self) -> Iterator[Sample]:
        self._work.begin()
        self._start()
        self._wake(self._hungry)
        for key, (image, caption) in self._work.samples(self._rows):
            # Each call wakes the other thread by a write to a pipe, and of a hundred samples one concerns it.
            if self._work.wanted() > 0:
                self._wake(self._hungry)
            if self._work.short():
                self._wake(self._short)
            yield Sample(key, image, caption, weight=self._shards.weight_of(key))

    def held_out(self) -> Sequence[Sample] | None:
        """Fetched once, from the start on; nobody waits for it."""
        self._start()
        return self._held_out

    def register(self, number: int, keys: Sequence[str]) -> str:
        """Tell the server what contribution `number` holds; goes on without its answer, and its receipt, when it is away for some seconds.

        Raises LeaseLost when the server says that samples of it are not ours.
        """
        self._work.register(keys)
        offered = {"offered": True} if self._work.any_own(keys) else {}  # nobody could have leased them to us
        letter = self._outbox.put(CONTRIBUTIONS, self._envelope(number=number, keys=list(keys), **offered))
        patience = 0.0 if self._transport.away_seconds() > REGISTER_SECONDS else REGISTER_SECONDS
        try:
            receipt = self._outbox.answered(letter, patience)
        except Refusal as refusal:
            raise LeaseLost(str(refusal)) from None
        if receipt is None:
            log.warning("the dataset server is away; contribution %d of %d samples will be registered later", number, len(keys))
        return receipt or ""

    def report_final(self, committed_round: CommittedRound) -> None:
        waits = len(self._outbox) > 0
        self._outbox.put(ROUNDS, self._envelope(**round_body(committed_round)))
        if waits or self._transport.away_seconds() > 0:  # behind another: of a server that is away nobody knows for 30 s
            self._outbox.keep_rounds()

    def report_proofs(self, accusations: Sequence[Accusation]) -> None:
        """Of each accused one of a kind, once; a sidecar that was started again says them again."""
        news = [each for each in accusations if (type(each), each.accused) not in self._accused]
        self._accused |= {(type(each), each.accused) for each in news}
        for begin in range(0, len(news), protocol.PROOFS_TOLD):
            self._send(PROOFS, proofs=[asdict(each) for each in news[begin : begin + protocol.PROOFS_TOLD]])

    def acknowledge(self, keys: Sequence[str]) -> None:
        for lease_id in self._work.forget(keys):
            self._release(lease_id)

    def rest(self, resting: bool) -> None:
        """Resting: what was leased ahead goes to others; what was yielded stays ours, and is renewed."""
        self.give_back(self._work.rest(resting))
        self._wake(self._hungry, self._short)

    def give_back(self, keys: Sequence[str]) -> None:
        for lease_id, some in self._work.by_lease(keys).items():
            self._release(lease_id, some)
        self.acknowledge(keys)

    def state_dict(self) -> dict[str, Any]:
        """What is unsaid, and which samples are held."""
        outbox = [{"path": letter.path, "body": letter.body} for letter in self._outbox.letters()]
        return {"outbox": outbox, **self._work.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the leases of the samples that were trained before, give the others back, and say what was unsaid."""
        for letter in state["outbox"]:
            self._outbox.put(letter["path"], dict(letter["body"]))
        self._work.load_state_dict(state)
        for lease_id, keys in state["untouched"].items():
            self._release(lease_id, keys)

    def close(self) -> None:
        """Release what is leased, try for some seconds to say what is unsaid, and end; iteration ends too."""
        leases = self._work.close()
        if leases is None:
            return
        letters = [self._release(lease_id) for lease_id in leases]
        if self._outbox:
            self._start()
            # For each: a server that takes one after the other is not away, only busy.
            with contextlib.suppress(FutureTimeout):
                for letter in [*self._outbox.letters(), *letters]:
                    with contextlib.suppress(Refusal):
                        self._background.result(letter.answer, CLOSE_SECONDS)
        if self._started:
            self._background.call(self._stop.set)
        self._background.close()
        if self._outbox:
            log.warning("%d reports did not reach the dataset server; its leases will expire", len(self._outbox))

    # -- between the threads

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._background.start(self._talk)

    def _post(self) -> None:
        self._start()
        self._wake(self._mail)

    def _wake(self, *events: asyncio.Event) -> None:
        for event in events:
            self._background.call(event.set)

    def _envelope(self, **body: Any) -> dict[str, Any]:
        return {"run_id": self._run.run_id, "peer": self._peer_id, **body}

    def _send(self, path: str, **body: Any) -> Letter:
        return self._outbox.put(path, self._envelope(**body))

    def _release(self, lease_id: str, keys: Sequence[str] | None = None) -> Letter:
        return self._send(f"/v1/leases/{lease_id}/release", keys=keys)

    # -- the thread that talks to the server

    async def _talk(self) -> None:
        async with self._transport:
            work = [self._feed, self._renew, self._deliver, self._bridge, *([self._fetch_held_out] if self._run.validation_split else [])]
            tasks = [asyncio.create_task(self._guard(part)) for part in work]
            await self._stop.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Whatever ends this work too soon must end the training as well, not leave it waiting for samples."""
        try:
            await work()
        except UserError as error:
            self._work.fail(error)
        except Refusal as refusal:
            self._work.fail(UserError(f"The dataset server refuses: {refusal.error.message}", fix=refusal.error.fix, code=ExitCode.NETWORK))
        except Exception as error:
            log.exception("talking to the dataset server failed")
            self._work.fail(UserError(f"Talking to the dataset server failed: {error!r}.", fix="Please report this.", code=ExitCode.FAILED))

    async def _feed(self) -> None:
        """Lease and fetch whenever less than some seconds of work is left."""
        while True:
            want = self._work.wanted()
            if want <= 0:
                self._hungry.clear()
                await self._hungry.wait()
                continue
            try:
                await self._lease_more(want)
            except Refusal as refusal:
                if refusal.code != "run_finished":
                    raise
                log.info("the run is finished")
                self._work.end()
                return

    async def _lease_more(self, want: int) -> None:
        answer = await self._transport.insist("/v1/leases", self._envelope(want_samples=want), protocol.LeaseAnswer)
        self._work.drop_own()
        self._work.pause(False)
        if answer.renew_every < self._renew_every:
            self._must_renew.set()
        self._renew_every = answer.renew_every
        await self._shards.check(self._transport, answer.shard_epochs)
        before = self._seen.epoch
        for shard in answer.shard_epochs:
            self._seen.lease(shard)
        if self._seen.epoch > before:
            await asyncio.to_thread(self._seen.keep)
        lease = Lease(answer.lease_id)
        shard_epochs = [ShardEpoch(lease, shard, self._order_of(shard)) for shard in answer.shard_epochs]
        if not self._work.add(lease, shard_epochs):  # granted while we were leaving
            self._release(lease.id)
            return
        for item in shard_epochs:
            await self._fetch(item)

    def _order_of(self, shard: protocol.LeasedShard) -> deque[int]:
        skip = set(shard.skip)
        order = protocol.shuffled(shard.samples, self._run.seed, "samples", shard.epoch, shard.shard)
        return deque(index for index in order if index not in skip)

    async def _fetch(self, item: ShardEpoch) -> None:
        """Bring the shard epoch's shard into the cache; gives the shard epoch back when it stays corrupt, or the server has it no more."""
        try:
            path = await fetch(self._transport, self._cache, item.shard.digest, item.shard.bytes, lambda: bool(item.left) and not item.lost)
        except (Corrupt, Refusal) as fault:
            log.error("%s The samples of shard %s are given back.", fault, item.shard.digest[:16])
            self.give_back(self._work.skip(item))
            await asyncio.sleep(_NO_SHARD_PAUSE_SECONDS)
            return
        if path:
            self._work.ready(item, path)

    async def _fetch_held_out(self) -> None:
        samples: list[Sample] = []
        try:
            for shard in await self._shards.held_out(self._transport):
                path = await fetch(self._transport, self._cache, shard.digest, shard.bytes, lambda: True)
                rows = await asyncio.to_thread(self._rows, path, shard.samples)
                samples += [Sample(f"held out:{shard.index}:{number}", *row) for number, row in enumerate(rows)]
        except (Corrupt, Refusal) as fault:
            log.error("%s This peer measures no held-out loss.", fault)
            samples = []
        self._held_out = samples

    async def _bridge(self) -> None:
        """While the server stays away and what was leased is done, train what is on the disk."""
        chosen: Iterator[protocol.LeasedShard] | None = None
        while True:
            self._short.clear()
            away = self._transport.away_seconds()
            if away < OUTAGE_SECONDS:
                chosen = None
            elif self._work.short():
                chosen = chosen or choose(self._shards.of_epoch, self._seen, self._cache.has, f"{self._run.seed}:{self._peer_id}")
                if await self._add_own(chosen):
                    continue
            left = OUTAGE_SECONDS - away
            await set_within(max(left, OUTAGE_SECONDS / 100) if left > 0 else OUTAGE_SECONDS, self._short)

    async def _add_own(self, chosen: Iterator[protocol.LeasedShard]) -> bool:
        """Whether there was one more shard epoch of our own choice, and its shard undamaged or at least not the last."""
        shard = next(chosen, None)
        if shard is None:
            return False
        await asyncio.to_thread(self._seen.keep)
        path = await asyncio.to_thread(self._cache.get, shard.digest)
        if path:
            log.info("the dataset server is still away: training shard %d of epoch %d from the disk", shard.shard, shard.epoch)
            self._work.add_own(ShardEpoch(None, shard, self._order_of(shard), path))
        return True

    async def _renew(self) -> None:
        while True:
            later = 0.0
            for lease in self._work.leases():
                try:
                    answer = await self._transport.post(f"/v1/leases/{lease.id}/renew", self._envelope(), protocol.RenewAnswer)
                    self._renew_every = answer.renew_every
                    self._work.pause(answer.state == "paused")
                    if answer.extension and self._end.extend(answer.extension.model_dump()):
                        log.info("the host has extended the run to %d samples", self._end.total)
                    self._bans.hear(answer.bans)
                    if answer.state == "ended":
                        self._work.end()
                except ServerAway as away:
                    log.debug("could not renew: %s", away)
                    later = away.wait_seconds
                    break  # the server gives every lease a full period when it comes back
                except Refusal as refusal:
                    if self._work.lose(lease):
                        log.warning("lost a lease of %d samples: %s", len(lease.keys), refusal.error.message)
                        self._hungry.set()
            await set_within(max(self._renew_every, later), self._must_renew)
            self._must_renew.clear()

    async def _deliver(self) -> None:
        while True:
            self._mail.clear()
            await self._outbox.deliver(self._transport)
            await self._mail.wait()
