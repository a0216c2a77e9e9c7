"""What shortest-job-first is worth by what it knows: the study's arithmetic, and that what it says of the scheduler holds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.simulation.sjf import misordered
from loadtest.simulation.trace import TraceRequest


def test_neighbours_are_compared_pair_by_pair() -> None:
    rows = [TraceRequest(0.0, 1, output) for output in (10, 20, 20, 5)]
    # 10-20 is right twice, 10-5 wrong; 20-20 counts for nothing; 20-5 alike, and wrong.
    assert sorted(misordered(rows, {0: 1.0, 1: 2.0, 2: 3.0, 3: 2.0})) == [0.0, 0.0, 0.0, 0.5, 1.0]
    assert list(misordered(rows, {0: 1.0})) == []


def test_what_is_learned_gains_most_of_what_can_be_gained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "sjf.json", tmp_path / "sjf.png"
    options = ["--num", "200", "--rounds", "1", "--rate", "8", "--set", "max_num_seqs=8"]
    out = ["--json", str(report), "--plot", str(picture)]
    assert main(["simulate", "sjf", "templates", "steady", *options, *out]) == 0
    assert "learned" in capsys.readouterr().out
    found = {(each["workload"], each["variant"]): each for each in json.loads(report.read_text())["sjf"]}
    for workload in ("templates", "steady"):
        before, oracle = found[workload, "fcfs"], found[workload, "sjf, oracle"]
        assert before["gained"] == 0
        assert oracle["gained"] == 1
        assert oracle["misordered_ratio"] == oracle["error_tokens"] == 0
        assert before["error_tokens"] is None or math.isnan(before["error_tokens"])
        assert oracle["e2e_s"]["mean"] < 0.9 * before["e2e_s"]["mean"]
        assert found[workload, "sjf, learned"]["gained"] > 0.5
    assert found["templates", "sjf, max_tokens"]["misordered_ratio"] == 0.5, "all clients allow the same"
    assert found["templates", "sjf, learned"]["misordered_ratio"] < 0.3
    assert picture.stat().st_size > 10_000


def test_a_trace_with_nothing_to_gain_has_figures_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    for line in ("0,10,5", "0,9000,5"):  # one request alone, and one that is refused
        trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{line}\n")
        assert main(["simulate", "sjf", str(trace)]) == 0
        assert "sjf" in capsys.readouterr().out


def test_one_setting_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "sjf", "steady", "--set", "max_num_seqs=8,16"]) == 2
    assert "sjf is compared under one setting" in capsys.readouterr().err
