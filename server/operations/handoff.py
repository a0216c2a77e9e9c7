"""Negotiates the hand-over of K/V from a prefill daemon to a decode daemon.

The decode daemon (--kv-transfer-config) continues as if its prefix cache had held the K/V before, so the answer is the
same as without a hand-over. If anything fails, the prompt is computed here: a stream may be late, it is never lost.
Event loop; the copies run on threads (engine/handover.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import Enum

from pydantic import BaseModel

from engine.core.errors import ParcelError
from engine.core.kv.prefix_cache import chain_root
from engine.core.types import Request
from engine.handover import Handover, Prefix
from engine.loop import Engine
from server.settings.app_config import AppConfig
from server.telemetry.propagation import TRACE_HEADERS

log = logging.getLogger("quire.handoff")

MIN_BLOCKS = 4  # of a prompt that are neither cached here nor computed here as fast as they are asked for


class Prefilled(BaseModel):
    """Where its K/V is."""

    # None where the prompt has not one full block, or it was evicted meanwhile, or its adapter is not loaded here.
    parcel: str | None
    num_blocks: int
    adapter: str | None = None  # the one that computed it; a daemon that knows nothing of adapters does not say


class HandoffOutcome(str, Enum):
    """What became of a prompt; a label of the counter."""

    RECEIVED = "received"  # its K/V came from the prefill daemon
    SHORT = "short"  # too little of it was left to compute for asking
    FAILED = "failed"  # it was asked for, and had to be computed here all the same


class Receiver:
    """A decode daemon's end."""

    def __init__(
        self, engine: Engine, handover: Handover, config: AppConfig, count: Callable[[HandoffOutcome], None]
    ) -> None:
        import httpx  # 45 ms, and few daemons receive

        self._engine, self._handover, self._count = engine, handover, count
        self._timeout_s = config.prefill_timeout_s
        key = config.api_keys[0] if config.api_keys else ""
        self._client = httpx.AsyncClient(
            base_url=config.prefill_url or "",
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(config.prefill_timeout_s, connect=2.0),
            limits=httpx.Limits(max_connections=256),
        )
        least = MIN_BLOCKS * engine.config.block_size
        log.info("prompts with at least %d tokens to compute are computed by %s", least, config.prefill_url)
        self._is_well = True  # the last prompt that was asked for came

    async def fetch(self, requests: Sequence[Request]) -> None:
        """Fill the prefix cache with the beginnings of prompts, if possible."""
        await asyncio.gather(*(self._fetch(request) for request in requests))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _fetch(self, request: Request) -> None:
        params = request.params
        if request.is_background or params.prompt_logprobs is not None or params.pooling is not None:
            return  # no client waits for its first token, or every position has to be computed here
        prefix = prefix_of(self._engine, request)
        try:
            num_missing = await asyncio.to_thread(self._handover.count_missing, prefix)
            if num_missing < MIN_BLOCKS:
                self._count(HandoffOutcome.SHORT)
                return
            parcel = await asyncio.wait_for(self._ask(request), self._patience_s(request))
            if parcel is not None:
                await asyncio.to_thread(self._handover.receive, parcel, prefix)
        except Exception as error:
            self._note(HandoffOutcome.FAILED, f"{type(error).__name__}: {error}")
        else:
            self._note(HandoffOutcome.RECEIVED if parcel else HandoffOutcome.FAILED)

    def _patience_s(self, request: Request) -> float:
        """Return how long the prefill daemon may take; less if there is a deadline."""
        limits = [limit for limit in (request.deadline_s, request.max_queue_s) if limit is not None]
        return min([self._timeout_s, *(limit / 2 for limit in limits)])

    async def _ask(self, request: Request) -> str | None:
        adapter = request.params.adapter
        body = {
            "prompt": request.prompt,
            "cache_salt": _remote_salt(request),
            "priority": request.priority,
            "adapter": None if adapter is None else adapter.digest.hex(),
        }
        answer = await self._client.post("/v1/internal/prefill", json=body, headers=TRACE_HEADERS.get())
        if answer.is_error:
            raise ParcelError(f"it answered {answer.status_code}: {answer.text[:200]}")
        prefilled = Prefilled.model_validate_json(answer.content)
        if (
            prefilled.adapter != body["adapter"]
        ):  # K/V kept under an adapter that did not make it would be wrong in silence
            raise ParcelError(
                "it computed the prompt without its adapter; run the same version of Quire on both daemons"
            )
        return prefilled.parcel

    def _note(self, outcome: HandoffOutcome, why: str = "") -> None:
        """Count an outcome; log only when the prefill daemon starts or stops to answer."""
        self._count(outcome)
        is_well = outcome is HandoffOutcome.RECEIVED
        if is_well and not self._is_well:
            log.info("The prefill daemon at %s answers again.", self._client.base_url)
        elif why and self._is_well:
            log.warning("Prompts are computed here, for %s did not hand one over (%s).", self._client.base_url, why)
        self._is_well = is_well or not why


def _remote_salt(request: Request) -> str:
    """Return the salt that keeps owners apart on the prefill daemon."""
    if not request.cache_owner:
        return request.cache_salt
    return chain_root(request.cache_salt, owner=request.cache_owner).hex()


def prefix_of(engine: Engine, request: Request) -> Prefix:
    """Return what names the K/V of a request's prompt."""
    return Prefix(engine.first_names(request), request.prompt)
