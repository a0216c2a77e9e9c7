"""The runner over a tiny model: what the scheduler does to a request must never show in its tokens."""

from __future__ import annotations

import random

import pytest
import torch

from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import FinishReason
from engine.runtime.execution.synthetic import warm_up_plan
from engine.runtime.pool.batch import Ranks
from engine.runtime.pool.kv_cache import KVCache
from tests.cpu.dense_attention import DenseAttention
from tests.cpu.model_driver import Served, TinyModel, make_runner, request, serve, settings, solo_greedy

MODEL = TinyModel()
_random = random.Random(5)
PROMPTS = [[_random.randrange(MODEL.vocab_size) for _ in range(length)] for length in (1, 3, 4, 17, 30, 41, 8, 9)]
SHARED = PROMPTS[5][:28]
# Each takes something away from the scheduler, or gives it something to share.
REGIMES = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 8},
    "few_slots": {"max_num_seqs": 3},
    "tiny_pool": {"num_blocks": 22},
    "tiny_pool_chunked": {"num_blocks": 22, "max_num_batched_tokens": 9},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "block_size_1": {"block_size": 1, "num_blocks": 600},
    "block_size_32": {"block_size": 32, "num_blocks": 30},
}


def assert_greedy(served: Served, prompts: list[list[int]], num: int = 12) -> None:
    for i, prompt in enumerate(prompts):
        assert served.ids[f"r{i}", 0] == solo_greedy(MODEL, prompt, num), f"prompt {i}"


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
def test_a_batch_says_what_each_says_alone(regime: dict, depth: int) -> None:
    requests = [request(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    config = settings(**regime)
    scheduler = Scheduler(config)
    served = serve(MODEL, config, requests, depth=depth, apart=1, scheduler=scheduler)
    assert_greedy(served, PROMPTS)
    if "num_blocks" in regime and regime["num_blocks"] == 22:
        assert scheduler.stats.preemptions > 0  # or the regime tests nothing


def test_torch_operations_serve() -> None:
    config = settings(max_num_batched_tokens=16)
    requests = [request(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    assert_greedy(serve(MODEL, config, requests, runner=make_runner(MODEL, config, "torch")), PROMPTS)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_int8_kv_says_the_same_however_it_is_scheduled(backend: str) -> None:
    """Chunks, preemption, prefix hits and forks move and copy scales and numbers together."""
    asked = [request(f"r{i}", prompt, max_tokens=14, temperature=0.7 * (i % 2), n=1 + i % 3)
             for i, prompt in enumerate([*PROMPTS[2:], [*SHARED, 1], [*SHARED, 1, 2, 3, 4]])]  # fmt: skip
    alone: dict[tuple[str, int], list[int]] = {}
    for one in asked:
        alone |= serve(MODEL, settings(), [one], runner=make_runner(MODEL, settings(), backend, torch.int8)).ids
    num_preemptions, num_hits = 0, 0
    for depth, regime in enumerate(({}, {"max_num_batched_tokens": 9}, {"num_blocks": 22}, {"block_size": 16})):
        config = settings(**regime)
        scheduler, runner = Scheduler(config), make_runner(MODEL, config, backend, torch.int8)
        served = serve(MODEL, config, asked, depth=depth % 2, apart=2, scheduler=scheduler, runner=runner)
        num_preemptions += scheduler.stats.preemptions
        num_hits += scheduler.stats.prefix_hit_tokens
        assert served.ids == alone, regime
    assert num_preemptions > 0
    assert num_hits > 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prefix_hits(depth: int) -> None:
    prompts = [SHARED + tail for tail in ([1, 2], [1, 2, 3, 4, 5], [9], [9, 9, 9])]
    config = settings()
    scheduler = Scheduler(config)
    requests = [request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    served = serve(MODEL, config, requests, depth=depth, apart=3, scheduler=scheduler)
    assert scheduler.stats.prefix_hit_tokens >= 3 * 28
    assert_greedy(served, prompts)


SEEDED = {
    "plain": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.4, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalized": {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.6, "presence_penalty": 0.4,
                  "repetition_penalty": 1.3},
    "greedy_penalized": {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
    "biased": {"temperature": 1.0, "seed": 6, "logit_bias": ((3, 5.0), (9, -100.0))},
    "min_tokens": {"temperature": 2.0, "seed": 7, "min_tokens": 9, "eos_token_ids": frozenset(range(30))},
}  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_seeded_requests_say_the_same_alone_busy_preempted_and_on_a_hit(depth: int) -> None:
    """Each kind of sampling, n 1 and 3: alone on a roomy engine, then in every regime beside all the others."""
    prompt = PROMPTS[4]
    asked = [
        request(f"{name}-{n}", prompt, max_tokens=20, n=n, **sampling)
        for name, sampling in SEEDED.items()
        for n in (1, 3)
    ]
    alone: dict[tuple[str, int], list[int]] = {}
    for each in asked:
        alone |= serve(MODEL, settings(), [each]).ids
    assert len({tuple(ids) for ids in alone.values()}) > len(asked)  # choices and kinds do differ
    num_preemptions = 0
    for regime in ({}, {"max_num_batched_tokens": 9}, {"num_blocks": 22}, {"enable_prefix_caching": False}):
        config = settings(**regime)
        scheduler = Scheduler(config)
        served = serve(MODEL, config, asked, depth=depth, apart=2, scheduler=scheduler)
        num_preemptions += scheduler.stats.preemptions
        for key, ids in alone.items():
            assert served.ids[key] == ids, (key, regime)
    assert num_preemptions > 0


def test_other_ranks_copy_the_blocks_that_this_one_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, by_others = list[tuple[int, int]](), list[tuple[int, int]]()
    monkeypatch.setattr(KVCache, "copy_blocks", lambda _, copies: copied.extend(copies))
    monkeypatch.setattr(Ranks, "copy", lambda _, copies: by_others.extend(copies))
    serve(MODEL, settings(), [request("n", PROMPTS[3], n=3, temperature=1.0)])
    assert len(copied) == 2, "the prompt's last block, for all but one of the answers"
    assert by_others == copied


def test_greedy_choices_are_alike_and_share_a_first_choice_with_n_1() -> None:
    served = serve(MODEL, settings(), [request("r0", PROMPTS[3], n=4)])
    for choice in range(4):
        assert served.ids["r0", choice] == solo_greedy(MODEL, PROMPTS[3], 12)


@pytest.mark.parametrize("budget", [256, 7])
def test_prompt_logprobs_are_those_of_the_whole_prompt(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.pool.batch._SCORED_BYTES", 4 * MODEL.vocab_size * 5)  # five rows at a time
    prompt = PROMPTS[5]
    asked = request("r", prompt, prompt_logprobs=3, logprobs=2, max_tokens=3)
    served = serve(MODEL, settings(max_num_batched_tokens=max(budget, 8)), [asked, request("other", PROMPTS[4])])
    events = served.events["r", 0]
    assert events[0].prompt is not None
    entries = events[0].prompt.logprobs
    assert entries is not None
    assert entries[0] is None
    assert len(entries) == len(prompt)

    tokens = prompt + served.ids["r", 0]
    hidden = MODEL.forward(torch.tensor(tokens), torch.arange(len(tokens)), DenseAttention(MODEL.states))
    expected = torch.log_softmax(MODEL.logits(hidden), -1)
    generated = [entry for event in events for entry in event.logprobs or ()]
    assert len(generated) == 3
    for position, entry in enumerate([*entries[1:], *generated], start=1):
        assert entry is not None
        row = expected[position - 1]
        assert entry.token_id == tokens[position]
        assert entry.logprob == pytest.approx(row[tokens[position]].item(), abs=1e-4)
        assert entry.rank == int((row > row[tokens[position]]).sum()) + 1
        assert [token for token, _ in entry.top] == row.argsort(descending=True)[: len(entry.top)].tolist()


def test_scoring_alone_draws_nothing() -> None:
    served = serve(MODEL, settings(), [request("r", PROMPTS[4], max_tokens=0, prompt_logprobs=0)])
    (event,) = served.events["r", 0]
    assert event.finish_reason is FinishReason.LENGTH
    assert event.prompt is not None
    assert len(event.prompt.logprobs or ()) == len(PROMPTS[4])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_that_breaks_the_arithmetic_ends_alone(depth: int) -> None:
    """One prompt makes NaN; its neighbours, and whoever gets its blocks and its slot afterwards, are untouched."""
    model = TinyModel(poison=60)
    sane = [[token % 60 for token in prompt] for prompt in PROMPTS]
    config = settings(num_blocks=40)
    poisoned = [request(f"bad{i}", [5, 60, 7][: 2 + i % 2] * 3) for i in range(4)]
    requests = [
        each for pair in zip(poisoned, [request(f"r{i}", p) for i, p in enumerate(sane)], strict=False) for each in pair
    ]
    requests += [request(f"r{i}", p) for i, p in enumerate(sane)][4:]
    served = serve(model, config, requests, depth=depth, apart=1)
    for i in range(4):
        end = served.events[f"bad{i}", 0][-1]
        assert end.finish_reason is FinishReason.ERROR
        assert "not a finite number" in str(end.error)
    for i, prompt in enumerate(sane):
        assert served.ids[f"r{i}", 0] == solo_greedy(model, prompt, 12)


def test_a_scored_prompt_that_breaks_the_arithmetic_is_an_error() -> None:
    """Nothing is drawn from it, so its log probabilities are all there is to see."""
    scoring = {"max_tokens": 0, "prompt_logprobs": 1}
    requests = [request("bad", [5, 60, 7], **scoring), request("good", [5, 6, 7], **scoring)]
    served = serve(TinyModel(poison=60), settings(), requests)
    ends = {name: served.events[name, 0][-1].finish_reason for name in ("bad", "good")}
    assert ends == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}


def test_warm_up_leaves_no_trace() -> None:
    config = settings()
    runner = make_runner(MODEL, config)
    assert len(runner.run(warm_up_plan(config, 5, 63)).wait().token_ids) == 5
    requests = [request(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    assert_greedy(serve(MODEL, config, requests, runner=runner), PROMPTS)
