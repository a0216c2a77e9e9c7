"""GET /v1/requests/{id}: the state of a request, or how it went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter

from engine.core.errors import shorten
from engine.core.stats import SequenceView
from server.context import InContext, InOwner
from server.errors import ApiError
from server.telemetry.live import Place
from server.telemetry.request_log import RECENT, Outcome, RequestRecord
from server.telemetry.timeline import AnswerMetrics

_ORDER = ("running", "prefill", "preempted")  # a request has the state of its foremost sequence

router = APIRouter()


@router.get("/v1/requests/{name:path}")
async def retrieve_request(context: InContext, owner: InOwner, name: str) -> dict[str, Any]:
    """Return an open request, or one of the last that ended; 404 for any other."""
    record = context.request_log.find(owner, name)
    if record is None:
        message = (
            f"There is no request {shorten(name)!r} among those that are open and the last {RECENT} that ended; "
            "give the x-request-id of an answer's headers, or an answer's id."
        )
        raise ApiError(404, "request_not_found", message, "id")
    if record.end is not None:
        return _document(record, (), None)
    ids = record.engine_ids
    place = await context.live.place(ids)
    views = await context.live.sequences(ids)
    return _document(record, views, place)  # it may have ended in between


def _document(record: RequestRecord, views: Sequence[SequenceView], place: Place | None) -> dict[str, Any]:
    """Return a record as JSON; `views` and `place` are of an open one."""
    spans, finish_reasons, is_dropped, usage, num_cached = outcome = record.outcome
    history = _history(outcome)
    document = {
        "id": record.request_id,
        "object": "request",
        "answer_id": record.answer_id,
        "endpoint": record.endpoint,
        "adapter": record.adapter,
        "stream": record.stream,
        "tenant": None if record.account is None else record.account.tenant.name,
        "created": record.created,
        "finish_reasons": finish_reasons,
        "usage": usage.model_dump(),
        "metrics": None if spans is None or is_dropped else AnswerMetrics.of(spans, num_cached).model_dump(),
        "history": history,
    }
    if record.end is not None:
        _, status, seconds = record.end
        history.append({"event": "finished", "at_s": round(seconds, 3)})
        return document | {"state": "finished", "status": status or None, "seconds": round(seconds, 3)}
    states = [view.status for view in views]
    return document | {
        "state": next((name for name in _ORDER if name in states), "waiting" if place or not states else states[0]),
        "queue": None if place is None else place._asdict(),
        "sequences": [_sequence(record, view) for view in views],
    }


def _sequence(record: RequestRecord, view: SequenceView) -> dict[str, Any]:
    prompt = record.engine_ids.index(view.request_id)
    return {
        "choice": prompt * record.requests[prompt].params.n + view.choice,
        "state": view.status,
        "tokens": view.num_tokens,
        "computed_tokens": view.num_computed,
        "cached_tokens": view.num_cached,
        "blocks": len(view.blocks),
        "preemptions": view.num_preemptions,
    }


def _history(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the events so far; of several choices the slowest counts."""
    events, spans = [("received", 0.0)], outcome.spans
    if spans is not None:
        events.append(("dropped" if outcome.is_dropped else "scheduled", spans.queue_s))
        if outcome.usage.completion_tokens:
            first_s = spans.queue_s + spans.prefill_s
            events += [("first_token", first_s), ("last_token", first_s + spans.decode_s)]
    return [{"event": name, "at_s": round(at, 3)} for name, at in events]
