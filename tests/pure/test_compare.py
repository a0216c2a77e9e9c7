"""A comparison's order, its words to each server, and its figures; no server is started."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest import compare
from loadtest.compare import WORKLOADS, PeerAsking, Plan, Turn
from loadtest.comparison import FIGURES, OUTPUT, TTFT, Drive, Results, lead_over_best
from loadtest.errors import LoadtestError
from loadtest.peers.table import PEERS, Setup, installed_bytes
from loadtest.workload import Job

MODEL = "smollm2-135m"


@pytest.fixture
def options(tmp_path: Path) -> Any:
    def make(*argv: str) -> argparse.Namespace:
        (tmp_path / MODEL / "hf").mkdir(parents=True, exist_ok=True)
        for name in ("bf16.gguf", "q4_k.gguf"):
            (tmp_path / MODEL / name).touch()
        parser = argparse.ArgumentParser()
        compare.add_options(parser)
        return parser.parse_args(["--models-dir", str(tmp_path), *argv])

    return make


def point(load: str, concurrency: int, tokens_per_s: float, ttft_s: float | None = 0.5) -> dict[str, Any]:
    spread = {"p50": ttft_s, "p99": ttft_s}
    return {
        "workload": load,
        "concurrency": concurrency,
        "output_tokens": 640,
        "output_tokens_per_s": tokens_per_s,
        "total_tokens_per_s": 3 * tokens_per_s,
        "ttft_s": spread,
        "itl_s": {"p50": 0.01, "p99": 0.02},
    }


def results(*drives: Drive) -> Results:
    load = WORKLOADS[0]._asdict()
    settings = {
        "models": [MODEL],
        "precision": "bf16",
        "num_threads": 2,
        "kv_gib": 4,
        "rounds": 2,
        "workloads": [load],
        "concurrency": [1, 8],
    }
    host = {"cpu": "A CPU", "cores": 2, "date": "2026-01-02T03:04:05", "commit": "abc", "load_average": 0.1}
    known = {"here": True, "version": "1.2", "installed_bytes": 3_000_000}
    peers = {name: dict(known) for name in ("quire", "vllm")} | {"openvino": {"here": False}}
    return Results(host, settings, peers, list(drives))


def test_servers_take_turns_round_by_round(options: Any) -> None:
    plan = Plan.of(options("--vllm", "/bin/sh", "--llama-server", "/bin/sh", "--rounds", "2"))
    order = [(turn.round, turn.peer.name) for turn in plan.turns()]
    assert order == [(index, name) for index in (0, 1) for name in ("quire", "vllm", "llama-server")]


def test_only_servers_that_read_a_format_take_part(options: Any) -> None:
    plan = Plan.of(options("--vllm", "/bin/sh", "--llama-server", "/bin/sh", "--precision", "q4_k", "--rounds", "1"))
    assert [turn.peer.name for turn in plan.turns()] == ["quire", "llama-server"]


def test_a_model_of_ones_own_is_compared_and_not_prepared(options: Any, tmp_path: Path) -> None:
    with pytest.raises(LoadtestError, match=r"has no mine/q4_k_m\.gguf; --prepare does not know this model"):
        Plan.of(options("--models", "mine", "--precision", "q4_k_m"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "q4_k_m.gguf").touch()
    plan = Plan.of(options("--models", "mine", "--precision", "q4_k_m", "--ik-llama", "/bin/sh", "--rounds", "1"))
    quire, other = plan.turns()
    assert (quire.peer.name, other.peer.name) == ("quire", "ik-llama")
    assert "--log-disable" in other.peer.command("/bin/sh", plan.setup(other)).argv  # it would write into this folder
    with pytest.raises(LoadtestError, match="--models is 'mine', and --prepare writes smollm2-135m"):
        compare.run(options("--models", "mine", "--prepare"))


def test_every_server_gets_the_same_prompts_and_no_round_repeats_one(options: Any) -> None:
    plan = Plan.of(options("--vllm", "/bin/sh", "--concurrency", "1", "2"))
    turns = list(plan.turns())

    def texts(turn: Turn, index: int = 0) -> list[str]:
        levels = [load.level(level, plan.seed(turn, load, level, index)) for load, level in plan.points(turn)]
        return [job.text for level in levels for job in level.jobs]

    quire, vllm, quire_again, _ = map(texts, turns)
    assert quire == vllm
    assert len(set(quire)) == len(quire)
    assert not set(quire) & set(quire_again)
    assert not set(quire) & set(texts(turns[0], 1))


def test_a_point_that_took_too_long_is_not_tried_again_nor_a_larger_one(options: Any) -> None:
    plan = Plan.of(options("--workloads", "distinct", "long-prompt", "--concurrency", "1", "2", "8"))
    turn = next(plan.turns())
    plan.skipped[turn.model, turn.peer.name, "distinct"] = 2
    assert [(load.name, level) for load, level in plan.points(turn)] == [
        ("distinct", 1),
        ("long-prompt", 1),
        ("long-prompt", 2),
        ("long-prompt", 8),
    ]


@pytest.mark.parametrize(
    ("shares", "num_tries", "is_kept"),
    [([0.1], 1, True), ([0.2, 0.05], 2, True), ([0.2, 0.3, 0.11], 3, False), ([0.2, 0.3, 0.0], 3, True)],
)
def test_a_point_that_other_work_disturbs_is_measured_again_or_left_out(
    shares: list[float], num_tries: int, is_kept: bool, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan.of(options("--workloads", "distinct", "--concurrency", "1", "2"))
    turn, asked, left = next(plan.turns()), list[list[str]](), iter(shares)
    drive = Drive(turn.peer.name, turn.model, turn.round)
    load = plan.workloads[0]

    @contextmanager
    def watch_others() -> Iterator[list[float]]:
        found: list[float] = []
        yield found
        found.append(next(left))

    async def sweep(port: int, asking: Any, warm_up: Any, level: Any, limit_s: float) -> Any:
        asked.append([job.text for job in level.jobs])
        return SimpleNamespace(points=[_Point(len(asked))], is_interrupted=False)

    monkeypatch.setattr(compare, "_sweep", sweep)
    server: Any = SimpleNamespace(watch_others=watch_others, port=1, is_alive=lambda: True)
    compare._measure(plan, turn, drive, server, PeerAsking(turn.model), load, 2)
    assert len(asked) == num_tries
    assert len({text for texts in asked for text in texts}) == sum(map(len, asked)), "other prompts each time"
    assert [each["number"] for each in drive.points] == [num_tries] * is_kept
    assert [each["others_cores"] for each in drive.points] == shares[-1:] * is_kept
    assert ["disturbed it 3 times" in each for each in drive.failures] == [True] * (not is_kept)


@dataclass
class _Point:
    number: int
    errors: dict[str, int] = field(default_factory=dict)


def test_a_point_sends_enough_requests_to_fill_its_concurrency() -> None:
    for load in WORKLOADS:
        for concurrency in (1, 8, 128):
            level = load.level(concurrency, seed=1)
            assert len(level.jobs) >= max(concurrency, load.at_least)
            assert all(len(job.text.split()) == load.prefix + load.prompt for job in level.jobs)


def test_the_context_holds_the_longest_request(options: Any) -> None:
    plan = Plan.of(options("--workloads", "distinct", "shared-prefix", "--concurrency", "4"))
    setup = plan.setup(next(plan.turns()))
    assert setup.max_model_len >= 512 + 64 + 64
    assert setup.max_num_seqs == 4


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_command_names_model_port_and_executable(peer: Any, tmp_path: Path) -> None:
    setup = Setup(tmp_path / MODEL, 12345, "bf16", 2, 32, 1024, 4)
    command = peer.command("/somewhere/bin/python", setup)
    assert command.argv[0] == "/somewhere/bin/python"
    assert "12345" in command.argv
    assert any(str(tmp_path / MODEL) in word for word in command.argv)
    assert str(command).endswith(command.argv[-1])


def test_answers_of_every_server_have_their_full_length() -> None:
    body = PeerAsking("m").body(Job("text", 7))
    assert "min_tokens" not in body
    assert (body["ignore_eos"], body["max_tokens"]) == (True, 7)


def test_more_flags_reach_the_server_they_name(options: Any) -> None:
    plan = Plan.of(options("--flags", "quire=--block-size 32", "--flags", "quire=-x"))
    assert plan.more_flags("quire") == ["--block-size", "32", "-x"]
    assert plan.more_flags("vllm") == []


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--vllm", "/no/such/python"], "--vllm is '/no/such/python'"),
        (["--models", "qwen2.5-0.5b"], "has no qwen2.5-0.5b/hf; write it with --prepare"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(options: Any, argv: list[str], sentence: str) -> None:
    with pytest.raises(LoadtestError, match=sentence):
        Plan.of(options(*argv))


@pytest.mark.parametrize("text", ["tgi=-x", "quire", "=-x"])
def test_flags_of_nobody_are_refused(options: Any, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--flags", text)
    assert f"'{text}' is not NAME=FLAGS" in capsys.readouterr().err


def test_figures_are_medians_over_rounds_and_failed_points_are_none() -> None:
    drives = [Drive("quire", MODEL, index, points=[point("distinct", 1, rate)]) for index, rate in enumerate((90, 100))]
    failed = point("distinct", 8, 0.0, None) | {"output_tokens": 0}
    drives += [Drive("vllm", MODEL, 0, points=[point("distinct", 1, 50.0), failed])]
    (row,) = results(*drives).rows(MODEL)
    assert row[:2] == ("distinct", 1)
    assert row[2]["quire"][OUTPUT] == 95
    assert row[2]["vllm"][TTFT] == 500


def test_the_best_peer_is_chosen_for_each_figure() -> None:
    row = {
        "quire": {OUTPUT: 100.0, TTFT: 20.0},
        "fast": {OUTPUT: 80.0, TTFT: 50.0},
        "prompt": {OUTPUT: 10.0, TTFT: 10.0},
        "mute": {OUTPUT: math.nan, TTFT: math.nan},
    }
    assert lead_over_best(row, OUTPUT) == ("fast", 1.25)
    assert lead_over_best(row, TTFT) == ("prompt", 0.5)
    assert math.isnan(lead_over_best({"quire": row["quire"]}, OUTPUT)[1])


def test_the_tables_tell_ratios_absences_and_failures(tmp_path: Path) -> None:
    quire = Drive("quire", MODEL, 0, "quire serve", 3.0, 10**9, [point("distinct", 1, 100.0, 0.1)])
    vllm = Drive("vllm", MODEL, 0, "vllm serve", math.nan, 0, [point("distinct", 1, 50.0)], ["it died.\nits log"])
    found = results(quire, vllm)
    text = found.markdown()
    assert "| distinct | 1 | 2.00 vllm | 2.00 vllm | 5.00 vllm |" in re.sub(" +", " ", text)
    assert "Not here: openvino." in text
    assert "vllm, round 1: it died." in text
    found.write(tmp_path)
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["drives"][1]["ready_s"] is None
    assert document["drives"][0]["points"][0]["output_tokens_per_s"] == 100
    assert (tmp_path / "table.md").read_text() == text + "\n"


def test_results_name_no_folder_of_this_machine(options: Any, tmp_path: Path) -> None:
    python = tmp_path / "environments" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/sh")
    plan = Plan.of(options("--vllm", str(python)))
    command = str(PEERS[1].command(plan.executables["vllm"], plan.setup(next(plan.turns()))))
    assert str(tmp_path) in command
    told = plan.without_paths(command)
    assert str(tmp_path) not in told
    assert "VLLM/bin/python" in told
    assert f"MODELS/{MODEL}/hf" in told


def test_an_installation_counts_a_file_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "again").hardlink_to(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"x" * 10)
    assert installed_bytes(tmp_path) == 1010
    assert installed_bytes(tmp_path / "b") == 10


def test_columns_are_figures_of_a_point() -> None:
    assert [figure.of(point("distinct", 1, 7.0)) for figure in FIGURES] == [7, 21, 500, 500, 10, 20]
