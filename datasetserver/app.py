"""The HTTP interface: requests are checked by the models of `swarm.protocol`, answered from the ledger, errors are one form of JSON.

No path, header or body of a user ever reaches the file system: a shard is found by its digest in the manifest.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel

from datasetserver import answers, blobs
from datasetserver.addresses import is_this_machine, visible_maddrs
from datasetserver.book import Book
from datasetserver.founding import acceptable_run
from datasetserver.gate import Gate, caller, holds_token
from datasetserver.ingest import Ingested, manifest_path, shard_path
from datasetserver.ledger import Ledger
from datasetserver.limits import Limits
from datasetserver.metrics import CONTENT_TYPE, Metrics
from datasetserver.openapi import Endpoint, describe
from datasetserver.refused import Refused
from datasetserver.rendezvous import Rendezvous
from datasetserver.tokens import Tokens
from datasetserver.tree import State
from swarm import protocol
from swarm.digest import canonical_json, digest_json
from swarm.errors import UserError
from swarm.run_config import RunConfig
from swarm.signing import SIGNATURE_HEADER, HostKey

log = logging.getLogger(__name__)
Request = TypeVar("Request", bound=BaseModel)


@dataclass
class Service:
    """All that the handlers need. `url`: how peers reach this server; `key`: what its host signs with; `rendezvous`: None without a DHT.

    `run` and `ledger` are None until there is a run: the host's, or that of the first peer that founds one. `tokens`: None where
    whoever reaches the server may use it.
    """

    data: Ingested
    work_dir: Path
    url: str
    key: HostKey
    open_ledger: Callable[[RunConfig], Ledger]
    rendezvous: Rendezvous | None = None
    run: RunConfig | None = None
    ledger: Ledger | None = None
    tokens: Tokens | None = None
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.shards = {shard.digest: shard for shard in self.data.manifest.shards}
        self.manifest_bytes = manifest_path(self.work_dir).stat().st_size

    def begin(self, run: RunConfig) -> None:
        """Serve `run` from now on; it is on the disk when this returns. Raises UserError when the ledger is another run's."""
        self.ledger, self.run = self.open_ledger(run), run
        if self.rendezvous:
            self.rendezvous.tell(run_id=run.run_id, run=asdict(run))

    def live_peers(self) -> list[protocol.PeerInfo]:
        return self.rendezvous.peers() if self.rendezvous else []


SERVICE = web.AppKey("service", Service)
_CONDITIONS = ("If-Match", "If-None-Match", "If-Range", "Range")


def make_app(service: Service) -> web.Application:
    gate = Gate(ENDPOINTS, service.tokens, service.limits, service.metrics)
    app = web.Application(middlewares=[gate.middleware])
    app[SERVICE] = service
    for endpoint in ENDPOINTS:
        if endpoint.method == "GET":
            app.router.add_get(endpoint.route, endpoint.handler)  # HEAD too
        else:
            app.router.add_route(endpoint.method, endpoint.route, endpoint.handler)
    return app


# -- what anyone may read


async def healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def get_openapi(request: web.Request) -> web.Response:
    return web.Response(
        body=canonical_json(describe(ENDPOINTS, tokens=request.app[SERVICE].tokens is not None)), content_type="application/json"
    )


async def get_run(request: web.Request) -> web.Response:
    return await _run_answer(_with_run(request, status=404), caller(request))


async def _run_answer(service: Service, asker: str, status: int = 200) -> web.Response:
    maddrs = service.rendezvous.maddrs if service.rendezvous else []
    run = asdict(service.run)
    return answers.answer(
        protocol.RunAnswer(
            protocol=protocol.PROTOCOL_VERSION,
            run=run,
            run_id=service.run.run_id,
            url=service.url,
            initial_peers=visible_maddrs(maddrs, asker)[:64],
            manifest=service.data.digest,
            head=await service.ledger.call(_head),
            server_time=time.time(),
            host_key=service.key.public,
            signature=service.key.sign("run", digest_json(run)),
        ),
        status,
    )


async def get_peers(request: web.Request) -> web.Response:
    return answers.answer(protocol.PeersAnswer(peers=[_shown(peer, request) for peer in request.app[SERVICE].live_peers()]))


async def get_manifest(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    if request.match_info["digest"] != service.data.digest:
        raise Refused(404, "no_such_manifest", "This server has another dataset.", f"Its manifest is {service.data.digest}.")
    path, digest = manifest_path(service.work_dir), service.data.digest
    signature = {SIGNATURE_HEADER: service.key.sign("manifest", digest)}
    return await _send_file(
        request, path, digest=digest, size=service.manifest_bytes, content_type="application/json", further_headers=signature
    )


async def get_blob(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    shard = service.shards.get(request.match_info["digest"])
    if shard is None:
        raise Refused(404, "no_such_shard", "This dataset has no such shard.", f"See /v1/manifest/{service.data.digest}.")
    path = shard_path(service.work_dir, shard.digest)
    return await _send_file(
        request, path, digest=shard.digest, size=shard.bytes, content_type="application/x-tar", sent=service.metrics.sent
    )


async def _send_file(
    request: web.Request,
    path: Path,
    *,
    digest: str,
    size: int,
    content_type: str,
    further_headers: Mapping[str, str] = MappingProxyType({}),
    sent: Callable[[int], None] = lambda count: None,
) -> web.StreamResponse:
    """The file at `path` of `size` bytes with that digest, or the part of it that the request asks for; sent(bytes) is told how many left."""
    wanted = {name: ", ".join(request.headers.getall(name)) for name in _CONDITIONS if name in request.headers}
    selected = blobs.select(request.method, wanted, digest=digest, size=size)
    headers = {**_immutable(digest), "Accept-Ranges": "bytes", **further_headers}
    if selected.status == 304:
        return web.Response(status=304, headers=headers)
    if selected.status == 412:
        raise Refused(412, "precondition_failed", "The file's ETag is another.", "Ask without If-Match.")
    if selected.status == 416:
        whole = {"Content-Range": f"bytes */{size}"}
        raise answers.RefusedWith(416, "range_not_satisfiable", f"The file has {size} bytes.", "Ask for bytes that it has.", whole)
    if selected.status == 206:
        headers["Content-Range"] = f"bytes {selected.start}-{selected.start + selected.count - 1}/{size}"
    headers["Content-Type"] = content_type
    try:
        return await blobs.send(request, path, selected, headers, sent)
    except ConnectionError as error:
        log.debug("a client left before it had all of %s: %s", path.name[:20], error)
        raise asyncio.CancelledError from None  # what aiohttp expects of a request that nobody waits for; it logs all else as our fault
    except OSError as error:
        log.error("%s cannot be read: %s", path.name[:20], error)
        raise Refused(503, "file_unreadable", "The file cannot be read.", "Try again later; the host must look at its disk.") from None


async def get_progress(request: web.Request) -> web.Response:
    service = _with_run(request, status=404)
    peers = service.live_peers()
    figures = await service.ledger.call(_figures)
    speed = sum(peer.samples_per_second for peer in peers)
    losses = [(peer.loss, max(peer.samples_per_second, 1e-9)) for peer in peers if peer.loss is not None]
    return answers.answer(
        protocol.Progress(
            run_id=service.run.run_id,
            run_name=service.run.run_name,
            total_samples=service.run.total_samples,
            target_batch_size=service.run.target_batch_size,
            waiting_samples=sum(peer.waiting_samples for peer in peers),
            samples_per_second=speed,
            loss=sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses) if losses else None,
            peers=[_shown(peer, request) for peer in peers],
            dataset_samples=service.data.manifest.total,
            server_time=time.time(),
            **figures,
        )
    )


def _shown(peer: protocol.PeerInfo, request: web.Request) -> protocol.PeerInfo:
    """A volunteer's address is for those who hold a token, and for this machine; where no token is asked for, to others a peer has none."""
    asker = caller(request)
    known = holds_token(request) or is_this_machine(asker)
    return peer.model_copy(update={"maddrs": visible_maddrs(peer.maddrs, asker) if known else []})


async def get_metrics(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    figures = await service.ledger.call(_figures) if service.ledger else {}
    samples = figures["ledger"].model_dump() if figures else {}
    text = service.metrics.text(peers=len(service.live_peers()), figures=figures, samples=samples)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


# -- what peers do


async def put_run(request: web.Request) -> web.Response:
    service, asked = request.app[SERVICE], await answers.read(request, protocol.FoundRequest)
    run = acceptable_run(asked.run, service.data.first)
    new = service.run is None
    if new:  # no await from here to `begin`: of two founders at once, one is first
        try:
            service.begin(run)
        except UserError as error:
            raise Refused(503, "ledger_unavailable", error.message, error.fix) from None
        log.info("the run '%s' (%s) was founded by a peer at %s", run.run_name, run.run_id, caller(request))
    elif run.digest != service.run.digest:
        ours = asdict(service.run)
        name = next(name for name, value in asdict(run).items() if name != "model" and value != ours[name])
        raise Refused(
            409,
            "run_exists",
            f"This server has the run '{service.run.run_name}' ({service.run.run_id}), with {name} = {ours[name]}.",
            "Join that run, or give a run of your own another server.",
        )
    return await _run_answer(service, caller(request), 201 if new else 200)


async def post_lease(request: web.Request) -> web.Response:
    service, asked = await _for_run(request, protocol.LeaseRequest)

    def operation(book: Book) -> protocol.LeaseAnswer:
        grant = book.lease(asked.peer, asked.want_samples)
        units = [_leased_unit(service.data.manifest.shards[shard], epoch, skip) for (epoch, shard), skip in grant.units]
        return protocol.LeaseAnswer(lease_id=grant.lease_id, units=units, **_periods(book))

    return answers.answer(await service.ledger.call(operation), status=201)


async def post_renew(request: web.Request) -> web.Response:
    service, asked = await _for_run(request, protocol.RenewRequest)

    def operation(book: Book) -> protocol.RenewAnswer:
        book.renew(request.match_info["lease"], asked.peer)
        return protocol.RenewAnswer(**_periods(book), state=book.state)

    return answers.answer(await service.ledger.call(operation))


async def post_release(request: web.Request) -> web.Response:
    service, asked = await _for_run(request, protocol.ReleaseRequest)
    lease = request.match_info["lease"]
    released = await service.ledger.call(lambda book: book.release(lease, asked.peer, asked.keys))
    return answers.answer(protocol.ReleaseAnswer(released=released))


async def post_contribution(request: web.Request) -> web.Response:
    service, asked = await _for_run(request, protocol.ContributionRequest)

    def operation(book: Book) -> protocol.ContributionAnswer:
        contribution = book.contribute(asked.peer, asked.number, asked.keys, offered=asked.offered)
        counts = {"registered": contribution.samples, "repeated": contribution.repeated}
        return protocol.ContributionAnswer(**counts, counted=contribution.counted)

    return answers.answer(await service.ledger.call(operation))


async def post_round(request: web.Request) -> web.Response:
    service, asked = await _for_run(request, protocol.RoundRequest)
    members = tuple((member.peer, member.number, member.samples) for member in asked.members)

    def operation(book: Book) -> tuple[protocol.Head, bool]:
        new = book.tree.get(asked.digest) is None
        book.settle(State(asked.digest, asked.parent, asked.round, asked.samples, members), asked.peer)
        return _head(book), new

    head, new = await service.ledger.call(operation)
    if new:
        log.info("settled round=%d samples=%d members=%d digest=%s", asked.round, asked.samples, len(members), asked.digest[:16])
    return answers.answer(protocol.RoundAnswer(head=head))


# -- from the ledger's words to the protocol's


def _head(book: Book) -> protocol.Head | None:
    head = book.tree.head
    return head and protocol.Head(digest=head.digest, round=head.round, samples=head.samples, reporters=list(head.reporters))


def _figures(book: Book) -> dict:
    book.sweep()
    head, (epoch, epoch_samples) = book.tree.head, book.units.epoch_progress()
    return {
        "round": head.round if head else 0,
        "samples": head.samples if head else 0,
        "samples_by_peer": book.samples_by_peer(),
        "epoch": epoch,
        "epoch_samples": epoch_samples,
        "ledger": protocol.LedgerTotals(**book.units.totals()),
        "finished": book.state == "ended",
        "state": book.state,
    }


def _leased_unit(shard: protocol.Shard, epoch: int, skip: list[int]) -> protocol.LeasedUnit:
    return protocol.LeasedUnit(epoch=epoch, shard=shard.index, digest=shard.digest, bytes=shard.bytes, samples=shard.samples, skip=skip)


def _periods(book: Book) -> dict[str, float]:
    # A third of the period: two renewals must be lost in a row before a shard goes to another peer.
    return {"expires_in": book.lease_seconds, "renew_every": book.lease_seconds / 3}


# -- HTTP


def _with_run(request: web.Request, *, status: int) -> Service:
    """The service, which has a run and a ledger; Refused with `status` while it has none."""
    service = request.app[SERVICE]
    if service.run is None:
        message = f"This server has no run yet; its dataset is {service.data.digest}."
        raise Refused(status, "no_run", message, "Found one: start the first peer with --found and --model.")
    return service


async def _for_run(request: web.Request, model: type[Request]) -> tuple[Service, Request]:
    """The service and the request's body as `model`, which is about the run that is served. Raises Refused."""
    service, asked = _with_run(request, status=409), await answers.read(request, model)
    if asked.run_id != service.run.run_id:
        message = f"This server serves run {service.run.run_id}, not {asked.run_id}."
        raise Refused(409, "other_run", message, "Check the URL, or join this run.")
    return service, asked


def _immutable(digest: str) -> dict[str, str]:
    return {"ETag": f'"{digest}"', "Cache-Control": "public, max-age=31536000, immutable"}


ENDPOINTS = (
    Endpoint("GET", "/healthz", healthz, "Whether the server answers.", "application/json", public=True),
    Endpoint("GET", "/v1/openapi.json", get_openapi, "This description.", "application/json", public=True),
    Endpoint("GET", "/metrics", get_metrics, "Counters for Prometheus.", "text/plain"),
    Endpoint("GET", "/v1/run", get_run, "All that a newcomer needs.", protocol.RunAnswer),
    Endpoint("PUT", "/v1/run", put_run, "Found the run at a server that has none.", protocol.RunAnswer, protocol.FoundRequest, also=(201,)),
    Endpoint("GET", "/v1/peers", get_peers, "Live peers; with the addresses that it can dial for who holds a token.", protocol.PeersAnswer),
    Endpoint(
        "GET",
        "/v1/manifest/{digest}",
        get_manifest,
        "The dataset's shards, signed in a header by the host.",
        protocol.Manifest,
        also=(206, 304),
    ),
    Endpoint("GET", "/v1/blobs/{digest}.tar", get_blob, "A shard, a WebDataset tar.", "application/x-tar", also=(206, 304)),
    Endpoint("GET", "/v1/progress", get_progress, "How the run is doing.", protocol.Progress),
    Endpoint(
        "POST", "/v1/leases", post_lease, "Lease shards with about so many samples.", protocol.LeaseAnswer, protocol.LeaseRequest, 201
    ),
    Endpoint("POST", "/v1/leases/{lease}/renew", post_renew, "Keep a lease.", protocol.RenewAnswer, protocol.RenewRequest),
    Endpoint("POST", "/v1/leases/{lease}/release", post_release, "Give samples back.", protocol.ReleaseAnswer, protocol.ReleaseRequest),
    Endpoint(
        "POST",
        "/v1/contributions",
        post_contribution,
        "Register what a contribution holds.",
        protocol.ContributionAnswer,
        protocol.ContributionRequest,
    ),
    Endpoint("POST", "/v1/rounds", post_round, "Report a settled state.", protocol.RoundAnswer, protocol.RoundRequest),
)
