"""POST /v1/moderations: what a guard says of texts, in OpenAI's shape with the guard's own categories."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from engine.core.errors import InvalidRequestError
from engine.core.types import SamplingParams
from engine.text.fields.body import IdleFields
from engine.text.fields.chat import join_parts
from server.answers.body import EngineBody
from server.answers.content_guard import ContentGuard
from server.answers.parts import InJudge, InModel, InResponder
from server.answers.respond import answer_id
from server.http.bodies import json_body
from server.http.middleware import state_of
from server.http.openapi import answers
from server.http.threads import unless_disconnected
from server.openai.prompt_only import Few
from server.openai.scores import Texts
from server.protocol.documents import ResponseBody

router = APIRouter()


def _joined(value: Any) -> Any:
    """Return the text of content in parts, which is one input, or the value."""
    in_parts = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    return join_parts(value, {"text": "text"}, "input") if in_parts else value


_as_texts = BeforeValidator(_joined, json_schema_input_type=str | list[str] | list[dict[str, Any]])


class ModerationBody(EngineBody):
    """The request."""

    # The guard's requests are queued as this one, without a deadline, and the answer has no place for their times.
    IDLE: ClassVar[IdleFields] = {
        **EngineBody.IDLE,
        "deadline_ms": lambda *_: True,
        "max_queue_ms": lambda *_: True,
        "include_metrics": lambda body, _: body.include_metrics,
    }

    input: Annotated[Texts, Few, _as_texts] = Field(
        description="A text, a list of texts, each as a user's, or one text in parts."
    )


class Moderated(ResponseBody):
    flagged: bool = Field(description="Whether the text is unsafe.")
    categories: dict[str, bool] = Field(description="The guard's categories that it found.")
    category_scores: dict[str, float] = Field(description="The same with 1: a guard tells no degrees.")


class Moderations(ResponseBody):
    """The answer, one result a text, in order."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    model: str = Field(description="The model or adapter that answered.")
    results: list[Moderated] = Field(description="The items.")


@router.post("/v1/moderations", responses=answers(Moderations))
async def create_moderation(
    http: Request,
    body: Annotated[ModerationBody, Depends(json_body(ModerationBody, spends=True))],
    model: InModel,
    responder: InResponder,
    judge: InJudge,
) -> Response:
    """Judge texts, by the guard that is named or the guard of the model."""
    guard = (
        responder.guard if judge is None else ContentGuard(model.find(body.model).name, 1, lambda: nullcontext(judge))
    )
    if guard is None:
        raise InvalidRequestError("This model is no guard and has none; name a guard.", param="model")
    state = state_of(http.scope)
    [like] = responder.admit(state, responder.requests(body, None, [[0]], [SamplingParams(max_tokens=1)]))
    judging = guard.judge_each([[("user", text)] for text in body.input], [like] * len(body.input))
    verdicts = await unless_disconnected(http.receive, judging)
    if state.account is not None:
        state.account.charge(sum(verdict.num_tokens for verdict in verdicts))
    results = [
        Moderated(
            flagged=verdict.is_unsafe,
            categories=dict.fromkeys(verdict.categories, True),
            category_scores=dict.fromkeys(verdict.categories, 1.0),
        )
        for verdict in verdicts
    ]
    made = Moderations(id="modr-" + answer_id([like]), model=guard.name, results=results)
    return Response(made.json_bytes(), media_type="application/json")
