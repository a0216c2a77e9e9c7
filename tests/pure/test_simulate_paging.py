"""The simulator against the arithmetic of its examples, and its command as a user runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from engine.core.config import SchedulerConfig
from engine.core.stats import PreemptionKind
from loadtest.__main__ import main
from loadtest.simulation import paging as simulate


def config(num_blocks: int = 64, policy: str = "fcfs") -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        policy=policy,
    )


LENGTHS, ARRIVALS = [32, 128, 64, 256], [0.0, 2.0, 4.0, 6.0]


def test_the_example_takes_the_blocks_of_the_arithmetic() -> None:
    trace = simulate.simulate(config(), simulate.batch(LENGTHS, ARRIVALS, prompt_len=1))
    assert trace.blocks == [2, 8, 4, 16]
    assert sum(trace.blocks) == 30
    static = simulate.StaticBatch.of(LENGTHS, 16)
    assert (static.blocks, static.slots, static.useful) == (64, 1024, 480)
    assert f"{static.efficiency:.1%}" == "46.9%"


def test_blocks_in_use_rise_and_fall_and_all_come_back() -> None:
    trace = simulate.simulate(config(), simulate.batch(LENGTHS, ARRIVALS, prompt_len=1))
    held = [sample.held for sample in trace.samples]
    assert held[0] == 1
    assert held[-1] == 0
    assert max(held) == trace.peak == 16
    assert any(later < earlier for earlier, later in pairwise(held))
    # One token a step for each: the last to arrive, at 6, ends 256 steps later.
    assert trace.finished == {"r0": 32.0, "r1": 130.0, "r2": 68.0, "r3": 262.0}


@pytest.mark.parametrize("prompt_len", [1, 20])
@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_a_pool_too_small_for_all_preempts_and_changes_no_token(policy: str, prompt_len: int) -> None:
    requests = simulate.batch([96, 96, 96, 96], ARRIVALS, prompt_len=prompt_len)
    roomy = simulate.simulate(config(64, policy), requests)
    tight = simulate.simulate(config(10, policy), requests)
    assert roomy.preemptions == 0
    assert tight.preemptions > 0
    assert tight.peak <= 10
    assert tight.tokens == roomy.tokens
    swapping = simulate.simulate(replace(config(10, policy), num_host_blocks=40), requests)
    assert swapping.preempted[PreemptionKind.SWAP] == swapping.preemptions > 0
    assert swapping.swapped_blocks > 0
    assert swapping.tokens == roomy.tokens


def test_blocks_are_told_in_order_of_arrival_whatever_the_policy() -> None:
    requests = simulate.batch([128, 16, 64], [0.0, 0.0, 0.0], prompt_len=8)
    assert simulate.simulate(config(policy="sjf"), requests).blocks == [8, 1, 4]
    backwards = simulate.batch([128, 16, 64], [9.0, 5.0, 0.0], prompt_len=8)
    assert simulate.simulate(config(), backwards).blocks == [4, 1, 8]


def test_sixteen_chats_share_their_prefix() -> None:
    sharing = simulate.measure_sharing(16)
    assert (sharing.formula_shared, sharing.formula_unshared) == (13, 208)
    assert sharing.forked == 13
    assert sharing.chats_unshared == 208
    # 200 tokens are 12 full blocks and half of a 13th, which each chat has to itself.
    assert sharing.forked_diverged == sharing.chats_shared == 12 + 16
    assert sharing.chats_hit_tokens == 15 * 192  # that half is computed


def test_a_block_of_the_example_costs_two_mebibytes() -> None:
    assert simulate.block_bytes(32, 8, 128, 2, 16) == 2_097_152


def test_the_command_prints_and_writes_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "simulation.json"
    assert main(["simulate", "paging", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    for figure in ("30 blocks", "64 blocks", "46.9%", "13 blocks", "208 blocks", "2,097,152 bytes"):
        assert figure in printed
    document = json.loads(report.read_text())
    assert document["blocks_by_sequence"] == [2, 8, 4, 16]
    assert document["peak_blocks"] == 16
    assert len(document["samples"]) == 262


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lengths", "16", "32", "--arrivals", "0"], "--lengths names 2 requests and --arrivals 1"),
        (["--prompt-len", "33"], "--prompt-len is 33"),
        (["--num-blocks", "15"], "KV blocks"),
        (["--num-blocks", "0"], "num_blocks is 0"),
        (["--arrivals", "-1", "0", "0", "0"], "times start at 0"),
    ],
)
def test_what_cannot_run_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "paging", *arguments]) == 2
    assert sentence in capsys.readouterr().err
