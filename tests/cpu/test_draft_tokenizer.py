"""A draft model has to mean the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from engine.core.errors import ConfigError
from engine.sources.model_source import find_model
from engine.text.tokenizer_files import check_draft_tokenizer, load_tokenizer


def test_only_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = find_model(None).path
    tokenizer = load_tokenizer(path)
    for fine in (None, {"method": "ngram"}, {"model": path}, {"model": str(tmp_path)}):
        check_draft_tokenizer(tokenizer, fine)
    backend = Backend(WordLevel({"the": 0, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="has another tokenizer than the model"):
        check_draft_tokenizer(tokenizer, {"model": str(tmp_path)})
