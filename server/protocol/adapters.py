"""Bodies of POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from server.protocol.base import RequestBody

MAX_NAME = 256  # characters


class LoadAdapterBody(RequestBody):
    """A folder of the server's, and what requests will call it."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"load_inplace": (False,)}
    INSTEAD: ClassVar[Mapping[str, str]] = {"load_inplace": "unload the adapter first, then load it again"}

    lora_name: str = Field(min_length=1, max_length=MAX_NAME)
    lora_path: str = Field(min_length=1, max_length=4096)


class UnloadAdapterBody(RequestBody):
    """The name that is not to be known any more."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: str = Field(min_length=1, max_length=MAX_NAME)
