"""The HTTP interface: requests are checked by the models of `swarm.protocol`, answered from the ledger, errors are one form of JSON.

No path, header or body of a user ever reaches the file system: a shard is found by its digest in the manifest.
"""

import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from datasetserver.addresses import caller_address, visible_maddrs
from datasetserver.book import Book, Refused
from datasetserver.founding import acceptable_run
from datasetserver.ingest import Ingested, shard_path
from datasetserver.ledger import Ledger
from datasetserver.rendezvous import Rendezvous
from datasetserver.tree import State
from swarm import protocol
from swarm.digest import canonical_json
from swarm.errors import UserError
from swarm.run_config import RunConfig

log = logging.getLogger(__name__)
Request = TypeVar("Request", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_FIXES = {
    404: "See the list of endpoints in docs/http.md.",
    405: "Use the method that docs/http.md gives.",
    413: "Send less at a time.",
}


@dataclass
class Service:
    """All that the handlers need. `url`: how peers reach this server; `rendezvous`: None without a DHT.

    `run` and `ledger` are None until there is a run: the host's, or that of the first peer that founds one.
    """

    data: Ingested
    work_dir: Path
    url: str
    open_ledger: Callable[[RunConfig], Ledger]
    rendezvous: Rendezvous | None = None
    run: RunConfig | None = None
    ledger: Ledger | None = None

    def __post_init__(self) -> None:
        self.shards = {shard.digest: shard for shard in self.data.manifest.shards}
        self.manifest_json = canonical_json(self.data.manifest.model_dump())

    def begin(self, run: RunConfig) -> None:
        """Serve `run` from now on; it is on the disk when this returns. Raises UserError when the ledger is another run's."""
        self.ledger, self.run = self.open_ledger(run), run
        if self.rendezvous:
            self.rendezvous.tell(run_id=run.run_id, run=asdict(run))

    def live_peers(self) -> list[protocol.PeerInfo]:
        return self.rendezvous.peers() if self.rendezvous else []


SERVICE = web.AppKey("service", Service)


def make_app(service: Service) -> web.Application:
    app = web.Application(middlewares=[_errors_as_json], client_max_size=protocol.MAX_BODY_BYTES)
    app[SERVICE] = service
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/v1/run", get_run),
            web.put("/v1/run", put_run),
            web.get("/v1/peers", get_peers),
            web.get("/v1/manifest/{digest:[0-9a-f]{64}}", get_manifest),
            web.get("/v1/blobs/{digest:[0-9a-f]{64}}.tar", get_blob),
            web.get("/v1/progress", get_progress),
            web.post("/v1/leases", post_lease),
            web.post("/v1/leases/{lease:[0-9a-f]{32}}/renew", post_renew),
            web.post("/v1/leases/{lease:[0-9a-f]{32}}/release", post_release),
            web.post("/v1/contributions", post_contribution),
            web.post("/v1/rounds", post_round),
        ]
    )
    return app


# -- what anyone may read


async def healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def get_run(request: web.Request) -> web.Response:
    return await _run_answer(_with_run(request, status=404), _caller(request))


async def _run_answer(service: Service, caller: str, status: int = 200) -> web.Response:
    maddrs = service.rendezvous.maddrs if service.rendezvous else []
    return _json(
        protocol.RunAnswer(
            protocol=protocol.PROTOCOL_VERSION,
            run=asdict(service.run),
            run_id=service.run.run_id,
            url=service.url,
            initial_peers=visible_maddrs(maddrs, caller)[:64],
            manifest=service.data.digest,
            head=await service.ledger.call(_head),
            server_time=time.time(),
        ),
        status,
    )


async def get_peers(request: web.Request) -> web.Response:
    caller = _caller(request)
    peers = [peer.model_copy(update={"maddrs": visible_maddrs(peer.maddrs, caller)}) for peer in request.app[SERVICE].live_peers()]
    return _json(protocol.PeersAnswer(peers=peers))


async def get_manifest(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    if request.match_info["digest"] != service.data.digest:
        raise Refused(404, "no_such_manifest", "This server has another dataset.", f"Its manifest is {service.data.digest}.")
    return web.Response(body=service.manifest_json, content_type="application/json", headers=_immutable(service.data.digest))


async def get_blob(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    shard = service.shards.get(request.match_info["digest"])
    if shard is None:
        raise Refused(404, "no_such_shard", "This dataset has no such shard.", f"See /v1/manifest/{service.data.digest}.")
    headers = {**_immutable(shard.digest), "Content-Type": "application/x-tar"}
    return web.FileResponse(shard_path(service.work_dir, shard.digest), headers=headers)


async def get_progress(request: web.Request) -> web.Response:
    service, caller = _with_run(request, status=404), _caller(request)
    peers = service.live_peers()
    figures = await service.ledger.call(_figures)
    speed = sum(peer.samples_per_second for peer in peers)
    losses = [(peer.loss, max(peer.samples_per_second, 1e-9)) for peer in peers if peer.loss is not None]
    return _json(
        protocol.Progress(
            run_id=service.run.run_id,
            run_name=service.run.run_name,
            total_samples=service.run.total_samples,
            target_batch_size=service.run.target_batch_size,
            waiting_samples=sum(peer.waiting_samples for peer in peers),
            samples_per_second=speed,
            loss=sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses) if losses else None,
            peers=[peer.model_copy(update={"maddrs": visible_maddrs(peer.maddrs, caller)}) for peer in peers],
            dataset_samples=service.data.manifest.total,
            server_time=time.time(),
            **figures,
        )
    )


# -- what peers do


async def put_run(request: web.Request) -> web.Response:
    service, asked = request.app[SERVICE], _parse(await request.read(), protocol.FoundRequest)
    run = acceptable_run(asked.run, service.data.digest)
    new = service.run is None
    if new:  # no await from here to `begin`: of two founders at once, one is first
        try:
            service.begin(run)
        except UserError as error:
            raise Refused(503, "ledger_unavailable", error.message, error.fix) from None
        log.info("the run '%s' (%s) was founded by a peer at %s", run.run_name, run.run_id, _caller(request))
    elif run.digest != service.run.digest:
        ours = asdict(service.run)
        name = next(name for name, value in asdict(run).items() if name != "model" and value != ours[name])
        raise Refused(
            409,
            "run_exists",
            f"This server has the run '{service.run.run_name}' ({service.run.run_id}), with {name} = {ours[name]}.",
            "Join that run, or give a run of your own another server.",
        )
    return await _run_answer(service, _caller(request), 201 if new else 200)


async def post_lease(request: web.Request) -> web.Response:
    service, asked = await _for_run(request, protocol.LeaseRequest)

    def operation(book: Book) -> protocol.LeaseAnswer:
        grant = book.lease(asked.peer, asked.want_samples)
        units = [_leased_unit(service.data.manifest.shards[shard], epoch, skip) for (epoch, shard), skip in grant.units]
        return protocol.LeaseAnswer(lease_id=grant.lease_id, units=units, **_periods(book))

    return _json(await service.ledger.call(operation), status=201)


async def post_renew(request: web.Request) -> web.Response:
    service, asked = await _for_run(request, protocol.RenewRequest)

    def operation(book: Book) -> protocol.RenewAnswer:
        book.renew(request.match_info["lease"], asked.peer)
        return protocol.RenewAnswer(**_periods(book))

    return _json(await service.ledger.call(operation))


async def post_release(request: web.Request) -> web.Response:
    service, asked = await _for_run(request, protocol.ReleaseRequest)
    lease = request.match_info["lease"]
    released = await service.ledger.call(lambda book: book.release(lease, asked.peer, asked.keys))
    return _json(protocol.ReleaseAnswer(released=released))


async def post_contribution(request: web.Request) -> web.Response:
    service, asked = await _for_run(request, protocol.ContributionRequest)

    def operation(book: Book) -> protocol.ContributionAnswer:
        contribution = book.contribute(asked.peer, asked.number, asked.keys)
        return protocol.ContributionAnswer(registered=contribution.samples, counted=contribution.counted)

    return _json(await service.ledger.call(operation))


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
    return _json(protocol.RoundAnswer(head=head))


# -- from the ledger's words to the protocol's


def _head(book: Book) -> protocol.Head | None:
    head = book.tree.head
    return head and protocol.Head(digest=head.digest, round=head.round, samples=head.samples, reporters=list(head.reporters))


def _figures(book: Book) -> dict:
    book.sweep()
    head, (epoch, epoch_samples) = book.tree.head, book.epoch_progress()
    return {
        "round": head.round if head else 0,
        "samples": head.samples if head else 0,
        "samples_by_peer": book.samples_by_peer(),
        "epoch": epoch,
        "epoch_samples": epoch_samples,
        "ledger": protocol.LedgerTotals(**book.totals()),
        "finished": book.finished,
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
    service, asked = _with_run(request, status=409), _parse(await request.read(), model)
    if asked.run_id != service.run.run_id:
        message = f"This server serves run {service.run.run_id}, not {asked.run_id}."
        raise Refused(409, "other_run", message, "Check the URL, or join this run.")
    return service, asked


def _parse(body: bytes, model: type[Request]) -> Request:
    """The body of a request as `model`. Raises Refused."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise Refused(
            400 if first["type"] == "json_invalid" else 422,
            "bad_request",
            f"{where or 'The body'}: {first['msg']}"[:500],
            "Send what docs/http.md describes.",
        ) from None


def _caller(request: web.Request) -> str:
    return caller_address(request.remote, request.headers.get("X-Forwarded-For"))


def _immutable(digest: str) -> dict[str, str]:
    return {"ETag": f'"{digest}"', "Cache-Control": "public, max-age=31536000, immutable"}


def _json(answer: BaseModel, status: int = 200) -> web.Response:
    return web.Response(body=answer.model_dump_json().encode(), status=status, content_type="application/json")


def _error(status: int, code: str, message: str, fix: str, headers: dict[str, str] | None = None) -> web.Response:
    body = protocol.ErrorAnswer(error=protocol.ErrorBody(code=code, message=message[:2000], fix=fix[:2000]))
    return web.Response(body=canonical_json(body.model_dump()), status=status, content_type="application/json", headers=headers)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        return _error(refused.status, refused.code, refused.message, refused.fix)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        code = error.reason.lower().replace(" ", "_").replace("-", "_")
        return _error(error.status, code, f"{error.reason}.", _FIXES.get(error.status, "Correct the request."), allow)
    except sqlite3.Error as error:
        return _error(503, "ledger_unavailable", f"The ledger cannot be written: {error}.", "Try again; the host must free some disk.")
    except (ConnectionError, TimeoutError):
        raise
    except Exception:
        log.exception("a request failed: %s %s", request.method, request.path)
        return _error(500, "internal", "The server made a mistake.", "Tell the host to look at its log.")
