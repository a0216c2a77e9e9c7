"""Drafts in the scheduler: how many pay, what they may take, what is told of them."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.config import FREE, DraftCosts
from engine.core.errors import ConfigError
from engine.core.scheduling.drafts import choose_lengths, lower_hull, seconds
from engine.core.step import StepPlan, count_agreeing
from engine.settings.engine_config import EngineConfig
from engine.settings.speculative_config import SpeculativeConfig
from tests.pure.driver import Driver, config, request

FLAT = DraftCosts(plain=((1, 1.0), (8, 1.0), (16, 2.0)), checking=((1, 1.0), (8, 1.0), (16, 2.0)))
GENTLE = DraftCosts(plain=((1, 1.0), (9, 2.2)), checking=((1, 1.0), (9, 2.2)))
STEEP = DraftCosts(plain=((1, 1.0), (2, 2.0)), checking=((1, 1.0), (2, 2.0)))


def driver(acceptance: float, **changes: object) -> Driver:
    made = Driver(config(**{"num_speculative_tokens": 4, "num_blocks": 100, "max_model_len": 400, **changes}))  # type: ignore[arg-type]
    made.runner._acceptance = acceptance
    return made


def answer(made: Driver, num: int, **changes: object) -> None:
    made.add(request("r", max_tokens=num, eos_token_ids=frozenset(), **changes))
    made.drain()
    made.check_streams()


# -- how many ----------------------------------------------------------------------------------------------------------


def test_two_costs_of_one_count_make_no_vertical_edge() -> None:
    """Steps are timed with and without drafts, so the greatest number of rows may have two times."""
    hull = lower_hull([(1, 1.0), (8, 2.0), (8, 3.0)])
    assert hull == ((1, 1.0), (8, 2.0))
    assert seconds(hull, 15) == 3.0


def test_seconds_lie_on_lines_between_the_points() -> None:
    points = ((1, 1.0), (3, 2.0), (5, 6.0))
    assert [seconds(points, rows) for rows in (1, 2, 3, 4, 5, 7)] == [1.0, 1.5, 2.0, 4.0, 6.0, 10.0]
    assert (seconds((), 9), seconds(((4, 2.0),), 9)) == (0.0, 2.0)


@given(st.dictionaries(st.integers(1, 60), st.floats(0.1, 9.0), min_size=1))
def test_a_hull_is_below_all_points_and_bends_upwards(points: dict[int, float]) -> None:
    hull = lower_hull(points.items())
    assert all(seconds(hull, rows) <= cost * (1 + 1e-9) for rows, cost in points.items())
    costs = [seconds(hull, rows) for rows in range(min(points), max(points) + 1)]
    steps = [after - before for before, after in pairwise(costs)]
    assert all(step >= -1e-9 for step in steps)
    assert all(after >= before - 1e-9 for before, after in pairwise(steps))


@given(
    sequences=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 3)), min_size=1, max_size=3),
    others=st.integers(0, 4),
    points=st.dictionaries(st.integers(1, 14), st.floats(0.5, 4.0), min_size=2, max_size=5),
)
def test_the_lengths_bring_as_many_tokens_a_second_as_any_others(
    sequences: list[tuple[float, int]], others: int, points: dict[int, float]
) -> None:
    hull = lower_hull(points.items())
    costs = DraftCosts(plain=hull, checking=hull)
    chances, rooms = [chance for chance, _ in sequences], [room for _, room in sequences]
    num_rows = len(sequences) + others

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = sum(
            chance**ahead for chance, length in zip(chances, lengths, strict=True) for ahead in range(length + 1)
        )
        return tokens / seconds(hull, num_rows + sum(lengths))

    chosen = tuple(choose_lengths(chances, rooms, num_rows, costs))
    assert all(0 <= length <= room for length, room in zip(chosen, rooms, strict=True))
    assert rate(chosen) >= max(map(rate, product(*(range(room + 1) for room in rooms)))) * (1 - 1e-9)


def test_what_costs_nothing_is_drafted_in_full() -> None:
    assert choose_lengths([0.1, 0.9], [4, 2], 2, FREE) == [4, 2]


def test_a_drafter_that_takes_longer_than_it_saves_is_not_asked() -> None:
    assert choose_lengths([0.9], [4], 1, FLAT._replace(drafting=((1, 0.1),))) == [4]
    assert choose_lengths([0.9], [4], 1, FLAT._replace(drafting=((1, 2.0),))) == [0]


def test_a_graph_that_drafts_would_do_without_is_weighed_as_well() -> None:
    """Steps with drafts take four times as long here, whatever their rows."""
    slow = DraftCosts(plain=((1, 1.0), (8, 1.0)), checking=((1, 4.0), (8, 4.0)))
    assert choose_lengths([0.5], [4], 1, slow) == [0]
    assert choose_lengths([0.99], [4], 1, slow) == [4]


@pytest.mark.parametrize(
    ("costs", "acceptance", "num_steps", "num_drafts"),
    [(GENTLE, 1.0, (41, 60), (150, 170)), (GENTLE, 0.0, (190, 200), (1, 30)), (STEEP, 0.0, (200, 200), (0, 0))],
    ids=["right", "wrong", "dear"],
)
def test_who_is_right_drafts_more_and_who_is_wrong_stops(
    costs: DraftCosts, acceptance: float, num_steps: tuple[int, int], num_drafts: tuple[int, int]
) -> None:
    made = driver(acceptance, draft_costs=costs)
    answer(made, 200)
    assert num_steps[0] <= made.runner.num_steps <= num_steps[1]
    assert num_drafts[0] <= made.scheduler.stats.spec_draft_tokens <= num_drafts[1]


def test_who_was_wrong_for_a_while_tries_again() -> None:
    made = driver(0.0, draft_costs=GENTLE)
    made.add(request("r", max_tokens=300, eos_token_ids=frozenset()))
    for _ in range(60):
        made.step()
    made.runner._acceptance = 1.0
    made.drain()
    made.check_streams()
    assert made.runner.num_steps < 200


def test_a_new_sequence_begins_with_what_is_usual() -> None:
    """So that a text which cannot be foreseen costs each of many short answers nothing."""
    made = driver(0.0, draft_costs=GENTLE)
    counts = []
    for index in range(40):
        before = made.scheduler.stats.spec_draft_tokens
        made.add(request(f"r{index}", (index, 2), max_tokens=12, eos_token_ids=frozenset()))
        made.drain()
        counts.append(made.scheduler.stats.spec_draft_tokens - before)
    made.check_streams()
    assert counts[0] > 3
    assert sum(counts[-20:]) <= 20


# -- what they may take ------------------------------------------------------------------------------------------------


def test_nobody_is_preempted_and_no_prompt_is_held_up_for_drafts() -> None:
    """A pool and a budget that just do: drafts get what is left of them."""
    counts = []
    for num in (0, 4):
        made = driver(0.9, num_blocks=13, max_num_batched_tokens=8, num_speculative_tokens=num)
        for index in range(6):
            made.add(request(f"r{index}", (index, 2, 3, 4, 5), max_tokens=12, eos_token_ids=frozenset()))
        made.drain()
        made.check_streams()
        counts.append((made.scheduler.stats.preemptions, made.runner.num_steps))
    assert counts[1][0] <= counts[0][0]
    assert counts[1][1] < counts[0][1]


def test_a_step_draws_no_more_than_memory_was_measured_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.config._MAX_DRAFTED_ROWS", 9)
    made = driver(1.0, max_num_seqs=4, max_num_batched_tokens=64)
    plan, num_rows = made.scheduler.plan, []

    def watched(now: float) -> StepPlan | None:
        step = plan(now)
        if step is not None:
            num_rows.append(step.num_samples + sum(num for _, num in step.drafts))
        return step

    monkeypatch.setattr(made.scheduler, "plan", watched)
    for index in range(6):
        made.add(request(f"r{index}", (index, 2, 3, 4, 5), max_tokens=12, eos_token_ids=frozenset()))
    made.drain()
    assert max(num_rows) == made.scheduler.config.max_num_rows == 9


def test_drafts_end_before_the_last_token() -> None:
    made = driver(1.0)
    answer(made, 7)
    assert made.runner.num_steps == 3  # the prompt and a token, five at once, and the last, which is not fed back
    assert made.scheduler.stats.spec_draft_tokens == 4


# -- what is told ------------------------------------------------------------------------------------------------------


def test_tokens_that_come_together_are_counted_as_such() -> None:
    made = driver(1.0)
    answer(made, 21, logprobs=1)
    stats = made.scheduler.stats
    assert (stats.generation_tokens, stats.itl_s.count) == (21, 20)
    assert stats.itl_s.counts[0] == 16  # of four steps with five tokens each
    assert stats.itl_s.sum == pytest.approx(4 * 0.02)
    assert (stats.spec_drafts, stats.spec_draft_tokens, stats.spec_accepted_at) == (4, 16, [4, 4, 4, 4])
    assert made.ends["r", 0].logprobs is not None
    assert len(made.ends["r", 0].logprobs) == len(made.ends["r", 0].token_ids) == 5


def test_an_end_among_the_drafts_ends_the_sequence_there() -> None:
    for ending in range(3, 20):
        made = driver(1.0)
        made.add(request("r", max_tokens=60, eos_token_ids=frozenset(range(0, 50, ending))))
        made.drain()
        made.check_streams()


def test_draws_stand_up_to_the_first_that_differs() -> None:
    assert [count_agreeing([1, 2, 3], drafts) for drafts in ([1, 2], [1, 9], [9, 2])] == [3, 2, 1]


# -- what may be asked for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("{", "which is not JSON"),
        ("3", "it must be a JSON object"),
        ({}, "method is missing; choose one of ngram, suffix, draft_model"),
        ({"num_speculative_tokens": 3}, "method is missing; choose one of ngram, suffix, draft_model"),
        *(
            (
                {"method": method, "model": "m"},
                f"method is '{method}', which Quire does not serve; choose one of ngram, ",
            )
            for method in ("eagle", "dflash", "dspark", "extract_hidden_states", "custom_class", "medusa")
        ),
        ({"method": "ngram", "prompt_lookup": 3}, "has no key 'prompt_lookup'; did you mean 'prompt_lookup_"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be at least 1"),
        (
            {"method": "ngram", "num_speculative_tokens": "4"},
            "num_speculative_tokens is '4'; it must be a whole number",
        ),
        (
            {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 4},
            "prompt_lookup_min is 4, more than prompt_lookup_max, which is 3.",
        ),
        ({"method": "ngram", "model": "m"}, "model is for the method draft_model"),
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 24}, "_max_tree_depth is for the method suffix"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 65}, "_max_tree_depth is 65; it must be at most 64"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": float("nan")}, "is nan; it must be at least 0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": "1"}, "_spec_factor is '1'; it must be a number"),
        ({"model": "m", "prompt_lookup_max": 3}, "prompt_lookup_max is for the method ngram"),
        ({"method": "ngram", "max_model_len": 9}, "max_model_len is for the method draft_model"),
        ({"model": "m", "max_model_len": 0}, "max_model_len is 0; it must be at least 1"),
        *(
            ({"model": "m", key: value}, f"{key} is {value!r}, which Quire does not serve: {reason}")
            for key, value, reason in (
                ("draft_tensor_parallel_size", 2, "a draft runs on one device"),
                ("draft_load_config", {"load_format": "dummy"}, "a draft is loaded as --load-format says"),
                ("parallel_drafting", True, "drafts are computed one after the other"),
                ("use_heterogeneous_vocab", True, "a draft has the tokenizer of the model"),
                ("rejection_sample_method", "synthetic", "only the standard method"),
                ("synthetic_acceptance_rates", [0.5], "it accepts drafts that change answers"),
                ("synthetic_acceptance_length", 2, "it accepts drafts that change answers"),
                ("fly_window", 3, "it accepts drafts that change answers"),
            )
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(asked: object, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.read(EngineConfig(model="m", speculative_config=asked).speculative_config).check_named()  # type: ignore[arg-type]
    assert told in str(caught.value)
    assert str(caught.value).startswith("--speculative-config")


def test_what_is_left_out_has_a_default() -> None:
    read = SpeculativeConfig.read('{"method": "ngram", "prompt_lookup_max": 1}')
    assert (read.num_speculative_tokens, read.prompt_lookup_min, read.prompt_lookup_max) == (4, 1, 1)
    assert SpeculativeConfig.read({"method": "ngram", "prompt_lookup_min": 6}).prompt_lookup_max == 6
    assert SpeculativeConfig.read({"model": "m"}).method == ""  # its config.json decides
    assert SpeculativeConfig.read({"model": Path("m")}).model == "m"


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "ngram"},
        {"method": "ngram_gpu"},
        {"model": "ngram"},
        {"model": "[ngram]"},
        {"method": "ngram", "model": "[ngram]", "quantization": None},
        {"method": "ngram", "rejection_sample_method": "standard", "draft_tensor_parallel_size": 1},
        {"method": "ngram", "draft_load_config": {}, "parallel_drafting": False, "use_heterogeneous_vocab": False},
    ],
)
def test_vllms_spellings_of_one_configuration(asked: dict[str, object]) -> None:
    assert SpeculativeConfig.read(asked) == SpeculativeConfig(method="ngram", num_speculative_tokens=4)


def test_the_method_suffix_takes_vllms_keys() -> None:
    keys = ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    asked = dict(zip([f"suffix_decoding_{key}" for key in keys], (8, 0, 2, 0.5), strict=True))
    read = SpeculativeConfig.read({"method": "suffix", **asked})
    assert {key: getattr(read, key) for key in asked} == asked
    assert SpeculativeConfig.read({"method": "suffix"}).num_speculative_tokens == 16


def test_a_key_without_effect_is_named() -> None:
    keys = [
        "attention_backend",
        "code_revision",
        "disable_eagle_block_drop",
        "disable_lookahead_block_hashes",
        "enforce_eager",
        "moe_backend",
        "disable_padded_drafter_batch",
        "draft_lm_head_quantization",
        "draft_sample_method",
        "kv_cache_dtype",
        "num_speculative_tokens_per_batch_size",
        "use_local_argmax_reduction",
    ]
    read = SpeculativeConfig.read({"method": "ngram", **dict.fromkeys(keys, "any")})
    assert [hint.split()[0] for hint in read.hints] == keys
    assert all(" has no effect: " in hint for hint in read.hints)


def test_steps_are_not_planned_ahead_of_tokens_that_drafts_begin_with() -> None:
    with pytest.raises(ConfigError, match="--async-scheduling"):
        EngineConfig(model="m", speculative_config={"method": "ngram"}, async_scheduling=True)
