"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM.

Off by default, as they read paths of this machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Annotated, ClassVar

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from engine.core.errors import AdapterConflictError
from engine.handle import LoadAdapter, UnloadAdapter
from engine.text.fields.body import Refused, RequestBody
from server.answers.parts import InAdapterTurn, InConfig, InEngine, InModels, InOwner, check_operator
from server.http.bodies import json_body
from server.protocol.errors import ApiError
from server.settings.app_config import AppConfig

MAX_NAME = 256  # characters


class LoadAdapterBody(RequestBody):
    """A folder of this machine, and the name for requests."""

    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        "load_inplace": Refused((False,), "unload the adapter first, then load it again")
    }

    lora_name: str = Field(
        min_length=1, max_length=MAX_NAME, description="The name that requests will use as their model."
    )
    lora_path: str = Field(min_length=1, max_length=4096, description="The adapter's folder on the daemon's machine.")


class UnloadAdapterBody(RequestBody):
    """The name to remove."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: str = Field(
        min_length=1, max_length=MAX_NAME, description="The name that requests will use as their model."
    )


router = APIRouter()
log = logging.getLogger("quire.adapters")


def _check_allowed(config: AppConfig, owner: str) -> None:
    if not config.allow_runtime_lora_updating:
        message = (
            "Adapters cannot be loaded or unloaded while this server runs; start it with --allow-runtime-lora-updating."
        )
        raise ApiError(501, "not_enabled", message, type="not_implemented_error")
    check_operator(owner, "Loading and unloading adapters")


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(
    body: Annotated[LoadAdapterBody, Depends(json_body(LoadAdapterBody))],
    engine: InEngine,
    turn: InAdapterTurn,
    config: InConfig,
    models: InModels,
    owner: InOwner,
) -> Response:
    """Load an adapter from a folder of this machine; requests may then name it."""
    _check_allowed(config, owner)
    others = [name for entry in models.entries if entry.config is not config for name in entry.names]
    if body.lora_name in (*config.served_model_names, *others):
        raise AdapterConflictError(
            f"{body.lora_name!r} is what a model here is called; choose another name.", param="lora_name"
        )
    async with turn:
        await asyncio.wrap_future(engine.control(LoadAdapter(body.lora_name, body.lora_path)))
    log.info("loaded the adapter %r from %r", body.lora_name, body.lora_path)
    return PlainTextResponse(f"The adapter {body.lora_name!r} is loaded.\n")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(
    body: Annotated[UnloadAdapterBody, Depends(json_body(UnloadAdapterBody))],
    engine: InEngine,
    turn: InAdapterTurn,
    config: InConfig,
    owner: InOwner,
) -> Response:
    """Unload an adapter; its memory is freed when the last request that uses it ends."""
    _check_allowed(config, owner)
    async with turn:
        await asyncio.wrap_future(engine.control(UnloadAdapter(body.lora_name)))
    log.info("unloaded the adapter %r", body.lora_name)
    return PlainTextResponse(f"The adapter {body.lora_name!r} is unloaded.\n")
