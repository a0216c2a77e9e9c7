"""--lora-modules as flags, variables, YAML and JSON spell it. Read once, before anything is loaded."""

from __future__ import annotations

import json

from pydantic_core import PydanticCustomError

from engine.core.config import LoraModule


def read_modules(value: object) -> tuple[LoraModule, ...]:
    """Adapters as name=path, or as objects of `name` and `path` like vLLM's."""
    try:
        if isinstance(value, str):
            is_json = value.lstrip().startswith(("[", "{"))
            value = json.loads(value) if is_json else [item.strip() for item in value.split(",") if item.strip()]
        return tuple(_module(item) for item in (value if isinstance(value, list | tuple) else [value]))
    except ValueError as error:
        sentence = 'write each adapter as name=path, or as {"name": ..., "path": ...}'
        raise PydanticCustomError("lora_modules", sentence) from error


def _module(item: object) -> LoraModule:
    if isinstance(item, LoraModule):
        return item
    if isinstance(item, str) and item.lstrip().startswith("{"):
        item = json.loads(item)
    elif isinstance(item, str):
        name, _, path = item.partition("=")
        item = {"name": name.strip(), "path": path.strip()}
    if not isinstance(item, dict) or item.keys() != {"name", "path"}:
        raise ValueError(item)
    if not all(isinstance(text, str) and text for text in item.values()):
        raise ValueError(item)
    return LoraModule(item["name"], item["path"])
