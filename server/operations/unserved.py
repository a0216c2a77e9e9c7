"""Routes of other servers that Quire does not have: a 404 with an alternative."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter
from starlette.responses import Response

from engine.settings.foreign import ELSEWHERE
from server.protocol.errors import ApiError

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
UNSERVED: Mapping[str, str] = ELSEWHERE["routes"]  # each with all paths below it

router = APIRouter()


def _add(path: str, message: str) -> None:
    async def refuse() -> Response:
        raise ApiError(404, "not_found", message)

    for each in (path, path + "/{rest:path}"):
        router.add_api_route(each, refuse, methods=_METHODS, include_in_schema=False)


for _path, _message in UNSERVED.items():
    _add(_path, _message)
