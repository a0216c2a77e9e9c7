"""GET /v1/requests/{id}: the state of a request, or how it went; GET /v1/requests: the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter

from engine.core.shown import shorten
from engine.core.stats import SequenceView
from server.answers.models import ModelParts, Models
from server.answers.parts import InModels, InOwner, InRequestLog
from server.http.threads import run_slowly
from server.protocol.errors import ApiError, to_api_error
from server.telemetry.answer_metrics import AnswerMetrics
from server.telemetry.events import TAG_CHARS, HttpAnswered, Outcome, RequestRecord
from server.telemetry.live import QueuePosition
from server.telemetry.prefix_ends import PrefixEnd
from server.telemetry.prefix_words import in_words
from server.telemetry.request_log import RECENT

_ORDER = ("running", "prefill", "preempted")  # a request has the state of its foremost sequence

router = APIRouter()


@router.get("/v1/requests")
async def list_requests(log: InRequestLog, models: InModels, owner: InOwner) -> dict[str, Any]:
    """Return the last requests, newest first: open ones, answered POSTs, and every refused one.

    Tenants see their own. As in the live view, an id is only its first characters, too few to use another's answer. Nothing
    of a prompt is shown.
    """
    return {"object": "list", "data": [_entry(entry, models) for entry in log.latest(owner)]}


@router.get("/v1/requests/{name:path}")
async def retrieve_request(log: InRequestLog, models: InModels, owner: InOwner, name: str) -> dict[str, Any]:
    """Return an open request, or one of the last that ended; 404 for any other."""
    record = log.find(owner, name)
    if record is None:
        message = (
            f"There is no request {shorten(name)!r} among those that are open and the last {RECENT} that ended; "
            "give the x-request-id of an answer's headers, or an answer's id."
        )
        raise ApiError(404, "request_not_found", message, "id")
    views, place, parts = list[SequenceView](), None, models.named(record.model)
    names = [] if parts is None else [group.name for group in parts.engine.config.groups]
    if record.end is None and parts is not None:
        ids = record.engine_ids
        place = await parts.live.place(ids)
        views = await parts.live.sequences(ids)
    words = partial(_prefix, parts, record.outcome.prefix, shows_text=True)
    return _document(record, views, place, names) | {"prefix": await run_slowly(words)}  # it may have ended in between


def _prefix(parts: ModelParts | None, end: PrefixEnd | None, *, shows_text: bool) -> dict[str, Any] | None:
    """Return why a prefix ends where it does, as JSON; None once its model is not loaded any more."""
    if end is None or parts is None:
        return None
    has_states = parts.engine.config.state_blocks > 0
    return {
        "cause": end.cause,
        "position": end.position,
        "reusable_tokens": 0 if end.fork is None else end.fork.num_reusable,
        "message": in_words(end, parts.model.tokenizer, has_states=has_states, shows_text=shows_text),
    }


def _entry(entry: RequestRecord | HttpAnswered, models: Models) -> dict[str, Any]:
    """Return a request of the list as JSON; the status of an open one is null."""
    caller = entry.caller
    assert caller is not None
    answered = entry if isinstance(entry, HttpAnswered) else None
    record = entry.record if isinstance(entry, HttpAnswered) else entry
    outcome = None if record is None else record.outcome
    error = None if answered is None else answered.error
    if error is None and outcome is not None and outcome.error is not None:
        error = to_api_error(outcome.error)  # of a stream, whose status was sent before
    return {
        "id": entry.request_id[:TAG_CHARS],
        "object": "request.summary",
        "created": int(caller.begun_s),
        "method": "POST" if answered is None else answered.method,
        "path": caller.path,
        "address": caller.address,
        "user_agent": caller.agent,
        "tenant": caller.tenant,
        "model": None if record is None else record.model,
        "status": None if answered is None else answered.status or None,
        "seconds": None if answered is None else round(answered.seconds, 3),
        "error": None if error is None else {"code": error.code, "message": error.logged},
        "ignored_fields": list(entry.ignored_fields),
        "finish_reasons": [] if outcome is None else outcome.finish_reasons,
        "usage": None if outcome is None else outcome.usage.model_dump(),
        "metrics": None if outcome is None else _metrics(outcome),
        "prefix": None
        if record is None or outcome is None
        else _prefix(models.named(record.model), outcome.prefix, shows_text=False),
    }


def _metrics(outcome: Outcome) -> dict[str, Any] | None:
    if outcome.spans is None or outcome.is_dropped:
        return None
    return AnswerMetrics.of(outcome.spans, outcome.num_cached_tokens).model_dump()


def _document(
    record: RequestRecord, views: Sequence[SequenceView], place: QueuePosition | None, names: Sequence[str]
) -> dict[str, Any]:
    """Return a record as JSON; `views` and `place` are of an open one, `names` of its model's groups of layers."""
    outcome = record.outcome
    history = _history(outcome)
    document = {
        "id": record.request_id,
        "object": "request",
        "answer_id": record.answer_id,
        "endpoint": record.endpoint,
        "model": record.model,
        "adapter": record.adapter,
        "stream": record.stream,
        "tenant": None if record.account is None else record.account.tenant.name,
        "created": record.created,
        "finish_reasons": outcome.finish_reasons,
        "usage": outcome.usage.model_dump(),
        "metrics": _metrics(outcome),
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
        "sequences": [_sequence(record, view, names) for view in views],
    }


def _sequence(record: RequestRecord, view: SequenceView, names: Sequence[str]) -> dict[str, Any]:
    prompt = record.engine_ids.index(view.request_id)
    return {
        "choice": prompt * record.requests[prompt].params.n + view.choice,
        "state": view.status,
        "tokens": view.num_tokens,
        "computed_tokens": view.num_computed,
        "cached_tokens": view.num_cached,
        "blocks": len(view.all_blocks),
        "blocks_by_group": view.blocks_by_group(names),
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
