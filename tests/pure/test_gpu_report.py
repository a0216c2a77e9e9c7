"""What `loadtest/gpu.sh` says of what it measured: limits, targets, the table and the files."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest.shapes import COMPARED, Shape
from tests.patience import PATIENCE_S
from tools.gpu import __main__ as runner
from tools.gpu import names, serving, suites
from tools.gpu.figures import Figure, Findings, Notebook, Target, covered, read_findings
from tools.gpu.limits import Limits, Rates
from tools.gpu.models import LLAMA_8B, ON_GPU, QWEN3_06B
from tools.gpu.parts import LIMIT_S, MACHINE, PARTS, STAGES, TARGETS
from tools.gpu.report import Results
from tools.gpu.task import Task
from tools.gpu.workload import draw_requests, nano_vllm

ROOT = Path(__file__).parents[2]
H200 = Rates(4.3e12, 790e12)
HOST = {"date": "2026-11-21T00:00:00+00:00", "commit": "abc"}


@pytest.mark.parametrize(
    ("shape", "batch", "milliseconds"),
    [
        (LLAMA_8B, 1, 3.52),
        (LLAMA_8B, 32, 4.49),
        (LLAMA_8B, 128, 7.49),
        (LLAMA_8B, 256, 12.86),
        (QWEN3_06B, 1, 0.305),
        (QWEN3_06B, 32, 1.15),
        (QWEN3_06B, 128, 3.77),
        (QWEN3_06B, 256, 7.38),
    ],
)
def test_a_decode_step_takes_what_was_worked_out_by_hand(shape: Shape, batch: int, milliseconds: float) -> None:
    assert Limits(shape, H200).decode_step_s(batch, batch * 1024) * 1e3 == pytest.approx(milliseconds, rel=0.005)


@pytest.mark.parametrize(
    ("shape", "length", "tokens_per_s"),
    [(LLAMA_8B, 1024, 55_500), (LLAMA_8B, 8192, 49_000), (QWEN3_06B, 1024, 791_000), (QWEN3_06B, 8192, 434_000)],
)
def test_a_prefill_takes_what_was_worked_out_by_hand(shape: Shape, length: int, tokens_per_s: float) -> None:
    assert length / Limits(shape, H200).prefill_s([length]) == pytest.approx(tokens_per_s, rel=0.005)


def test_shapes_have_the_size_in_their_name() -> None:
    sizes = {name: shape.decode_weights / 1e6 for name, shape in (COMPARED | ON_GPU).items()}
    assert sizes == {
        "smollm2-135m": pytest.approx(134.5, abs=0.5),
        "qwen2.5-0.5b": pytest.approx(494, abs=1),
        "qwen2.5-1.5b": pytest.approx(1543, abs=2),
        "qwen3-0.6b": pytest.approx(596, abs=1),
        "granite-3.1-1b-a400m": pytest.approx(429, abs=1),  # of the experts, the chosen ones
        "olmoe-1b-7b": pytest.approx(1179, abs=1),
        "tinyllama-1.1b": pytest.approx(1034, abs=1),
        "llama-3.2-1b": pytest.approx(1236, abs=1),
        "llama-3.2-3b": pytest.approx(3213, abs=1),
        "granite-3.2-2b": pytest.approx(2534, abs=1),
        "gpt-oss-20b-12": pytest.approx(2093, abs=1),
        "qwen2.5-3b": pytest.approx(3086, abs=1),
        "llama-3.1-8b": pytest.approx(7504, abs=2),  # the embedding, which is not tied, is not multiplied
    }


def test_the_workload_is_the_published_one() -> None:
    work = nano_vllm()
    assert (len(work.prompts), sum(work.prompt_lens), sum(work.output_lens)) == (256, 142_827, 133_966)
    assert all(100 <= length <= 1024 for length in [*work.prompt_lens, *work.output_lens])


def test_the_limit_of_a_workload_is_that_of_its_steps() -> None:
    limits = Limits(QWEN3_06B, H200)
    steps = [limits.decode_step_s(2, 10 + 20 + 2 * 1), limits.decode_step_s(1, 20 + 2), limits.decode_step_s(1, 20 + 3)]
    assert limits.generate_s([10, 20], [2, 4]) == pytest.approx(limits.prefill_s([10, 20]) + sum(steps))
    work = nano_vllm()
    # By hand 35,700 and 13,200 tokens a second, with half a second in a hundred for logits that is not counted here.
    assert sum(work.output_lens) / limits.generate_s(work.prompt_lens, work.output_lens) == pytest.approx(
        36_200, rel=0.002
    )
    large = Limits(LLAMA_8B, H200).generate_s(work.prompt_lens, work.output_lens)
    assert sum(work.output_lens) / large == pytest.approx(13_300, rel=0.002)


def test_the_same_requests_every_time() -> None:
    assert draw_requests(3, 1, 5, highest_id=9) == draw_requests(3, 1, 5, highest_id=9)


def test_shares_and_targets() -> None:
    fast = Figure("x", 90.0, "GB/s", limit=100.0)
    assert fast.share == pytest.approx(0.9)
    assert Target(0.85, of_limit=True).is_met(fast)
    assert not Target(0.95, of_limit=True).is_met(fast)
    slow = Figure("y", 4.0, "ms", limit=3.0, less_is_better=True)
    assert slow.share == pytest.approx(0.75)
    assert Target(4.3).is_met(slow)
    assert not Target(3.9).is_met(slow)
    unknown = Figure("z", 1.0, "GB/s", limit=math.nan)
    assert unknown.share is None
    assert not Target(0.1, of_limit=True).is_met(unknown)


def test_covered_counts_overlaps_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def test_findings_are_on_the_disk_as_they_are_made(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    assert read_findings(path) == Findings()
    notebook = Notebook(path)
    notebook.figure(Figure("x", 1.0, "ms", limit=math.nan))
    assert [figure.name for figure in read_findings(path).figures] == ["x"]
    notebook.fail("it broke")
    notebook.detail("raw", [1, 2])
    found = read_findings(path)
    assert found.has_failed
    assert found.notes == ["FAILED: it broke"]
    assert found.details == {"raw": [1, 2]}


def test_without_measured_rates_there_are_no_limits(tmp_path: Path) -> None:
    rates = Task("kernels", tmp_path, is_rehearsal=True).rates()
    assert all(math.isnan(rate) for rate in rates)


def results(gpu: str, *figures: Figure, is_rehearsal: bool = False) -> Results:
    machine = Findings(list(figures), details={"gpu": {"name": gpu}})
    return Results(HOST, is_rehearsal, {"machine": machine}, {"machine": "done", "http": "not begun"}, {"machine": 1.0})


def lines(found: Results) -> list[str]:
    """Return the lines of the table, without the spaces that align it."""
    return [re.sub(" +", " ", line) for line in found.table()]


def test_the_table_shows_targets_that_are_met_missed_and_not_measured() -> None:
    measured = (
        Figure(names.throughput("qwen3-0.6b"), 30_000, "tok/s", 36_000),
        Figure(names.throughput("llama-3.1-8b"), 9_000, "tok/s", 13_300),
    )
    table = lines(results("NVIDIA H200", *measured))
    assert "| qwen3-0.6b: nano-vllm workload | 30,000 tok/s | 36,000 | 83% | >= 25,000 tok/s | yes |" in table
    assert "| llama-3.1-8b: nano-vllm workload | 9,000 tok/s | 13,300 | 68% | >= 9,500 tok/s | **no** |" in table
    assert sum("not measured" in line for line in table) == len(TARGETS) - 2
    assert "- http: not begun, 0 s" in table
    other = lines(results("Another GPU", *measured))
    assert "| qwen3-0.6b: nano-vllm workload | 30,000 tok/s | 36,000 | 83% | | |" in other
    assert not any("not measured" in line for line in other)


def test_a_rehearsal_is_marked_everywhere(tmp_path: Path) -> None:
    rehearsed = results("no GPU", Figure("x", 1.0, "ms"), is_rehearsal=True)
    rehearsed.write(tmp_path)
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["rehearsal"] is True
    assert document["parts"]["machine"]["figures"][0]["rehearsal"] is True
    table = (tmp_path / "table.md").read_text()
    assert "REHEARSAL" in table
    assert "measured" not in table.replace("not measured", "")


def test_results_are_json_that_every_reader_takes(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    results("NVIDIA H200", Figure("x", math.nan, "ms", math.nan)).write(tmp_path)
    document = json.loads((tmp_path / "results.json").read_text(), parse_constant=refuse)
    assert document["parts"]["machine"]["figures"][0]["limit"] is None
    assert document["parts"]["http"]["figures"] == []


def test_the_parts_fit_into_a_run() -> None:
    """Each stage fits a command of ten minutes, all of them half an hour; what matters most comes first."""
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert {part.name for part in PARTS} >= set(ON_GPU)
    assert PARTS[0] is MACHINE  # other parts are compared with its rates
    for parts in STAGES.values():
        assert MACHINE.budget_s + sum(part.budget_s for part in parts) <= LIMIT_S < 600
        assert all(part.budget_s > runner._LEAST_S > runner._GRACE_S > suites._GRACE_S for part in parts)
    assert MACHINE.budget_s * len(STAGES) + sum(part.budget_s for part in PARTS) < 1800
    assert list(STAGES) == ["tests", "speed", "beside"]
    assert [part.name for part in STAGES["tests"]] == ["engine-tests", "kernel-tests"]
    options = runner._parse(["--out", "out", "beside", "tests"])
    assert runner._chosen(options) == [(MACHINE, *STAGES["tests"]), STAGES["beside"]]


RUN = """
import subprocess
import sys
import time
from pathlib import Path
from tools.gpu import __main__ as runner
from tools.gpu.parts import Part

PROGRAMS = {
    "hangs": "import subprocess, sys, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "daemon = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True);"
    "open('daemon.pid', 'w').write(str(daemon.pid)); daemon.wait()",
    "dies": "import os; os.abort()",
    "fails": "import sys; sys.exit(1)",
    "works": "pass",
}
FOUND = '{"figures": [], "notes": ["NAME has found this"], "details": {}, "has_failed": false}'


def command(part, scratch, options):
    (scratch / f"{part.name}.json").write_text(FOUND.replace("NAME", part.name))
    return [sys.executable, "-c", PROGRAMS[part.name]]


def wait(process, timeout=None):
    if "daemon.pid" in process.args[-1] and (timeout or 0.0) > runner._GRACE_S:  # its time is up once it hangs
        daemon = Path("daemon.pid")
        while not daemon.exists() or not daemon.stat().st_size:
            time.sleep(0.01)
        timeout = 0.0
    return popen_wait(process, timeout)


popen_wait, subprocess.Popen.wait = subprocess.Popen.wait, wait
runner._command, runner._GRACE_S, runner._LEAST_S = command, 0.5, 1.0
parts = tuple(Part(name, 60.0, "") for name in PROGRAMS)
runner.MACHINE, runner.STAGES = Part("works", 2.0, ""), {"all": parts}
sys.exit(runner.main(["--out", "out", "--rehearse", "--limit", "242"]))
"""


def test_parts_that_hang_die_or_fail_take_nothing_from_the_others(tmp_path: Path) -> None:
    """What each has found is kept; a daemon of one that hangs is ended with it, though it leads another session."""
    command = [sys.executable, "-c", RUN]
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert run.returncode == 1
    parts = json.loads((tmp_path / "out/results.json").read_text())["parts"]
    statuses = {"works": "done", "hangs": "out of time", "dies": "failed", "fails": "failed"}
    assert {name: part["status"] for name, part in parts.items()} == statuses
    assert all(part["notes"] == [f"{name} has found this"] for name, part in parts.items())
    assert not Path(f"/proc/{(tmp_path / 'daemon.pid').read_text()}").exists()


def test_without_vllm_its_part_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda _: None)
    task = Task("vllm", tmp_path, is_rehearsal=True)
    serving.run_vllm(task, "qwen3-0.6b")
    assert read_findings(tmp_path / "vllm.json") == Findings(notes=["Not measured: vLLM is not installed here."])


def test_tests_that_are_interrupted_have_told_what_they_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part's time is up in the middle of the third."""
    monkeypatch.setattr(suites, "_GRACE_S", PATIENCE_S)
    (tmp_path / "test_some.py").write_text(
        "import pathlib, time\n\ndef test_a(): pass\n\ndef test_b(): assert 1 == 2\n\n"
        "def test_c():\n    pathlib.Path(__file__).with_name('begun').touch()\n    time.sleep(100)\n"
    )
    task = Task("tests", tmp_path, is_rehearsal=True)
    process = suites._start(task, [str(tmp_path / "test_some.py")], 0, 1)
    while not (tmp_path / "begun").exists():
        assert process.handle.poll() is None
        time.sleep(0.02)
    suites._interrupt([process])
    suites._report(task, "some", [process])
    found = read_findings(tmp_path / "tests.json")
    assert {figure.name: figure.value for figure in found.figures} == {
        "some: passed": 1,
        "some: failed": 1,
        "some: skipped": 0,
    }
    assert found.has_failed
    assert any("assert 1 == 2" in note for note in found.notes)


def test_the_parts_leave_triton_alone_until_they_run() -> None:
    """Triton decides while it is imported whether it interprets; a rehearsal chooses that inside a part."""
    told = "import sys, tools.gpu.__main__; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], check=False).returncode == 0
