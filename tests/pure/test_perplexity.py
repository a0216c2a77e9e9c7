"""The perplexity script: what is cut into windows, and what is summed, over a fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.config import SchedulerConfig
from engine.core.fake_runner import FakeRunner
from engine.core.scheduler import Scheduler
from engine.core.types import TokenLogprob
from engine.loop import Engine
from loadtest.__main__ import main
from loadtest.perplexity import cut_windows, read_text, score_windows


@pytest.mark.parametrize("num_tokens", [2, 7, 8, 9, 16, 17, 30])
@pytest.mark.parametrize("prefix", [(), (99,)])
def test_windows_hold_every_token_once_behind_the_prefix(num_tokens: int, prefix: tuple[int, ...]) -> None:
    tokens = list(range(num_tokens))
    windows = list(cut_windows(tokens, prefix, 8))
    assert all(window[: len(prefix)] == prefix and len(window) <= 8 for window in windows)
    told = [token for window in windows for token in window[len(prefix) :]]
    assert told == (tokens[:-1] if len(tokens) % 8 == 1 and not prefix else tokens)  # one alone predicts nothing


class _Runner(FakeRunner):
    """The larger a token's number, the less likely it is."""

    def _logprob(self, token: int, num_top: int) -> TokenLogprob:
        return super()._logprob(token, num_top)._replace(logprob=-token / 8)


def test_the_sum_is_of_every_token_but_those_skipped() -> None:
    config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8)
    windows = [tuple(range(20)), tuple(range(5, 12))]
    negative, num_tokens = score_windows(
        Engine(Scheduler(config), _Runner(config), vocab_size=512), windows, 2, "title"
    )
    scored = [token for window in windows for token in window[2:]]
    assert (num_tokens, negative) == (len(scored), sum(scored) / 8)


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
