"""Beam search through the whole engine finds what transformers' `generate` finds, with the same scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import BeamParams, EarlyStopping, FinishReason, Request
from engine.runtime.models.load import load_model
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from engine.text.tokenizer_files import load_tokenizer
from tests.cpu import test_models_families as tiny
from tests.cpu.model_driver import Served, request, serve, settings

MAX_TOKENS = 10
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]

Answer = tuple[list[int], float]  # tokens and score


@dataclass(frozen=True)
class Search:
    """One search, as either side is asked for it."""

    width: int
    length_penalty: float
    early_stopping: bool | str
    eos_ids: tuple[int, ...] = ()
    n: int = 1
    min_tokens: int = 0

    def request(self, request_id: str, prompt: list[int], **others: Any) -> Request:
        beam = BeamParams(
            width=self.width,
            length_penalty=self.length_penalty,
            early_stopping=EarlyStopping(self.early_stopping),
        )
        ends = {"eos_token_ids": frozenset(self.eos_ids), "min_tokens": self.min_tokens}
        return request(
            request_id, prompt, **({"beam": beam, "n": self.n, "logprobs": 0, "max_tokens": MAX_TOKENS} | ends | others)
        )

    def theirs(self, model: Any, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[Answer]:
        ids = torch.tensor([prompt])
        least = {"min_new_tokens": self.min_tokens} if self.min_tokens else {}
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                num_beams=self.width,
                num_return_sequences=self.n,
                length_penalty=self.length_penalty,
                early_stopping=self.early_stopping,
                eos_token_id=list(self.eos_ids) or None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                **least,
            )
        answers = [self._until_end(tokens) for tokens in found.sequences[:, len(prompt) :].tolist()]
        return list(zip(answers, found.sequences_scores.tolist(), strict=True))

    def _until_end(self, tokens: list[int]) -> list[int]:
        """Without what shorter answers are filled up with."""
        ends = [position for position, token in enumerate(tokens) if token in self.eos_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    def ours(self, served: Served, request_id: str) -> list[Answer]:
        answers = []
        for choice in range(self.n):
            *earlier, event = served.events[request_id, choice]
            assert not any(each.token_ids for each in earlier), "each answer comes whole"
            assert event.logprobs is not None
            ends = event.token_ids[-1] in self.eos_ids
            assert event.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
            total = sum(entry.logprob for entry in event.logprobs)
            answers.append((list(event.token_ids), total / len(event.token_ids) ** self.length_penalty))
        return answers


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What transformers computes here is so little that its threads take twenty times as long to agree on it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def check(ours: list[Answer], theirs: list[Answer], search: Search) -> None:
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs], search
    assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], rel=1e-4), search


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_random_models(name: str, tmp_path: Path) -> None:
    theirs = tiny.save_tiny(tiny.CASES[name], tmp_path)
    # Tokens that end answers early, and those that do so late or never.
    unbound = Search(4, 1.0, False, n=4).theirs(theirs, PROMPT)
    early, late = unbound[0][0][2], unbound[3][0][7]
    ends = [(), (early,), (late, early), (late,)]
    searches = [
        Search(width, penalty, stopping, ends[i % 4], n=min(width, 3), min_tokens=4 * (i % 3 == 0))
        for i, (penalty, width, stopping) in enumerate(product((0.0, 1.0, 2.0, -1.0), (2, 5), (False, True, "never")))
    ]
    config = settings(num_blocks=60, max_num_seqs=12, max_num_batched_tokens=15, max_model_len=60)
    scheduler = Scheduler(config)
    asked = [search.request(f"r{i}", PROMPT) for i, search in enumerate(searches)]
    beside = request("beside", PROMPT[3:], max_tokens=20)
    served = serve(tiny.load(tmp_path), config, [beside, *asked], depth=1, apart=1, scheduler=scheduler)
    for i, search in enumerate(searches):
        check(search.ours(served, f"r{i}"), search.theirs(theirs, PROMPT), search)
    assert any(
        len(tokens) < MAX_TOKENS for i, search in enumerate(searches) for tokens, _ in search.ours(served, f"r{i}")
    )


def test_a_tight_pool_changes_nothing(tmp_path: Path) -> None:
    theirs = tiny.save_tiny(tiny.CASES["llama"], tmp_path)
    model = tiny.load(tmp_path)
    search = Search(4, 1.0, "never", n=4)
    expected = search.theirs(theirs, PROMPT)
    config = settings(num_blocks=19, max_num_seqs=12, max_num_batched_tokens=12, max_model_len=40)
    scheduler = Scheduler(config)
    asked = [search.request(f"r{i}", PROMPT) for i in range(3)]
    served = serve(model, config, asked, depth=1, scheduler=scheduler)
    for i in range(3):
        check(search.ours(served, f"r{i}"), expected, search)
    assert scheduler.stats.preemptions > 0


def test_the_real_model(transformers_smollm2: Any) -> None:
    path = find_model(None).path
    tokenizer = load_tokenizer(str(path))
    model = load_model(
        EngineConfig(model=str(path), dtype="float32"), torch.device("cpu"), torch.float32, lambda progress: None
    )
    end = tokenizer.encode(".", add_special_tokens=False)[0]
    searches = [Search(4, 1.0, False, (end,), n=4)]
    prompt = tokenizer.encode("The capital of France is", add_special_tokens=False)
    config = settings(num_blocks=100, max_num_seqs=16)
    served = serve(model, config, [search.request(f"r{i}", prompt) for i, search in enumerate(searches)], depth=1)
    for i, search in enumerate(searches):
        check(search.ours(served, f"r{i}"), search.theirs(transformers_smollm2, prompt), search)
