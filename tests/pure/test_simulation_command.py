"""`quire simulate` and the fits behind `quire calibrate`, as far as they need neither engine nor daemon."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.core.config import SchedulerConfig
from loadtest.__main__ import main
from loadtest.errors import LoadtestError
from loadtest.fake_runner import FakeRunner
from loadtest.simulation.calibrate import fit_front
from loadtest.simulation.costs import Front, StepCosts, Table
from loadtest.simulation.fit import fit, non_negative
from loadtest.simulation.measure import Shape, Times, fill_pool, grid, held_out
from loadtest.simulation.observe import Observed
from loadtest.simulation.replay import replay
from loadtest.simulation.trace import TraceRequest
from loadtest.simulation.variants import make_variants, plain_settings

SETTINGS = {
    "num_blocks": 3000,
    "block_size": 16,
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 256,
}
CONFIG = SchedulerConfig(**SETTINGS)  # type: ignore[arg-type]
COSTS = StepCosts(
    rows=Table((0, 1, 16, 64, 256), (0.001, 0.002, 0.004, 0.014, 0.05)),
    samples=Table((0, 1, 64), (0.0, 0.001, 0.006)),
    decode_context_s=7e-7,
    prefill_pair_s=1e-7,
    settings=dict(SETTINGS),
)


def seconds(shape: Shape, costs: StepCosts) -> float:
    """What costs say of the plan itself, not of its features."""
    return costs.step(shape.plan(CONFIG, 100))


def test_non_negative_least_squares_are_the_best_of_all_that_are() -> None:
    rng = np.random.default_rng(0)
    design, wanted = rng.random((12, 3)), rng.random(12) - 0.3
    found = non_negative(design, wanted)
    assert (found >= 0).all()
    error = np.linalg.norm(design @ found - wanted)
    for other in rng.random((2000, 3)):
        assert np.linalg.norm(design @ other - wanted) >= error - 1e-9


def test_a_fit_finds_what_made_the_steps() -> None:
    shapes, unseen = grid(CONFIG), held_out(CONFIG, 40)
    found = fit(shapes, [seconds(shape, COSTS) for shape in shapes])
    errors = [abs(seconds(shape, found) / seconds(shape, COSTS) - 1) for shape in unseen]
    assert max(errors) < 0.03
    assert found.decode_context_s == pytest.approx(7e-7, rel=0.05)
    assert found.prefill_pair_s == pytest.approx(1e-7, rel=0.05)


def test_measured_steps_fit_the_scheduler_and_the_runner() -> None:
    shapes = [*grid(CONFIG), *held_out(CONFIG, 5)]
    assert all(shape.num_tokens <= 256 for shape in shapes)
    runner, counted = FakeRunner(CONFIG), []
    fill_pool(runner, CONFIG, shapes[:4], 100)
    times = Times(runner, CONFIG, shapes[:4], vocab_size=100)
    times.measure(3, on_step=lambda: counted.append(1))
    assert len(times.seconds) == 4
    assert min(times.seconds) > 0
    assert len(counted) == 12


def seen(rows: list[TraceRequest], costs: StepCosts) -> list[Observed]:
    """What clients would see if the costs were the truth."""
    return [
        Observed(each.row, each.ttft_s, each.tpot_s if each.num_tokens > 1 else math.nan)
        for each in replay(rows, CONFIG, costs).served
    ]


def test_a_front_is_found_from_what_clients_see() -> None:
    truth = replace(COSTS, front=Front(intake_s=0.002, step_s=0.0005, token_s=5e-5, prompt_token_s=2e-5))
    waves = [seen([TraceRequest(0.0, 64, 32)] * num, truth) for num in (1, 4, 16, 48)]
    waves += [seen([TraceRequest(0.0, prompt, 4)], truth) for prompt in (16, 100, 200)] * 2
    waves[-1] = [each._replace(ttft_s=3 * each.ttft_s, tpot_s=5 * each.tpot_s) for each in waves[-1]]  # was disturbed
    found = fit_front(COSTS, waves).front
    assert found.step_s == pytest.approx(0.0005, rel=0.1)
    assert found.token_s == pytest.approx(5e-5, rel=0.1)
    assert found.intake_s == pytest.approx(0.002, rel=0.1)
    assert found.prompt_token_s == pytest.approx(2e-5, rel=0.1)


def test_variants_are_every_combination() -> None:
    found = make_variants(SETTINGS, ["fcfs", "priority"], ["max-num-seqs=8,16", "enable_prefix_caching=off"])
    assert [variant.name for variant in found] == [
        "fcfs, max_num_seqs 8",
        "fcfs, max_num_seqs 16",
        "priority, max_num_seqs 8",
        "priority, max_num_seqs 16",
    ]
    assert [variant.config.max_num_seqs for variant in found] == [8, 16, 8, 16]
    assert not any(variant.config.enable_prefix_caching for variant in found)
    (alone,) = make_variants({**SETTINGS, "not_a_field_any_more": 1}, None, [])
    assert alone.config == CONFIG


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("max_num_seqs", "write it as FIELD=VALUE"),
        ("num_seqs=3", "--set is 'num_seqs=3'"),
        ("max_num_seqs=many", "--set max_num_seqs is 'many'; it must be int"),
        ("enable_prefix_caching=perhaps", "it must be bool"),
    ],
)
def test_a_wrong_setting_is_told(assignment: str, sentence: str) -> None:
    with pytest.raises(LoadtestError) as caught:
        make_variants(SETTINGS, None, [assignment])
    assert sentence in str(caught.value)


def test_replay_compares_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, trace = tmp_path / "figures.json", tmp_path / "trace.csv"
    COSTS.save(tmp_path / "costs.json")
    costs = ["--costs", str(tmp_path / "costs.json")]
    options = ["--num", "60", "--policy", "fcfs", "priority", "--json", str(report), "--save-trace", str(trace)]
    assert main(["simulate", "replay", "greedy-tenant", *options, *costs]) == 0
    printed = capsys.readouterr().out
    for word in ("fcfs", "priority", "greedy", "tenant-1", "TTFT p50", "sequence-steps"):
        assert word in printed
    document = json.loads(report.read_text())
    assert [replayed["variant"] for replayed in document["replays"]] == ["fcfs", "priority"]
    assert [replayed["num_served"] for replayed in document["replays"]] == [60, 60]
    again = tmp_path / "again.json"
    assert main(["simulate", "replay", str(trace), "--policy", "fcfs", "--json", str(again), *costs]) == 0
    first, second = document["replays"][0], json.loads(again.read_text())["replays"][0]
    assert first["ttft_s"] == second["ttft_s"]
    assert first["tenants"] == second["tenants"]


def test_replay_shows_the_groups_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "replay", "steady", "--num", "10", "--costs", str(tmp_path / "costs.json")]
    replace(COSTS, settings=plain_settings(replace(CONFIG, windows=(64,)))).save(tmp_path / "costs.json")
    assert main(arguments) == 0
    assert "fcfs: blocks of 2 groups of layers: full attention, windows of 64 tokens." in capsys.readouterr().out
    assert main([*arguments, "--set", "windows=none,64+512"]) == 0
    assert capsys.readouterr().out.endswith(
        "windows 64+512: blocks of 3 groups of layers: full attention, windows of 64 tokens, windows of 512 tokens.\n"
    )


def test_replay_applies_the_limits_of_queues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "figures.json"
    limits = ["--max-num-queued-reqs", "5", "--json", str(report)]
    settings = [
        "--set",
        "max_model_len=512",
        "num_blocks=160",
        "max_num_seqs=16",
    ]
    assert main(["simulate", "replay", "steady", "--num", "80", "--rate", "30", *limits, *settings]) == 0
    assert "429" in capsys.readouterr().out
    (figures,) = json.loads(report.read_text())["replays"]
    assert figures["num_rejected"] == 80 - figures["num_served"] > 0


def test_fleet_finds_rates_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "fleet.json"
    options = [
        "--num",
        "40",
        "--replicas",
        "1",
        "2",
        "--router",
        "least-loaded",
        "--share",
        "0.9",
        "--json",
        str(report),
    ]
    assert main(["simulate", "fleet", "steady", *options]) == 0
    assert "least-loaded" in capsys.readouterr().out
    one, two = (fleet["requests_per_s"] for fleet in json.loads(report.read_text())["fleets"])
    assert two > 1.4 * one


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["replay", "/no/trace.csv"], "the trace /no/trace.csv cannot be read"),
        (["replay", "/dev/zero"], "the trace /dev/zero cannot be read: it is a device, not a regular file"),
        (["replay", "steady", "--costs", "/dev/zero"], "the costs /dev/zero cannot be read: it is a device"),
        (["replay", "steady", "--costs", "/no/costs.json"], "the costs /no/costs.json cannot be read"),
        (["replay", "steady", "--set", "block_size=0"], "block_size is 0"),
        (["replay", "steady", "bursty-chat", "--save-trace", "x.csv"], "--save-trace writes one workload"),
        (["replay", "steady", "--set", "num_speculative_tokens=3"], "--set is 'num_speculative_tokens=3'"),
        (["replay", "steady", "--set", "max_num_seqs=-1"], "max_num_seqs is -1; it must be at least 1."),
        (["replay", "steady", "--set", "pinned_share=2"], "pinned_share is 2.0; it must be at least 0 and less than 1"),
        (["replay", "steady", "--set", "target_itl_s=0"], "target_itl_s is 0.0; it must be a number of seconds above"),
        (["replay", "steady", "--set", "target_itl_s=fast"], "--set target_itl_s is 'fast'; it must be float | None."),
        (["replay", "steady", "--set", "num_blocks=none"], "--set num_blocks is 'none'; it must be int."),
        (["fleet", "steady", "bursty-chat"], "a fleet is sized for one trace"),
        (["fleet", "steady", "--set", "max_num_seqs=4,8"], "a fleet is sized for one setting"),
        (["fleet", "steady", "--num", "1"], "all arrive at the same time"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    replays = tmp_path / "replays.png"
    workloads = ["greedy-tenant", "steady"]
    assert main(["simulate", "replay", *workloads, "--num", "20", "--plot", str(replays)]) == 0
    assert replays.stat().st_size > 10_000
