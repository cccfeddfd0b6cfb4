"""What is fetched as a file, whole or in parts: the manifest, the shards, and the newest final state.

No path of a user ever reaches the file system: a shard is found by its digest in the manifest.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from aiohttp import web

from datasetserver import answers, blobs
from datasetserver.prepared import manifest_path, shard_path
from datasetserver.refused import Refused
from datasetserver.service import SERVICE
from swarm.signing import SIGNATURE_HEADER

log = logging.getLogger(__name__)
_CONDITIONS = ("If-Match", "If-None-Match", "If-Range", "Range")


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


async def get_state(request: web.Request) -> web.StreamResponse:
    service, digest = request.app[SERVICE], request.match_info["digest"]
    path, newest = service.states.path(digest), service.states.newest()
    if path is None or newest is None:
        fix = f"The newest is {newest.digest}." if newest else "The host gives --states the folder of a helper."
        raise Refused(404, "no_such_state", "This server does not offer that state.", fix)
    name = {"Content-Disposition": f'attachment; filename="{path.name}"'}
    return await _send_file(
        request,
        path,
        digest=digest,
        size=newest.bytes,
        content_type="application/octet-stream",
        further_headers=name,
        sent=service.metrics.sent,
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
    headers = {**immutable(digest), "Accept-Ranges": "bytes", **further_headers}
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


def immutable(digest: str) -> dict[str, str]:
    return {"ETag": f'"{digest}"', "Cache-Control": "public, max-age=31536000, immutable"}
