"""Whether a draft model means the same tokens as the model that it drafts for. At start-up, beside the loading of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.errors import ConfigError, ModelLoadError
from engine.speculative_config import SpeculativeConfig
from engine.text.detokenizer import Tokenizer
from engine.text.tokenizer import PROBE, load_tokenizer


def check_draft_tokenizer(tokenizer: Tokenizer, speculative_config: str | Mapping[str, Any] | None) -> None:
    """Raise ConfigError for a draft model whose tokenizer cuts a text otherwise: hardly a draft of it would be right."""
    asked = None if speculative_config is None else SpeculativeConfig.read(speculative_config)
    if asked is None or asked.model is None:
        return
    try:
        other = load_tokenizer(asked.model, revision=asked.revision)
    except ModelLoadError:
        return  # weights alone, of which the engine compares what can be compared
    if other.encode(PROBE, add_special_tokens=False) != tokenizer.encode(PROBE, add_special_tokens=False):
        raise ConfigError(
            f"--speculative-config: the draft model {asked.model} has another tokenizer than the model; choose one of the "
            "same family."
        )
