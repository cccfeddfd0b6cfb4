"""Samples leased from a dataset server: shards fetched ahead in the background, every sample reported for once, and only once.

One thread with its own event loop talks to the server; the training thread never waits for the network unless it runs out of
samples. While the server is away, what was fetched is trained, and what there is to report waits in an outbox, in order.
"""

import asyncio
import contextlib
import json
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from peer.contracts import LeaseLost, Sample, Settlement, SourceContext
from peer.data.shards import ShardCache, read_shard
from peer.data.unsaid import Unsaid
from swarm import protocol
from swarm.digest import digest_bytes, digest_json
from swarm.errors import ExitCode, UserError
from swarm.run_config import RunConfig
from swarm.signing import SIGNATURE_HEADER, BadSignature, KnownHosts, check_signature

log = logging.getLogger(__name__)
Answer = TypeVar("Answer", bound=BaseModel)
AHEAD_SECONDS = 10.0
"""Lease so much work ahead, by the measured speed, and at least two batches."""
REGISTER_SECONDS = 5.0
CLOSE_SECONDS = 5.0
_CONTRIBUTIONS = "/v1/contributions"
_NO_LEASE = "0" * 32
_MAX_ANSWER_BYTES = 64 << 20
_CORRUPT_TRIES = 3


class ServerAway(Exception):
    """No answer, or one that says to try later: not before `wait_seconds` have passed, where it says when."""

    def __init__(self, message: str, wait_seconds: float = 0.0):
        super().__init__(message)
        self.wait_seconds = wait_seconds


class Refusal(Exception):
    """The server understood and said no."""

    def __init__(self, status: int, error: protocol.ErrorBody):
        super().__init__(f"{error.message} {error.fix}")
        self.status, self.code, self.error = status, error.code, error


def build(context: SourceContext) -> "DatasetServer":
    """Raises UserError when no server is given or the cache cannot be written."""
    if not context.url:
        raise UserError("No dataset server is given.", fix="Give --datasetserver http://HOST:9090, or --train_data_dir DIR.")
    return DatasetServer(
        context.url,
        context.run,
        peer_id=context.peer_id,
        token=context.token,
        cache_dir=context.cache_dir,
        cache_bytes=int(context.cache_gib * 2**30),
        batch_samples=context.batch_samples,
        known_hosts=context.known_hosts,
    )


def fetch_run(
    url: str, timeout: float = 10.0, *, run_id: str = "", token: str = "", known_hosts: KnownHosts | None = None
) -> protocol.RunAnswer | None:
    """Ask a server what it serves, None if nothing was founded there yet; tries again for `timeout` seconds while nobody answers.

    Raises UserError (exit code NETWORK) when nobody answers, it is no dataset server, of another version, or has another run; with code
    AUTH when it wants another token, or what it says is not signed by its host, or by another host than `known_hosts` has.
    """
    status, body = asyncio.run(_ask("GET", url, None, timeout, token))
    if status == 404 and _code(body) == "no_run":
        return None
    return check_run(url, status, body, run_id, known_hosts)


def found_run(
    url: str, run: RunConfig, timeout: float = 10.0, *, token: str = "", known_hosts: KnownHosts | None = None
) -> protocol.RunAnswer:
    """Offer `run` to a server that has none. The answer is what it serves from now on: this run, or that of a founder who was faster.

    Raises UserError as `fetch_run` does, and when the server finds fault with `run`.
    """
    status, body = asyncio.run(_ask("PUT", url, {"run": asdict(run)}, timeout, token))
    if status == 409 and _code(body) == "run_exists":
        status, body = asyncio.run(_ask("GET", url, None, timeout, token))
    elif _code(body):
        error = protocol.ErrorAnswer.model_validate_json(body).error
        raise UserError(f"{url} does not take this run: {error.message}", fix=error.fix)
    return check_run(url, status, body, known_hosts=known_hosts)


def report_round(url: str, run: RunConfig, peer_id: str, settlement: Settlement, timeout: float = 10.0, *, token: str = "") -> None:
    """Tell the server of a settled round, once; for who takes no samples. Raises UserError (NETWORK) when it does not answer."""
    body = {"run_id": run.run_id, "peer": peer_id, **_round(settlement)}
    status, answer = asyncio.run(_ask("POST", url, body, timeout, token, path="/v1/rounds"))
    if status >= 300:  # old news to a server that knows better is no fault
        log.warning("the dataset server did not take round %d: status %d %s", settlement.round, status, _code(answer))


def _round(settlement: Settlement) -> dict[str, Any]:
    members = [{"peer": member.peer, "number": member.number, "samples": member.samples} for member in settlement.members]
    return {**{name: getattr(settlement, name) for name in ("digest", "parent", "round", "samples")}, "members": members}


def _code(body: bytes) -> str:
    """The code of an error that a dataset server answered; '' when this is none."""
    try:
        return protocol.ErrorAnswer.model_validate_json(body).error.code
    except ValidationError:
        return ""


async def _ask(method: str, url: str, json_body: Any, timeout: float, token: str, path: str = "/v1/run") -> tuple[int, bytes]:
    """Status and body of the server's answer. Raises UserError when nobody answers within `timeout` seconds, or the token opens nothing."""
    deadline, pause = time.monotonic() + timeout, 0.2
    async with aiohttp.ClientSession(headers=_authorization(token)) as session:
        while True:
            left = max(0.1, deadline - time.monotonic())
            try:
                ask = session.request(method, _join(url, path), json=json_body, timeout=aiohttp.ClientTimeout(total=left))
                async with ask as response:
                    status, body = response.status, await _read(response)
                    wait = _retry_after(response)
                _refuse_stranger(url, status, body)
                if status != 429 and not (status >= 500 and _code(body)):
                    return status, body
                pause = max(pause, wait)
                raise ServerAway(f"status {status} ({_code(body) or 'try later'})")
            except aiohttp.ClientConnectorCertificateError as error:
                raise _distrusted(url, error) from None
            except aiohttp.InvalidURL:
                raise UserError(f"'{url}' is no URL.", fix="It looks like http://203.0.113.7:9090.", code=ExitCode.NETWORK) from None
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ServerAway) as error:
                if time.monotonic() + pause > deadline:
                    reason = str(error) or "no answer in time"
                    raise UserError(
                        f"The dataset server {url} does not answer: {reason}.",
                        fix="Check the URL, that the server runs, and that its port is open.",
                        code=ExitCode.NETWORK,
                    ) from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds that the server asks us to wait, at most an hour; 0 when it does not say. A date, RFC 9110's other form, is said as a minute."""
    said = response.headers.get("Retry-After", "").strip()
    return float(min(int(said), 3600)) if said.isdecimal() and len(said) < 10 else 60.0 if said else 0.0


def _authorization(token: str) -> dict[str, str]:
    """The header that shows a token; none without one. aiohttp drops it when it is sent on to another host."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def _refuse_stranger(url: str, status: int, body: bytes) -> None:
    """Raise UserError (exit code AUTH) when the server wants a token, or another one."""
    if status == 401 and _code(body):
        error = protocol.ErrorAnswer.model_validate_json(body).error
        raise UserError(f"{url}: {error.message}", fix=error.fix, code=ExitCode.AUTH)


def _distrusted(url: str, error: aiohttp.ClientConnectorCertificateError) -> UserError:
    reason = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
    return UserError(
        f"{url} shows a certificate that is not trusted: {reason}.",
        fix="Use the name that the certificate is for; where the host signed it itself, get the file and set SSL_CERT_FILE to it.",
        code=ExitCode.NETWORK,
    )


def check_run(url: str, status: int, body: bytes, run_id: str = "", known_hosts: KnownHosts | None = None) -> protocol.RunAnswer:
    """What a server answered to GET /v1/run. Raises UserError as `fetch_run` does."""

    def wrong(what: str, fix: str) -> UserError:
        return UserError(f"{url} {what}.", fix=fix, code=ExitCode.NETWORK)

    try:
        values = json.loads(body)
        version = values["protocol"]
    except (ValueError, KeyError, TypeError):
        raise wrong(f"answers, but is no dataset server (status {status}, {body[:40]!r})", "Check the URL and the port.") from None
    if version != protocol.PROTOCOL_VERSION:
        raise wrong(f"speaks protocol {version}, this program {protocol.PROTOCOL_VERSION}", "Use the same version of the program on both.")
    try:
        answer = protocol.RunAnswer.model_validate(values)
        run = RunConfig.from_mapping(answer.run, where=url)
    except (ValidationError, UserError) as error:
        first = str(error).splitlines()[0]
        raise wrong(f"describes its run in a way this program does not know: {first}", "Use the same version on both.") from None
    try:
        check_signature("run", digest_json(answer.run), answer.signature, answer.host_key)
    except BadSignature as error:
        raise _unsigned(url, "a run", error) from None
    if run.run_id != answer.run_id:
        raise wrong(f"calls its run {answer.run_id}, but its configuration makes it {run.run_id}", "Use the same version on both.")
    if run_id not in ("", answer.run_id):
        raise wrong(f"serves run {answer.run_id} ('{run.run_name}'), not {run_id}", "Check the URL, or remove --run_id.")
    if known_hosts:
        known_hosts.check(url, answer.run_id, answer.host_key)
    return answer


def _unsigned(url: str, what: str, error: BadSignature) -> UserError:
    fix = "Somebody may have changed it on its way: use https, or ask the host."
    return UserError(f"{url} serves {what} that its host does not vouch for: {error}.", fix=fix, code=ExitCode.AUTH)


def _join(url: str, path: str) -> str:
    return url.rstrip("/") + path


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, which may not be endless. Raises ServerAway for one that is too long."""
    body = bytearray()
    async for piece in response.content.iter_chunked(1 << 16):
        body += piece
        if len(body) > _MAX_ANSWER_BYTES:
            raise ServerAway(f"an answer of more than {_MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(body)


@dataclass(eq=False)
class _Lease:
    """keys: samples of it that are neither done with nor given back. lost: the server may have given them to others."""

    id: str
    keys: set[str] = field(default_factory=set)
    lost: bool = False


@dataclass(eq=False)
class _Unit:
    """A leased shard in an epoch; `left`: indices not yielded yet, in the order to train them. path: None until it is fetched."""

    lease: _Lease
    shard: protocol.LeasedUnit
    left: deque[int]
    path: Path | None = None

    def key(self, index: int) -> str:
        return protocol.sample_key(self.shard.epoch, self.shard.shard, index)


@dataclass(eq=False)
class _Letter:
    """Something to report, kept until the server has it. `answer`: the result, or Refusal."""

    path: str
    body: dict[str, Any]
    answer: Future = field(default_factory=Future)


class DatasetServer:
    """The source; see `build`. Its methods are for one training thread."""

    def __init__(
        self,
        url: str,
        run: RunConfig,
        *,
        peer_id: str,
        token: str = "",
        cache_dir: Path,
        cache_bytes: int,
        batch_samples: int,
        known_hosts: KnownHosts | None = None,
    ):
        self._known_hosts = known_hosts
        self._shards: dict[int, protocol.Shard] = {}  # those that the host has signed
        self._url, self._run, self._peer_id, self._token, self._batch = url, run, peer_id, token, batch_samples
        self._cache = ShardCache(cache_dir, cache_bytes, pinned=self._pinned)
        self._changed = threading.Condition()  # guards all below; notified when a unit is ready or there will be none
        self._leases: dict[str, _Lease] = {}
        self._lease_of: dict[str, _Lease] = {}
        self._open: set[str] = set()  # yielded, and neither done with nor given back
        self._units: deque[_Unit] = deque()
        self._unsaid = Unsaid(cache_dir / f"unsaid-{run.run_id}-{peer_id}.jsonl")
        self._outbox: deque[_Letter] = deque(_Letter(_CONTRIBUTIONS, body) for body in self._unsaid.letters())
        self._ended = self._closed = False
        self._failure: UserError | None = None
        self._renew_every = 20.0
        self._speed = _Speed()
        self._loop = asyncio.new_event_loop()
        self._stop, self._wake_feed, self._wake_renew, self._wake_outbox = (asyncio.Event() for _ in range(4))
        self._thread = threading.Thread(target=self._work, name="dataset-server-client", daemon=True)
        self._started = False

    # -- for the training thread

    def __iter__(self) -> Iterator[Sample]:
        self._start()
        while (unit := self._next_unit()) is not None:
            rows = read_shard(unit.path)
            while (index := self._next_index(unit)) is not None:
                yield Sample(unit.key(index), *rows[index])

    def register(self, number: int, keys: Sequence[str]) -> None:
        """Tell the server what contribution `number` holds; goes on without its answer when it is away for some seconds.

        Raises LeaseLost when the server says that samples of it are not ours.
        """
        letter = self._send(_CONTRIBUTIONS, number=number, keys=list(keys))
        try:
            letter.answer.result(REGISTER_SECONDS)
        except FutureTimeout:
            self._unsaid.keep(letter.body)
            if letter.answer.done():  # meanwhile
                self._unsaid.said(letter.body)
            log.warning("the dataset server is away; contribution %d of %d samples will be registered later", number, len(keys))
        except Refusal as refusal:
            raise LeaseLost(number, str(refusal)) from None

    def settle(self, settlement: Settlement) -> None:
        self._send("/v1/rounds", **_round(settlement))

    def acknowledge(self, keys: Sequence[str]) -> None:
        self._forget(keys)

    def give_back(self, keys: Sequence[str]) -> None:
        if keys:
            self._send(f"/v1/leases/{_NO_LEASE}/release", keys=list(keys))
        self._forget(keys)

    def state_dict(self) -> dict[str, Any]:
        """What is unsaid, and which samples are held: those yielded and open by lease, and those never yielded."""
        with self._changed:
            untouched = {unit.key(index) for unit in self._units for index in unit.left}
            return {
                "outbox": [{"path": letter.path, "body": letter.body} for letter in self._outbox],
                "leases": {lease.id: sorted(lease.keys - untouched) for lease in self._leases.values()},
                "untouched": sorted(untouched),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the leases of the samples that were trained before, give the others back, and say what was unsaid."""
        with self._changed:
            self._outbox.extend(_Letter(letter["path"], dict(letter["body"])) for letter in state["outbox"])
            for lease_id, keys in state["leases"].items():
                lease = self._leases[lease_id] = _Lease(lease_id, set(keys))
                self._lease_of.update(dict.fromkeys(keys, lease))
                self._open.update(keys)
        self.give_back(list(state["untouched"]))

    def close(self) -> None:
        """Release what is leased, try for some seconds to say what is unsaid, and end; iteration ends too."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._units.clear()
            leases = list(self._leases)
            self._changed.notify_all()
        letters = [self._send(f"/v1/leases/{lease_id}/release", keys=None) for lease_id in leases]
        if self._outbox:
            self._start()
            # For each: a server that takes one after the other is not away, only busy.
            with contextlib.suppress(FutureTimeout):
                for letter in [*self._outbox, *letters]:
                    with contextlib.suppress(Refusal):
                        letter.answer.result(CLOSE_SECONDS)
        if self._started:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._loop.close()
        if self._outbox:
            log.warning("the dataset server is away: %d reports were not delivered, its leases will expire", len(self._outbox))

    # -- shared state

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._thread.start()

    def _next_unit(self) -> _Unit | None:
        """The first unit with samples left, once it is fetched; None when closed or when the run has ended."""
        with self._changed:
            while True:
                while self._units and (self._units[0].lease.lost or not self._units[0].left):
                    self._units.popleft()
                if self._failure:
                    raise self._failure
                if self._closed or self._ended:
                    return None
                if self._units and self._units[0].path:
                    return self._units[0]
                self._speed.pause()
                self._changed.wait()

    def _next_index(self, unit: _Unit) -> int | None:
        with self._changed:
            if self._closed or self._ended or self._failure or unit.lease.lost or not unit.left:
                return None
            self._speed.count()
            index = unit.left.popleft()
            self._open.add(unit.key(index))
        self._wake(self._wake_feed)
        return index

    def _forget(self, keys: Sequence[str]) -> None:
        """These samples are done with; a lease without any others is, too."""
        done = []
        with self._changed:
            self._open.difference_update(keys)
            for key in keys:
                lease = self._lease_of.pop(key, None)
                if lease is None:
                    continue
                lease.keys.discard(key)
                if not lease.keys and self._leases.pop(lease.id, None):
                    done.append(lease.id)
        for lease_id in done:
            self._send(f"/v1/leases/{lease_id}/release", keys=None)

    def _send(self, path: str, **body: Any) -> _Letter:
        letter = _Letter(path, {"run_id": self._run.run_id, "peer": self._peer_id, **body})
        with self._changed:
            self._outbox.append(letter)
        self._start()
        self._wake(self._wake_outbox)
        return letter

    def _wake(self, event: asyncio.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody to wake
            self._loop.call_soon_threadsafe(event.set)

    def _pinned(self) -> set[str]:
        with self._changed:
            return {unit.shard.digest for unit in self._units}

    def _fail(self, error: UserError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    # -- the thread that talks to the server

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._talk())

    async def _talk(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60)
        async with aiohttp.ClientSession(timeout=timeout, headers=_authorization(self._token)) as session:
            self._session = session
            tasks = [asyncio.create_task(self._guard(work)) for work in (self._feed, self._renew, self._deliver)]
            await self._stop.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Whatever ends this work too soon must end the training as well, not leave it waiting for samples."""
        try:
            await work()
        except UserError as error:
            self._fail(error)
        except Refusal as refusal:
            self._fail(UserError(f"The dataset server refuses: {refusal.error.message}", fix=refusal.error.fix, code=ExitCode.NETWORK))
        except Exception as error:
            log.exception("talking to the dataset server failed")
            self._fail(UserError(f"Talking to the dataset server failed: {error!r}.", fix="Please report this.", code=ExitCode.FAILED))

    async def _feed(self) -> None:
        """Lease and fetch whenever less than AHEAD_SECONDS of work is left."""
        while True:
            want = self._wanted()
            if want <= 0:
                self._wake_feed.clear()
                await self._wake_feed.wait()
                continue
            try:
                await self._lease_more(want)
            except Refusal as refusal:
                if refusal.code != "run_finished":
                    raise
                log.info("the run is finished")
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return

    def _wanted(self) -> int:
        with self._changed:
            if self._closed:
                return 0
            ahead = sum(len(unit.left) for unit in self._units if not unit.lease.lost)
            return min(int(max(2 * self._batch, AHEAD_SECONDS * self._speed.rate)) - ahead, protocol.MAX_KEYS)

    async def _lease_more(self, want: int) -> None:
        answer = await self._insist(protocol.LeaseAnswer, "/v1/leases", self._envelope(want_samples=want))
        if answer.renew_every < self._renew_every:
            self._wake_renew.set()
        self._renew_every = answer.renew_every
        await self._check_shards(answer.units)
        lease = _Lease(answer.lease_id)
        units = [_Unit(lease, shard, self._order_of(shard)) for shard in answer.units]
        lease.keys = {unit.key(index) for unit in units for index in unit.left}
        with self._changed:
            self._leases[lease.id] = lease
            self._lease_of.update(dict.fromkeys(lease.keys, lease))
            for unit in units:  # ours to finish, by this lease, if we lost them with an earlier one while they were in work
                unit.left = deque(index for index in unit.left if unit.key(index) not in self._open)
            closed = self._closed
            if not closed:
                self._units.extend(units)
        if closed:  # granted while we were leaving
            self._send(f"/v1/leases/{lease.id}/release", keys=None)
            return
        for unit in units:
            if not lease.lost:
                await self._fetch(unit)

    async def _check_shards(self, units: Sequence[protocol.LeasedUnit]) -> None:
        """Raise UserError (AUTH) unless every one of `units` is a shard that the host has signed, as it has signed it."""
        if all(map(self._is_signed, units)):
            return
        await self._learn_shards()  # the first time, or when the dataset has grown
        if not all(map(self._is_signed, units)):
            raise _unsigned(self._url, "shards", BadSignature("they are not in its manifest"))

    def _is_signed(self, unit: protocol.LeasedUnit) -> bool:
        shard = self._shards.get(unit.shard)
        return shard is not None and (shard.digest, shard.bytes, shard.samples) == (unit.digest, unit.bytes, unit.samples)

    async def _learn_shards(self) -> None:
        """Read the manifest. Raises UserError when it, or the run, is not signed by the host that we know."""
        status, body, _ = await self._insist_get("/v1/run")
        answer = check_run(self._url, status, body, self._run.run_id, self._known_hosts)
        _, body, headers = await self._insist_get(f"/v1/manifest/{answer.manifest}")
        try:
            if digest_bytes(body) != answer.manifest:
                raise BadSignature("it is another manifest than it says")
            check_signature("manifest", answer.manifest, headers.get(SIGNATURE_HEADER, ""), answer.host_key)
            manifest = protocol.Manifest.model_validate_json(body)
        except BadSignature as error:
            raise _unsigned(self._url, "a manifest", error) from None
        except ValidationError as error:
            first = str(error).splitlines()[0]
            message = f"{self._url} describes its dataset in a way this program does not know: {first}."
            raise UserError(message, fix="Use the same version on both.", code=ExitCode.NETWORK) from None
        self._shards = {shard.index: shard for shard in manifest.shards}

    async def _insist_get(self, path: str) -> tuple[int, bytes, Mapping[str, str]]:
        """Get until the server answers; (status, body, headers). Raises Refusal, and UserError when it no longer takes our token."""
        pause = 1.0
        while True:
            try:
                return await self._get(path)
            except ServerAway as away:
                pause = await self._pause(pause, path, away)

    async def _get(self, path: str) -> tuple[int, bytes, Mapping[str, str]]:
        try:
            async with self._session.get(_join(self._url, path)) as response:
                status, body, wait = response.status, await _read(response), _retry_after(response)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise ServerAway(str(error) or type(error).__name__) from None
        _refuse_stranger(self._url, status, body)
        if status == 200:
            return status, body, response.headers
        try:
            error = protocol.ErrorAnswer.model_validate_json(body).error
        except ValidationError:
            raise ServerAway(f"status {status}, not as a dataset server answers", wait) from None
        if status >= 500 or status == 429:
            raise ServerAway(f"status {status} ({error.code})", wait)
        raise Refusal(status, error)

    def _order_of(self, shard: protocol.LeasedUnit) -> deque[int]:
        skip = set(shard.skip)
        order = protocol.shuffled(shard.samples, self._run.seed, "samples", shard.epoch, shard.shard)
        return deque(index for index in order if index not in skip)

    async def _fetch(self, unit: _Unit) -> None:
        """Bring the unit's shard into the cache, resuming where a connection broke; gives the unit back when it stays corrupt."""
        digest, corrupt, pause = unit.shard.digest, 0, 1.0
        try:
            path = await asyncio.to_thread(self._cache.get, digest)
            while path is None and not unit.lease.lost:
                self._cache.make_room(unit.shard.bytes)
                try:
                    await self._download(digest, unit.shard.bytes)
                except ServerAway as away:
                    pause = await self._pause(pause, f"shard {digest[:16]}", away)
                    continue
                path = await asyncio.to_thread(self._cache.admit, digest)
                corrupt += path is None
                if corrupt == _CORRUPT_TRIES:
                    log.error("shard %s arrived corrupt %d times; its samples are given back", digest[:16], corrupt)
                    self.give_back([unit.key(index) for index in unit.left])
                    with self._changed:
                        unit.left.clear()
                        self._changed.notify_all()
                    await asyncio.sleep(30)
                    return
                if path is None:
                    log.warning("shard %s arrived corrupt; fetching it again", digest[:16])
        except OSError as error:
            raise UserError(
                f"Cannot keep shards on the disk: {error.strerror or error}.",
                fix="Free some space, or choose another --cache_dir.",
                code=ExitCode.DISK,
            ) from None
        with self._changed:
            unit.path = path
            self._changed.notify_all()

    async def _download(self, digest: str, size: int) -> None:
        """Append what is missing to the shard's part. Raises ServerAway when it ends early."""
        part = self._cache.part(digest)
        have = part.stat().st_size if part.exists() else 0
        if have >= size:
            return
        headers = {"Range": f"bytes={have}-"} if have else {}
        try:
            async with self._session.get(_join(self._url, f"/v1/blobs/{digest}.tar"), headers=headers) as response:
                if response.status not in (200, 206):
                    _refuse_stranger(self._url, response.status, await _read(response))
                    raise ServerAway(f"status {response.status}", _retry_after(response))
                with part.open("ab" if response.status == 206 else "wb") as file:
                    async for piece in response.content.iter_chunked(1 << 20):
                        file.write(piece)
                        if file.tell() > size:
                            return  # more than the shard has: its digest will not be right
        except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError) as error:
            raise ServerAway(str(error) or type(error).__name__) from None
        if part.stat().st_size < size:
            raise ServerAway(f"{part.stat().st_size} of {size} bytes")

    async def _renew(self) -> None:
        while True:
            later = 0.0
            with self._changed:
                leases = list(self._leases.values())
            for lease in leases:
                try:
                    answer = await self._post(protocol.RenewAnswer, f"/v1/leases/{lease.id}/renew", self._envelope())
                    self._renew_every = answer.renew_every
                except ServerAway as away:
                    log.debug("could not renew: %s", away)
                    later = away.wait_seconds
                    break  # the server gives every lease a full period when it comes back
                except Refusal as refusal:
                    self._lose(lease, refusal)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake_renew.wait(), max(self._renew_every, later))
            self._wake_renew.clear()

    def _lose(self, lease: _Lease, refusal: Refusal) -> None:
        with self._changed:
            if self._leases.pop(lease.id, None) is None:
                return  # done with it while we asked
            lease.lost = True
            for key in lease.keys:
                self._lease_of.pop(key, None)
            self._changed.notify_all()
        log.warning("lost a lease of %d samples: %s", len(lease.keys), refusal.error.message)
        self._wake(self._wake_feed)

    async def _deliver(self) -> None:
        """Bring the outbox to the server, letter by letter, in order."""
        while True:
            self._wake_outbox.clear()
            while self._outbox:
                letter = self._outbox[0]
                try:
                    answer: Any = await self._insist(None, letter.path, letter.body)
                except Refusal as refusal:
                    # Old news to a server that knows better is no fault; what is refused will be refused again.
                    log.warning("the dataset server refused %s: %s", letter.path.rpartition("/")[2], refusal)
                    answer = refusal
                with self._changed:
                    self._outbox.popleft()
                if isinstance(answer, Refusal):
                    letter.answer.set_exception(answer)
                else:
                    letter.answer.set_result(answer)
                if letter.path == _CONTRIBUTIONS:
                    self._unsaid.said(letter.body)
            await self._wake_outbox.wait()

    def _envelope(self, **body: Any) -> dict[str, Any]:
        return {"run_id": self._run.run_id, "peer": self._peer_id, **body}

    async def _insist(self, model: type[Answer] | None, path: str, body: Mapping[str, Any]) -> Any:
        """Post until the server answers: again after 1, 2, 4 .. 30 seconds. Raises Refusal."""
        pause = 1.0
        while True:
            try:
                return await self._post(model, path, body)
            except ServerAway as away:
                pause = await self._pause(pause, path, away)

    async def _pause(self, seconds: float, what: str, away: ServerAway) -> float:
        """Sleep before another try, with jitter so that a swarm does not return as one; returns the next pause."""
        log.log(logging.WARNING if seconds == 1.0 else logging.DEBUG, "the dataset server is away (%s): %s", what, away)
        await asyncio.sleep(max(seconds * random.uniform(0.75, 1.25), away.wait_seconds * random.uniform(1.0, 1.25)))
        return min(2 * seconds, 30.0)

    async def _post(self, model: type[Answer] | None, path: str, body: Mapping[str, Any]) -> Any:
        """One request. Raises ServerAway, Refusal when the server says no, and UserError when it no longer takes our token."""
        try:
            async with self._session.post(_join(self._url, path), json=body, timeout=aiohttp.ClientTimeout(total=30)) as response:
                status, data, wait = response.status, await _read(response), _retry_after(response)
                _refuse_stranger(self._url, status, data)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise ServerAway(str(error) or type(error).__name__) from None
        try:
            if status < 300:
                return model.model_validate_json(data) if model else None
            error = protocol.ErrorAnswer.model_validate_json(data).error
        except ValidationError:
            raise ServerAway(f"status {status} and something that is no answer of a dataset server", wait) from None
        if status >= 500 or status == 429:
            raise ServerAway(f"status {status}: {error.message}", wait)
        raise Refusal(status, error)


class _Speed:
    """Samples per second that the training takes, while it has some to take."""

    def __init__(self) -> None:
        self.rate, self._count, self._since = 0.0, 0, None

    def count(self) -> None:
        now = time.monotonic()
        if self._since is None:
            self._count, self._since = 0, now
        self._count += 1
        if now - self._since >= 2.0:
            self.rate, self._since = self._count / (now - self._since), None

    def pause(self) -> None:
        """The training waits for samples: the time it waits says nothing of its speed."""
        self._since = None
