"""Names of vLLM's offline API that do not exist here, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.settings.foreign import ELSEWHERE

Row = Mapping[str, Any]  # values that ask for nothing; what to do about others

_ATTRIBUTES: Mapping[str, Mapping[str, str]] = ELSEWHERE["attributes"]
_ARGUMENTS: Mapping[str, Row] = ELSEWHERE["arguments"]
SAMPLING_PARAMS: Mapping[str, Row] = ELSEWHERE["sampling_params"]


def asks_for_nothing(row: Row, value: object) -> bool:
    """Return whether a value asks for what is done anyway."""
    return value is None or row["neutral"] == "any" or value in row["neutral"]


def missing(kind: str, name: str) -> str:
    """Return the sentence for an attribute that an object of this API does not have."""
    instead = _ATTRIBUTES[kind].get(name)
    return f"{kind!r} object has no attribute {name!r}" + (f": {instead}." if instead else "")


def refuse_arguments(
    method: str, given: Mapping[str, Any], progress: bool, lora: str | None
) -> tuple[bool, str | None]:
    """Return `progress` and `lora`, perhaps from vLLM's names of them. Raises TypeError or InvalidRequestError for others."""
    for name, value in given.items():
        row = _ARGUMENTS.get(name)
        if name == "use_tqdm":
            progress = bool(value)
        elif name == "lora_request":
            lora = getattr(value, "lora_name", value)
        elif row is None:
            raise TypeError(f"LLM.{method}() got an unexpected keyword argument {name!r}")
        elif not asks_for_nothing(row, value):
            raise InvalidRequestError(f"{name} is not an argument of LLM.{method}; {row['instead']}.", param=name)
    return progress, lora
