"""Makes the engine's configuration of the offline API's arguments, those of vLLM's LLM included."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from engine.core.errors import ConfigError
from engine.settings.engine_config import EngineConfig
from engine.settings.foreign import IN_CHECKPOINT, OF_CHECKPOINT, check_same, known_value, refuse, split_file, translate
from engine.settings.setting import declared, expand, features
from engine.system.similar import closest

logger = logging.getLogger(__name__)

_OF_THE_DAEMON = frozenset(
    {"host", "port", "served_model_name", "api_key", "log_level", "chat_template_content_format"}
    | {"allowed_media_domains"}
)
_IN_CALLS = {"pooling": "LLM.embed"}  # which take it


def engine_config(path: str, given: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of arguments named as the daemon's flags, or vLLM's. Raises ConfigError.

    An argument of vLLM means what its flag means to `quire serve`: another setting, no effect, or a refusal with the reason.
    """
    settings = declared(EngineConfig)
    known = [each.name for each in settings if not each.setting.feature] + list(features(settings))
    flags = {name: _plain(value) for name, value in given.items() if value is not None}
    own, foreign = split_file(flags, known)
    translated = translate([each._replace(flag=each.flag.removeprefix("--").replace("-", "_")) for each in foreign])
    values: dict[str, Any] = {}
    together = check_same(translated, own)
    refuse(translated.faults)
    for name, value in together.items():
        if name == "quantization" and value in IN_CHECKPOINT:
            translated.remarks.append(f"quantization {value} ({OF_CHECKPOINT})")
        expanded, notices = expand(settings, {name: known_value(name, value)})
        values.update(expanded)
        for notice in notices:
            logger.warning(notice)
    for each in settings:
        if each.setting.is_auto and values.get(each.name) == "auto":
            values[each.name] = None
    for name in values.keys() - {each.name for each in settings}:
        raise ConfigError(_unknown(name, known))
    if translated.remarks:
        logger.info("no effect here: %s", "; ".join(translated.remarks))
    try:
        return EngineConfig(model=path, **values)
    except TypeError as error:  # a string where a number is compared
        raise ConfigError(f"A setting of the engine has the wrong type: {error}.") from error


def _plain(value: Any) -> Any:
    """Return a torch.dtype as its name, other values as they are."""
    return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value


def _unknown(name: str, known: list[str]) -> str:
    if name in _OF_THE_DAEMON:
        return f"{name} is a setting of `quire serve`, not of an engine without HTTP; leave it out."
    if name in _IN_CALLS:
        return f"{name} is an argument of {_IN_CALLS[name]}, not of LLM; give it there."
    close = closest(name, known)
    hint = f"did you mean {close}?" if close else "docs/reference/settings.md lists them."
    return f"{name} is not a setting of the engine; {hint}"
