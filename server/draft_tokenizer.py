"""Whether a draft model means the same tokens as the model that it drafts for. At start-up, beside the loading of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.errors import ConfigError, ModelLoadError
from engine.core.speculative_config import SpeculativeConfig
from server.text import Tokenizer
from server.tokenizer import load_tokenizer

_PROBE = (
    "The quick brown fox jumps over 1,234,567 lazy dogs; it's \u00fcber-schnell, \u00e9l\u00e9gant and 42% cheaper.\n"
    "def f(x):\n    return {'a': [x ** 2, None]}  # \u0434\u0430, \u4f60\u597d, \U0001f98a\n"
)


def check_draft_tokenizer(tokenizer: Tokenizer, speculative_config: str | Mapping[str, Any] | None) -> None:
    """Raise ConfigError for a draft model whose tokenizer cuts a text otherwise: hardly a draft of it would be right."""
    asked = None if speculative_config is None else SpeculativeConfig.read(speculative_config)
    if asked is None or asked.model is None:
        return
    try:
        other = load_tokenizer(asked.model, revision=asked.revision)
    except ModelLoadError:
        return  # weights alone, of which the engine compares what can be compared
    if other.encode(_PROBE, add_special_tokens=False) != tokenizer.encode(_PROBE, add_special_tokens=False):
        raise ConfigError(
            f"--speculative-config: the draft model {asked.model} has another tokenizer than the model; choose one of the "
            "same family."
        )
