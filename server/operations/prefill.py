"""POST /v1/internal/prefill: computes a prompt for a decode daemon.

The daemon fetches the K/V through the connector.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from pydantic import Field

from engine.core.errors import ParcelError
from engine.core.types import Request, SamplingParams
from engine.handover import Handover
from engine.text.choice import TextRules
from engine.text.fields.base import RequestBody
from server.context import Context, InContext, InOwner, check_operator, json_body
from server.errors import ApiError
from server.generation import Generation
from server.openai.sampling import MAX_CACHE_SALT
from server.operations.handoff import Prefilled, prefix_of
from server.respond import unless_disconnected

router = APIRouter()


class PrefillBody(RequestBody):
    """A prompt to compute."""

    prompt: list[int] = Field(min_length=1)
    cache_salt: str = Field("", max_length=MAX_CACHE_SALT)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    adapter: str | None = Field(None, max_length=64)  # the digest of its content, in hexadecimal


@router.post("/v1/internal/prefill", response_model=Prefilled)
async def prefill(
    http: HttpRequest,
    context: InContext,
    owner: InOwner,
    body: Annotated[PrefillBody, Depends(json_body(PrefillBody))],
) -> Prefilled:
    """Compute a prompt and pack its full blocks; a daemon that leaves ends it."""
    if context.handover is None:
        message = "This server computes no prompts for others; start it with role prefill in --kv-transfer-config."
        raise ApiError(501, "not_enabled", message, type="not_implemented_error")
    check_operator(owner, "Computing prompts for other daemons")
    context.limits.check_ids(body.prompt, "prompt")
    # Adapters' names differ between daemons; the digest of their files does not.
    loaded = (each.adapter for each in context.engine.adapters.all())
    adapter = next((each for each in loaded if each.digest.hex() == body.adapter), None)
    if adapter is None and body.adapter is not None:
        return Prefilled(parcel=None, num_blocks=0, adapter=body.adapter)
    request = Request(
        request_id=uuid.uuid4().hex,
        prompt=tuple(body.prompt),
        params=SamplingParams(max_tokens=0, adapter=adapter),
        arrival_s=context.engine.clock(),
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    return await unless_disconnected(http.receive, _compute(context, context.handover, request))


async def _compute(context: Context, handover: Handover, request: Request) -> Prefilled:
    answer = context.client.submit([request])
    with answer:
        await Generation(answer, [request], context.tokenizer, TextRules()).all_deltas()
    try:
        sent = await asyncio.to_thread(handover.send, prefix_of(context.engine, request))
    except ParcelError as error:
        raise ApiError(
            503, "parcel_failed", f"The prompt's K/V cannot be handed over: {error}.", type="server_error"
        ) from error
    parcel, num_blocks = sent or (None, 0)
    adapter = request.params.adapter
    return Prefilled(parcel=parcel, num_blocks=num_blocks, adapter=None if adapter is None else adapter.digest.hex())
