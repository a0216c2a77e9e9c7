"""The windows that `tools perplexity` cuts, and the sum over their tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.__main__ import main
from tools.perplexity import cut_windows, read_text, sum_up


@pytest.mark.parametrize("num_tokens", [2, 7, 8, 9, 16, 17, 30])
@pytest.mark.parametrize("prefix", [(), (99,)])
def test_windows_hold_every_token_once_behind_the_prefix(num_tokens: int, prefix: tuple[int, ...]) -> None:
    tokens = list(range(num_tokens))
    windows = list(cut_windows(tokens, prefix, 8))
    assert all(window[: len(prefix)] == prefix and len(window) <= 8 for window in windows)
    told = [token for window in windows for token in window[len(prefix) :]]
    assert told == (tokens[:-1] if len(tokens) % 8 == 1 and not prefix else tokens)  # one alone predicts nothing


def test_the_sum_is_of_every_token_but_those_skipped() -> None:
    def output(ids: list[int]) -> Any:
        logprobs = [None, *({token: SimpleNamespace(logprob=-token / 8)} for token in ids[1:])]
        return SimpleNamespace(prompt_token_ids=ids, prompt_logprobs=logprobs)

    windows = [list(range(20)), list(range(5, 12))]
    scored = [token for window in windows for token in window[2:]]
    assert sum_up([output(window) for window in windows], 2) == (sum(scored) / 8, len(scored))


def test_the_default_text_is_found_anywhere_and_long_enough() -> None:
    assert len(read_text(None)) > 300_000


def test_faults_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for arguments, told in (
        (["--window", "1"], "--window"),
        (["--text", str(tmp_path / "latin")], "not UTF-8"),
    ):
        assert main(["perplexity", *arguments]) == 2
        assert told in capsys.readouterr().err
