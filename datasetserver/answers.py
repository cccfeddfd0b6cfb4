"""The two forms of every answer: a model of `swarm.protocol`, or `{"error": {code, message, fix}}`; and how a body is read."""

import asyncio
from collections.abc import Mapping
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from datasetserver.refused import Refused
from swarm import protocol
from swarm.digest import canonical_json
from swarm.unpacking import MOST_FAULTS

Request = TypeVar("Request", bound=protocol.Message)
BODY_SECONDS = 30.0
"""A body that has not arrived by then is refused: the largest is 8 MiB, which takes 7 s at 10 Mbit/s."""
_LATER_SECONDS = "5"
_FIXES = {
    404: "See the list of endpoints in docs/http.md.",
    405: "Use the method that docs/http.md gives.",
    413: "Send less at a time.",
}


class RefusedWith(Refused):
    """Refused, with headers that the status calls for."""

    def __init__(self, status: int, code: str, message: str, fix: str, headers: Mapping[str, str]):
        super().__init__(status, code, message, fix)
        self.headers = headers


def answer(model: BaseModel, status: int = 200) -> web.Response:
    return web.Response(body=model.model_dump_json().encode(), status=status, content_type="application/json")


def refusal(refused: Refused) -> web.Response:
    headers = {"Retry-After": _LATER_SECONDS} if refused.status in (429, 503) else None
    return error(refused.status, refused.code, refused.message, refused.fix, getattr(refused, "headers", headers))


def http_error(raised: web.HTTPException) -> web.Response:
    """aiohttp's own 4xx and 5xx, in our form."""
    allow = {"Allow": raised.headers["Allow"]} if "Allow" in raised.headers else None
    code = raised.reason.lower().replace(" ", "_").replace("-", "_")
    return error(raised.status, code, f"{raised.reason}.", _FIXES.get(raised.status, "Correct the request."), allow)


def error(status: int, code: str, message: str, fix: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = protocol.ErrorAnswer(error=protocol.ErrorBody(code=code, message=_text(message), fix=_text(fix)))
    return web.Response(body=canonical_json(body.model_dump()), status=status, content_type="application/json", headers=headers)


def _text(said: str) -> str:
    """What a header said may stand in it, with bytes that are no UTF-8."""
    return said.encode(errors="backslashreplace").decode()[:2000]


async def read(request: web.Request, model: type[Request]) -> Request:
    """The request's body as `model`. Raises Refused: 400, 408, 413, 415, 422."""
    return parse(await read_body(request, model.most_bytes), model)


async def read_body(request: web.Request, most: int) -> bytes:
    """The request's body as it came, of at most `most` bytes. Raises Refused: 400, 408, 413, 415."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refused(415, "unsupported_media_type", "The body is compressed.", "Send it uncompressed.")
    try:
        # A small body has come with its head: then there is nothing to wait for, and no task and timer to pay for.
        return await (_body(request, most) if request.content.is_eof() else asyncio.wait_for(_body(request, most), BODY_SECONDS))
    except asyncio.TimeoutError:
        raise Refused(408, "request_timeout", f"The body did not arrive within {BODY_SECONDS:.0f} s.", "Try again.") from None
    except web.RequestPayloadError as fault:
        raise Refused(400, "bad_request", f"The body is broken: {fault}."[:500], "Send it again.") from None


async def _body(request: web.Request, most: int) -> bytes:
    body = bytearray()
    if (request.content_length or 0) <= most:
        async for piece in request.content.iter_any():
            body += piece
            if len(body) > most:
                break
        else:
            return bytes(body)
    raise Refused(413, "request_entity_too_large", f"The body is larger than {most} bytes.", _FIXES[413])


def parse(body: bytes, model: type[Request]) -> Request:
    """Raises Refused: 400 for what is no JSON, 422 for JSON that is something else."""
    try:
        return model.model_validate_json(body)
    except ValidationError as fault:
        if fault.error_count() > MOST_FAULTS:
            raise Refused(422, "bad_request", f"{fault.error_count()} values do not fit.", "Send what docs/http.md describes.") from None
        first = fault.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise Refused(
            400 if first["type"] == "json_invalid" else 422,
            "bad_request",
            f"{where or 'The body'}: {first['msg']}"[:500],
            "Send what docs/http.md describes.",
        ) from None
