"""The pydantic types that turn text of flags, variables and YAML into values.

Start-up thread.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, ByteSize, SecretStr
from pydantic_core import PydanticCustomError

from engine.settings.engine_config import LoraModule
from engine.settings.setting import Declared

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")


def type_of(each: Declared) -> Any:
    """Return the type to validate a setting's value as."""
    setting = each.setting
    if setting.is_secret and type(None) in get_args(each.type):
        return SecretStr | None
    if setting.is_secret:
        return Annotated[tuple[SecretStr, ...], BeforeValidator(_split_keys)]
    if setting.unit in ("TOKENS", "N") and int in (each.type, *get_args(each.type)):
        count: Any = Annotated[each.type, BeforeValidator(_count)]
        return Annotated[count, BeforeValidator(_none_if_auto)] if setting.is_auto else count
    if setting.is_auto:
        return Annotated[each.type, BeforeValidator(_none_if_auto)]
    if setting.unit == "JSON" and str not in get_args(each.type):
        return Annotated[each.type, BeforeValidator(_read_json)]
    if setting.unit == "SIZE":
        size = Annotated[ByteSize, BeforeValidator(_count)]
        return size | None if type(None) in get_args(each.type) else size
    if each.type == tuple[LoraModule, ...]:
        return Annotated[each.type, BeforeValidator(_read_modules)]
    if each.type == tuple[str, ...]:
        return Annotated[each.type, BeforeValidator(_split)]
    return each.type


def reveal(value: Any) -> Any:
    """Return a validated value as the configurations hold it: secrets as plain text."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, tuple):
        return tuple(item.get_secret_value() if isinstance(item, SecretStr) else item for item in value)
    return value


def _split(value: object) -> object:
    """Return the items of a list, which variables and YAML strings separate with commas."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


def _split_keys(value: object) -> object:
    """Return the items of a list of keys. Refuses an empty key: dropped, it would open the daemon to all."""
    keys = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
    if isinstance(keys, list):  # llama-server's --api-key separates keys with commas, too
        keys = [key for each in keys for key in (each.split(",") if isinstance(each, str) else [each])]
    if isinstance(keys, list) and not (
        keys and all(not isinstance(key, str) or (key and key == key.strip()) for key in keys)
    ):
        sentence = "a key is empty, or begins or ends with a space; give every key, or leave the setting out"
        raise PydanticCustomError("empty_key", sentence)
    return keys


def _count(value: object) -> object:
    """Return a number written as vLLM takes it: 32k is 32,000, 32K is 32,768, and so on with m, g and t."""
    found = _COUNT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    base = 1000 if found[2].islower() else 1024
    return int(float(found[1]) * base ** ("kmgt".index(found[2].lower()) + 1))


def _read_json(value: object) -> object:
    """Return the object of a JSON setting."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise PydanticCustomError("not_json", "it is not JSON") from error
    if found is not None and not isinstance(found, dict):
        raise PydanticCustomError("not_object", "it must be a JSON object")
    return found


def _none_if_auto(value: object) -> object:
    return None if value == "auto" else value


def _read_modules(value: object) -> tuple[LoraModule, ...]:
    """Return adapters given as name=path, or as objects of `name` and `path` like vLLM's."""
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
    if isinstance(item, dict):  # vLLM's third key changes a card's parent, which is the served model here
        item = {key: value for key, value in item.items() if key != "base_model_name"}
    if not isinstance(item, dict) or item.keys() != {"name", "path"}:
        raise ValueError(item)
    if not all(isinstance(text, str) and text for text in item.values()):
        raise ValueError(item)
    return LoraModule(item["name"], item["path"])
