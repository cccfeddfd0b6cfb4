"""The HTTP interface: requests are checked by the models of `swarm.protocol`, answered from the ledger, errors are one form of JSON.

No path, header or body of a user ever reaches the file system: a shard is found by its digest in the manifest.
"""

import functools
import logging
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from aiohttp import HttpVersion11, web

from datasetserver import answers
from datasetserver.addresses import is_this_machine, visible_maddrs
from datasetserver.book import Book
from datasetserver.countersigning import countersign
from datasetserver.downloads import get_blob, get_manifest, get_state
from datasetserver.founding import acceptable_run
from datasetserver.gate import Gate, caller, holder_of, holds_token, sender
from datasetserver.live import get_asset, get_events, get_history, get_page, get_picture, get_pictures, put_picture
from datasetserver.metrics import CONTENT_TYPE
from datasetserver.newcomers import MOST_OF_AN_OWNER
from datasetserver.openapi import Endpoint, describe
from datasetserver.refused import Refused
from datasetserver.samples import indices
from datasetserver.service import SERVICE, Service, as_head, for_run, progress_of, with_run
from datasetserver.tree import State
from datasetserver.wrong_states import bury
from swarm import protocol
from swarm.digest import canonical_json, digest_json
from swarm.errors import UserError
from swarm.members import sign_membership
from swarm.receipts import sign_receipt
from swarm.version import VERSION
from swarm.wrong_states import WrongState

log = logging.getLogger(__name__)
Result = TypeVar("Result")


def make_app(service: Service) -> web.Application:
    gate = Gate(ENDPOINTS, service.tokens, service.limits, service.metrics, service.names)
    app = web.Application(middlewares=[gate.middleware])
    app[SERVICE] = service
    app.on_response_prepare.append(gate.keep_private)
    app.cleanup_ctx.append(service.watch.running)
    for endpoint in ENDPOINTS:
        if endpoint.method == "GET":
            app.router.add_get(endpoint.route, endpoint.handler, expect_handler=_continue)  # HEAD too
        else:
            app.router.add_route(endpoint.method, endpoint.route, endpoint.handler, expect_handler=_continue)
    return app


async def _continue(request: web.Request) -> None:
    """As aiohttp's own, which answers 417 to what it does not know: past the gate, with its limits and its one form of error."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # else the answer's head counts as sent


# -- what anyone may read


async def healthz(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def get_openapi(request: web.Request) -> web.Response:
    return web.Response(body=_description(request.app[SERVICE].tokens is not None), content_type="application/json")


@functools.cache  # made anew it takes 20 ms, and strangers may ask for it
def _description(tokens: bool) -> bytes:
    return canonical_json(describe(ENDPOINTS, tokens=tokens))


async def get_run(request: web.Request) -> web.Response:
    return await _run_answer(with_run(request, status=404), caller(request))


async def _run_answer(service: Service, asker: str, status: int = 200) -> web.Response:
    await countersign(service)
    maddrs = service.rendezvous.maddrs if service.rendezvous else []
    run = service.run.to_mapping()
    return answers.answer(
        protocol.RunAnswer(
            protocol=protocol.PROTOCOL_VERSION,
            run=run,
            run_id=service.run.run_id,
            url=service.url,
            initial_peers=visible_maddrs(maddrs, asker)[:64],
            manifest=service.data.digest,
            head=await service.ledger.call(lambda book: as_head(book.told)),
            server_time=service.wall(),
            host_key=service.key.public,
            signature=service.key.sign("run", digest_json(run)),
            extension=service.extension(),
            bans=list(service.bans.words),
            version=VERSION,
        ),
        status,
    )


async def get_peers(request: web.Request) -> web.Response:
    return answers.answer(protocol.PeersAnswer(peers=[_shown(peer, request) for peer in request.app[SERVICE].live_peers()]))


async def get_progress(request: web.Request) -> web.Response:
    progress = await progress_of(with_run(request, status=404))
    return answers.answer(progress.model_copy(update={"peers": [_shown(peer, request) for peer in progress.peers]}))


def _shown(peer: protocol.PeerInfo, request: web.Request) -> protocol.PeerInfo:
    """A volunteer's address is for those who hold a token, and for this machine; where no token is asked for, to others a peer has none."""
    asker = caller(request)
    known = holds_token(request) or is_this_machine(asker)
    return peer.model_copy(update={"maddrs": visible_maddrs(peer.maddrs, asker) if known else []})


async def get_metrics(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    progress = (await progress_of(service)).model_dump() if service.run else None
    text = service.metrics.text(peers=len(service.live_peers()), progress=progress)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


# -- what peers do


async def put_run(request: web.Request) -> web.Response:
    service, asked = request.app[SERVICE], await answers.read(request, protocol.FoundRequest)
    run = acceptable_run(asked.run, service.data.first, service.key.public if service.for_members else "")
    new = service.run is None
    if new and run.masked_loss:
        said = "masked_loss is True, but the pictures here were checked without a run, and have no masks."
        raise Refused(400, "bad_run", said, "Found the run at its server: dd-datasetserver --model MODEL --masked_loss.")
    if new and run.validation_split != (share := service.data.held_out):
        said = f"validation_split is {run.validation_split:g}, but the pictures here were prepared with {share:g}."
        fix = f"Give --validation_split {share:g}, or found the run at its server: dd-datasetserver --model MODEL --validation_split SHARE."
        raise Refused(400, "bad_run", said, fix)
    if new:  # no await from here to `begin`: of two founders at once, one is first
        try:
            service.begin(run)
        except UserError as error:
            raise Refused(503, "ledger_unavailable", error.message, error.fix) from None
        log.info("the run '%s' (%s) was founded by a peer at %s", run.run_name, run.run_id, caller(request))
    elif differ := service.run.differing(asdict(run)):  # none also where an older or newer program names the same run otherwise
        raise Refused(
            409,
            "run_exists",
            f"This server has the run '{service.run.run_name}' ({service.run.run_id}), with {differ[0]} = {getattr(service.run, differ[0])}.",
            "Join that run, or give a run of your own another server.",
        )
    return await _run_answer(service, caller(request), 201 if new else 200)


async def post_lease(request: web.Request) -> web.Response:
    service, asked = await for_run(request, protocol.LeaseRequest)

    def operation(book: Book) -> protocol.LeaseAnswer:
        grant = book.lease(asked.peer, asked.want_samples)
        shard_epochs = [_leased_shard(service.data.manifest.shards[shard], epoch, skip) for (epoch, shard), skip in grant.shard_epochs]
        return protocol.LeaseAnswer(lease_id=grant.lease_id, shard_epochs=shard_epochs, **_periods(book))

    return answers.answer(await _told(request, asked.peer, operation), status=201)


async def post_renew(request: web.Request) -> web.Response:
    service, asked = await for_run(request, protocol.RenewRequest)

    def operation(book: Book) -> dict[str, Any]:
        book.renew(request.match_info["lease"], asked.peer)
        return {"state": book.state, **_periods(book)}

    told = await _told(request, asked.peer, operation)
    await countersign(service)  # afterwards: it waits for the disk, and a lease may end meanwhile
    bans = list(service.bans.words[: protocol.BANS_TOLD])
    return answers.answer(protocol.RenewAnswer(**told, extension=service.extension(), bans=bans))


async def post_member(request: web.Request) -> web.Response:
    service, asked = await for_run(request, protocol.MemberRequest)
    owner = await _told(request, asked.peer, lambda book: book.owner_of(asked.peer))
    service.newcomers.let_in(owner, asked.peer, holder_of(request).peers or MOST_OF_AN_OWNER)
    membership = sign_membership(service.key, service.run, asked.peer, service.wall)
    return answers.answer(protocol.MemberAnswer(until=membership.until, signature=membership.signature), status=201)


async def post_release(request: web.Request) -> web.Response:
    _, asked = await for_run(request, protocol.ReleaseRequest)
    lease = request.match_info["lease"]
    released = await _told(request, asked.peer, lambda book: book.release(lease, asked.peer, asked.keys))
    return answers.answer(protocol.ReleaseAnswer(released=released))


async def post_contribution(request: web.Request) -> web.Response:
    service, asked = await for_run(request, protocol.ContributionRequest)

    def operation(book: Book) -> tuple[protocol.ContributionAnswer, bool]:
        contribution = book.contribute(asked.peer, asked.number, asked.keys, offered=asked.offered)
        counts = {"registered": contribution.samples, "repeated": contribution.repeated}
        return protocol.ContributionAnswer(**counts, counted=contribution.counted), bool(contribution.vouched)

    answer, vouched = await _told(request, asked.peer, operation)
    if vouched:
        receipt = sign_receipt(service.key, service.run, asked.peer, asked.number, answer.registered + answer.repeated)
        answer = answer.model_copy(update={"receipt": receipt})
    return answers.answer(answer)


async def get_contribution(request: web.Request) -> web.Response:
    peer, number = request.match_info["peer"], int(request.match_info["number"])
    held = await with_run(request, status=404).ledger.call(lambda book: book.samples_of(peer, number))
    if not held:
        raise Refused(404, "no_such_contribution", f"No samples are registered in contribution {number} of {peer}.", "Ask for one that was.")
    (epoch, shard), mask = random.choice(list(held.items()))
    some = sorted(random.sample(found := indices(mask), min(len(found), protocol.MOST_SHOWN)))
    return answers.answer(protocol.ContributionSamples(keys=[protocol.sample_key(epoch, shard, index) for index in some]))


async def post_round(request: web.Request) -> web.Response:
    _, asked = await for_run(request, protocol.RoundRequest)
    members = tuple((member.peer, member.number, member.samples) for member in asked.members)

    def operation(book: Book) -> tuple[protocol.Head, bool]:
        new = book.tree.get(asked.digest) is None
        book.add_final(State(asked.digest, asked.parent, asked.round, asked.samples, members), asked.peer)
        return as_head(book.tree.head), new

    head, new = await _told(request, asked.peer, operation)
    if new:
        log.info("final round=%d samples=%d members=%d digest=%s", asked.round, asked.samples, len(members), asked.digest[:16])
    return answers.answer(protocol.RoundAnswer(head=head))


async def post_proofs(request: web.Request) -> web.Response:
    service, asked = await for_run(request, protocol.ProofsRequest)
    accused = [proof.accused for proof in asked.proofs]

    def operation(book: Book) -> tuple[str, dict[str, str]]:
        return book.owner_of(asked.peer), book.owners_of([*accused, *service.proven.peers()])

    owner, owners = await _told(request, asked.peer, operation)
    states = [each for each in asked.proofs if isinstance(each, WrongState)]
    service.proven.hear(owner, owners, [each for each in asked.proofs if not isinstance(each, WrongState)])
    for state in states:
        await bury(service, owner, state)
    bans = list(service.bans.words[: protocol.BANS_TOLD]) if states else []
    return answers.answer(protocol.ProofsAnswer(banned=[peer for peer in accused if service.proven.reason(peer)], bans=bans))


async def _told(request: web.Request, peer: str, operation: Callable[[Book], Result]) -> Result:
    """What the ledger answers to `peer`, if the request's sender may speak for it. Raises Refused."""
    who = sender(request, request.app[SERVICE].tokens)

    def admitted(book: Book) -> Result:
        book.admit(peer, who)
        return operation(book)

    return await request.app[SERVICE].ledger.call(admitted)


# -- from the ledger's words to the protocol's


def _leased_shard(shard: protocol.Shard, epoch: int, skip: list[int]) -> protocol.LeasedShard:
    return protocol.LeasedShard(epoch=epoch, shard=shard.index, digest=shard.digest, bytes=shard.bytes, samples=shard.samples, skip=skip)


def _periods(book: Book) -> dict[str, float]:
    # A third of the period: two renewals must be lost in a row before a shard goes to another peer.
    return {"expires_in": book.lease_seconds, "renew_every": book.lease_seconds / 3}


ENDPOINTS = (
    Endpoint("GET", "/healthz", healthz, "Whether the server answers.", "application/json", public=True),
    Endpoint("GET", "/v1/openapi.json", get_openapi, "This description.", "application/json", public=True),
    Endpoint("GET", "/", get_page, "The live page.", "text/html", also=(304,), public=True),
    Endpoint("GET", "/page/{asset}", get_asset, "The page's style, program, chart library and icon.", "*/*", also=(304,), public=True),
    Endpoint(
        "GET", "/v1/events", get_events, "The run every second, as server-sent events, for as long as one listens.", "text/event-stream"
    ),
    Endpoint("GET", "/v1/history", get_history, "How the run went, at most a thousand points.", protocol.HistoryAnswer),
    Endpoint("GET", "/v1/pictures", get_pictures, "What the model drew, the newest round first.", protocol.PicturesAnswer),
    Endpoint("GET", "/v1/pictures/{digest}", get_picture, "One of these.", "image/webp"),
    Endpoint(
        "PUT",
        "/v1/pictures",
        put_picture,
        "What the state after a round draws; from whom the host names.",
        protocol.DrawnPicture,
        protocol.PictureRequest,
    ),
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
    Endpoint(
        "GET",
        "/v1/states/{digest}.state",
        get_state,
        "The newest final state, for dd-export.",
        "application/octet-stream",
        also=(206, 304),
    ),
    Endpoint("GET", "/v1/progress", get_progress, "How the run is doing.", protocol.Progress),
    Endpoint(
        "POST", "/v1/leases", post_lease, "Lease shards with about want_samples samples.", protocol.LeaseAnswer, protocol.LeaseRequest, 201
    ),
    Endpoint(
        "POST", "/v1/members", post_member, "A membership of the run, for a week.", protocol.MemberAnswer, protocol.MemberRequest, 201
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
    Endpoint(
        "GET",
        "/v1/contributions/{peer}/{number}",
        get_contribution,
        "Some of the samples that a contribution holds.",
        protocol.ContributionSamples,
    ),
    Endpoint("POST", "/v1/rounds", post_round, "Report a final state.", protocol.RoundAnswer, protocol.RoundRequest),
    Endpoint(
        "POST", "/v1/proofs", post_proofs, "Prove that peers signed two means of one share, or a wrong one.", protocol.ProofsAnswer, protocol.ProofsRequest
    ),
)
