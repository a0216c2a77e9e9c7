"""POST /v1/count: how many tokens a text has. Route, schema and answer in one file."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from server.context import InContext, json_body
from server.http.schema import RequestBody, ResponseBody
from server.operations.openapi import answers

router = APIRouter()


class CountTextBody(RequestBody):
    """A text, as it is; no chat template is applied."""

    model: str | None = None
    text: str


class Count(ResponseBody):
    num_tokens: int


@router.post("/v1/count", responses=answers(Count))
async def count(context: InContext, body: Annotated[CountTextBody, Depends(json_body(CountTextBody))]) -> Response:
    """The number of tokens of a text."""
    context.check_model(body.model)
    [ids] = await context.encode([body.text], "text", add_special_tokens=False)
    return Response(Count(num_tokens=len(ids)).json_bytes(), media_type="application/json")
