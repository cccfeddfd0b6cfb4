"""The live page, and what it asks for: events, history, and what the model draws."""

import asyncio
import time

from aiohttp import web

from datasetserver import answers
from datasetserver.addresses import is_this_machine
from datasetserver.downloads import immutable
from datasetserver.gate import caller, is_admitted
from datasetserver.limits import subject
from datasetserver.refused import Refused
from datasetserver.service import SERVICE, for_run
from swarm import protocol
from swarm.page import assets
from swarm.page.watch import MOST_WATCHERS
from swarm.picture_file import BadSample


async def get_page(request: web.Request) -> web.Response:
    return assets.respond(request, assets.INDEX)


async def get_asset(request: web.Request) -> web.Response:
    return assets.respond(request, request.match_info["asset"])


async def get_events(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    watch, who = service.watch, subject(caller(request)) or ""
    if not watch.has_room(who):
        raise Refused(503, "too_many_watchers", f"{MOST_WATCHERS} watch already.", "Ask GET /v1/progress now and then.")
    return await watch.events(request, who, lambda: is_admitted(request, service.tokens))


async def get_history(request: web.Request) -> web.Response:
    return answers.answer(protocol.HistoryAnswer(**request.app[SERVICE].watch.history.columns()))


async def get_pictures(request: web.Request) -> web.Response:
    return answers.answer(protocol.PicturesAnswer(pictures=request.app[SERVICE].gallery.pictures()))


async def get_picture(request: web.Request) -> web.Response:
    path = request.app[SERVICE].gallery.path(request.match_info["digest"])
    try:
        body = path.read_bytes() if path else None
    except OSError:
        body = None
    if body is None:
        raise Refused(404, "no_such_picture", "There is no such picture.", "See /v1/pictures.")
    headers = {
        **immutable(request.match_info["digest"]),
        **assets.SECURITY_HEADERS,
        "Cache-Control": "private, max-age=31536000, immutable",
    }
    return web.Response(body=body, content_type="image/webp", headers=headers)


async def put_picture(request: web.Request) -> web.Response:
    service, sent = await for_run(request, protocol.PictureRequest)
    live = {info.peer_id: info.phase for info in service.live_peers()} if is_this_machine(caller(request)) else {}
    if sent.peer not in (service.pictures_from or service.gallery.asked(live)):
        raise Refused(
            403,
            "not_asked_to_draw",
            "The host takes this run's pictures from another peer.",
            "Ask the host to name this one: --pictures_from.",
        )
    try:
        picture = await asyncio.to_thread(service.gallery.add, sent, time.time())
    except BadSample as error:
        raise Refused(422, "bad_picture", f"The picture is refused: {error}.", "Send a PNG, JPEG or WebP.") from None
    except OSError as error:
        raise Refused(503, "disk", f"The picture cannot be kept: {error.strerror}.", "Try again; the host must free some disk.") from None
    return answers.answer(picture)
