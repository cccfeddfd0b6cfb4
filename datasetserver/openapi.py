"""The description of the HTTP interface (OpenAPI 3.1), made from the table of endpoints and the models that parse the requests."""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from swarm import protocol

PARAMETERS = {
    "digest": "[0-9a-f]{64}",
    "lease": "[0-9a-f]{32}",
    "asset": "(page\\.css|page\\.js|icon\\.svg|chart\\.js)",
    "peer": "[A-Za-z0-9_.-]{1,128}",
    "number": "[0-9]{1,16}",
}
"""What may stand in a path: name and pattern. Nothing else of a path is ever used."""
_SCHEMAS = "#/components/schemas/"


@dataclass(frozen=True)
class Endpoint:
    """One line of the interface. asks: the model of its body; answers: a model, or a media type; status: of success.

    also: further statuses below 400. public: answered without a token even where tokens are needed.
    """

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    summary: str
    answers: type[BaseModel] | str
    asks: type[BaseModel] | None = None
    status: int = 200
    also: tuple[int, ...] = ()
    public: bool = False

    @property
    def route(self) -> str:
        """The path as aiohttp's router wants it."""
        return re.sub(r"{(\w+)}", lambda name: f"{{{name[1]}:{PARAMETERS[name[1]]}}}", self.path)


def describe(endpoints: Sequence[Endpoint], *, tokens: bool) -> dict[str, Any]:
    """The OpenAPI document. tokens: whether this server asks for them."""
    asked = {endpoint.asks for endpoint in endpoints if endpoint.asks}
    given = {endpoint.answers for endpoint in endpoints if not isinstance(endpoint.answers, str)} | {protocol.ErrorAnswer}
    models = [*((model, "validation") for model in asked), *((model, "serialization") for model in given)]
    models.sort(key=lambda entry: entry[0].__name__)
    _, schemas = models_json_schema(models, ref_template=_SCHEMAS + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, tokens)
    return {
        "openapi": "3.1.0",
        "info": {"title": "distributed-diffusion dataset server", "version": str(protocol.PROTOCOL_VERSION)},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, tokens: bool) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status in (endpoint.status, *endpoint.also):
        content = {} if status == HTTPStatus.NOT_MODIFIED else {"content": _content(endpoint.answers)}
        responses[str(status)] = {"description": HTTPStatus(status).phrase, **content}
    responses["default"] = {"description": "Refused.", "content": _content(protocol.ErrorAnswer)}
    operation: dict[str, Any] = {"operationId": endpoint.handler.__name__, "summary": endpoint.summary, "responses": responses}
    names = re.findall(r"{(\w+)}", endpoint.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": f"^{PARAMETERS[name]}$"}}
            for name in names
        ]
    if endpoint.asks:
        operation["requestBody"] = {"required": True, "content": _content(endpoint.asks)}
    if tokens and not endpoint.public:
        operation["security"] = [{"token": []}]
    return operation


def _content(what: type[BaseModel] | str) -> dict[str, Any]:
    if isinstance(what, str):
        return {what: {"schema": {"type": "object"} if what.endswith("json") else {"type": "string"}}}
    return {"application/json": {"schema": {"$ref": _SCHEMAS + what.__name__}}}
