"""POST /v1/count_words: counts the words of a text. Schema, route and answer in one file."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import Response

from engine.text.fields.body import RequestBody
from server.answers.parts import InModel
from server.http.bodies import json_body
from server.http.openapi import answers
from server.protocol.documents import ResponseBody


class CountWordsBody(RequestBody):
    """The request."""

    model: str | None = None
    text: str = Field(max_length=1000)


class CountedWords(ResponseBody):
    """The answer."""

    model: str
    num_words: int


router = APIRouter()


@router.post("/v1/count_words", responses=answers(CountedWords))
async def count_words(model: InModel, body: Annotated[CountWordsBody, Depends(json_body(CountWordsBody))]) -> Response:
    """Count the words of a text."""
    counted = CountedWords(model=model.find(body.model).name, num_words=len(body.text.split()))
    return Response(counted.json_bytes(), media_type="application/json")
