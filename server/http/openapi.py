"""GET /openapi.json, made from the routes, their bodies and their answers.

FastAPI describes paths and answers. Bodies are read by our dependency (server/http/bodies.py), so they are added here, with
what holds on every path: a field may be null, an error has one shape. Event loop; made at the first request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, get_type_hints

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import Field
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.responses import Response

from engine.system.version import VERSION
from engine.text.fields.body import RequestBody
from server.protocol.documents import ResponseBody

_SCHEMAS = "#/components/schemas/"
_NULL = {"type": "null"}
_EVENT = {  # OpenAPI before 3.2 cannot describe the items of a stream
    "type": "object",
    "description": "Server-sent events, each like this; their data are JSON documents.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


class ErrorDetails(ResponseBody):
    message: str = Field(description="A sentence for people.")
    type: str = Field(description="Which kind of object this is.")
    param: str | None = Field(description="The field that is wrong.")
    code: str = Field(description="For programs; see the page of errors.")


class ErrorAnswer(ResponseBody):
    """OpenAI's envelope, as server/protocol/errors.py writes it."""

    error: ErrorDetails = Field(description="Why it failed, or null.")


def answers(model: type[ResponseBody], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses`; `streams` if it may answer with events, too."""
    answer: dict[str, Any] = {"model": model, "description": "The answer"}
    if streams:
        answer["content"] = {"text/event-stream": {"schema": _EVENT}}
    return {200: answer}


def openapi_router(
    routers: Sequence[APIRouter], *, needs_key: bool, open_paths: Collection[str], root_path: str = ""
) -> APIRouter:
    """Return the route that describes `routers`, which a proxy serves at `root_path`; `open_paths` never need a key."""
    router = APIRouter()
    document = b""

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        nonlocal document
        if not document:
            made = describe(routers, needs_key=needs_key, open_paths=open_paths)
            document = to_json({**made, "servers": [{"url": root_path}]} if root_path else made)
        return Response(document, media_type="application/json")

    return router


def describe(
    routers: Sequence[APIRouter], *, needs_key: bool = False, open_paths: Collection[str] = ()
) -> dict[str, Any]:
    """Return the OpenAPI document."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    document = get_openapi(title="Quire", version=VERSION, routes=routes)
    bodies = [body for route in routes if (body := _body(route)) is not None]
    schemas = _add_schemas(document, bodies)
    for route in routes:
        for method in route.methods or ():
            operation = document["paths"][route.path_format][method.lower()]
            if body := _body(route):
                operation["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": schemas[body]}},
                }
            _add_errors(operation["responses"])
            if needs_key and route.path in open_paths:
                operation["security"] = []
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _add_schemas(document: dict[str, Any], bodies: Sequence[type[RequestBody]]) -> dict[type[RequestBody], Any]:
    """Add the bodies' schemas; return a reference to each."""
    known = document["components"]["schemas"]
    references, definitions = models_json_schema(
        [*((body, "validation") for body in dict.fromkeys(bodies)), (ErrorAnswer, "serialization")],
        ref_template=_SCHEMAS + "{model}",
    )
    added = definitions["$defs"]
    twice = known.keys() & added.keys()
    assert not twice, f"in requests and answers alike, rename one: {twice}"
    for schema in added.values():
        _let_fields_be_null(schema)
    known.update(added)
    return {body: references[body, "validation"] for body in bodies}


def _add_errors(responses: dict[str, Any]) -> None:
    """Add the errors that every route may answer."""
    responses.pop("422", None)  # FastAPI's, for parameters that it would check
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + ErrorAnswer.__name__}}}
    responses.setdefault("4XX", {"description": "The request cannot be served", "content": content})
    responses.setdefault("5XX", {"description": "The server failed, or is about to end", "content": content})


def _body(route: APIRoute) -> type[RequestBody] | None:
    """Return the body that an endpoint reads, from its annotations."""
    hints = get_type_hints(route.endpoint).values()
    return next((hint for hint in hints if isinstance(hint, type) and issubclass(hint, RequestBody)), None)


def _let_fields_be_null(schema: dict[str, Any]) -> None:
    """Let optional fields be null, which means absent (engine/text/fields/body.py)."""
    fields = schema.get("properties", {})
    for name in fields.keys() - set(schema.get("required", ())):
        if _NULL not in fields[name].get("anyOf", ()):
            about = {key: fields[name].pop(key) for key in ("description",) if key in fields[name]}
            fields[name] = {"anyOf": [fields[name], _NULL]} | about
