"""`quire doctor`: its table and exit status, on this machine and on broken ones."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.startup import doctor
from engine.startup.doctor import Finding, State
from server.doctor import main

ROOT = Path(__file__).parents[2]


def findings(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["--json", *argv])
    return status, {row["check"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_this_machine_can_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "0"]) == 0
    printed = capsys.readouterr().out
    for check in ("version", "torch", "GPU", "processor", "memory", "CPU kernels", "default model", "cache of models"):
        assert f"\n{check} " in printed
    assert printed.endswith("This machine can serve.\n")


def test_a_port_in_use_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, rows = findings("--port", port, capsys=capsys)
    assert (status, rows["port"]["state"]) == (0, "note")
    assert rows["port"]["found"] == f"Port {port} on 127.0.0.1 is in use"
    assert rows["port"]["advice"] == "stop what listens there, or choose another with --port."


def test_a_number_that_is_no_port_fails(capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = findings("--port", "99999", capsys=capsys)
    assert (status, rows["port"]["state"]) == (1, "failed")


def test_a_file_of_settings_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text("port: 0\nmax-num-seqs: 8\n", encoding="utf-8")
    status, rows = findings("--config", str(path), capsys=capsys)
    assert (status, rows["settings"]["state"]) == (0, "ok")
    assert "max_num_seqs" in rows["settings"]["found"]
    assert rows["port"]["found"].startswith("0 on ")
    path.write_text(f"tenants: {tmp_path / 'absent.yaml'}\n", encoding="utf-8")
    status, rows = findings("--config", str(path), capsys=capsys)
    assert (status, rows["settings"]["state"]) == (1, "failed")
    assert "absent.yaml" in rows["settings"]["advice"]


def test_variables_are_checked_without_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQ", "3")
    status, rows = findings(capsys=capsys)
    assert (status, rows["settings"]["state"]) == (1, "failed")
    assert "QUIRE_MAX_NUM_SEQS" in rows["settings"]["advice"]


def test_a_machine_without_torch_is_told_to_install_it() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from server.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr == ""
    [row] = [row for row in json.loads(run.stdout) if row["check"] == "torch"]
    assert row["state"] == "failed"
    assert "pip install" in row["advice"]


def test_the_tools_of_gpu_kernels_are_checked_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start refuses without them, so they are failures: here the driver's library, which this machine has not."""
    about = SimpleNamespace(name="A GPU", total_memory=1 << 35, major=9, minor=0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: about)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/nowhere")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setitem(doctor.TOOLS, "GPU compiler", lambda: "gcc")
    monkeypatch.setitem(doctor.TOOLS, "GPU assembler", lambda: "ptxas 12.8")
    rows = {row.check: row for row in doctor._torch()}
    assert rows["GPU 0"].state is State.OK
    assert rows["GPU compiler"] == Finding("GPU compiler", State.OK, "gcc")
    assert rows["GPU driver"].state is State.FAILED
    assert rows["GPU driver"].found.endswith("libcuda.so.1, which is not in /nowhere")
    assert rows["GPU driver"].advice.startswith(
        "run ldconfig as root, or set the environment variable TRITON_LIBCUDA_PATH"
    )
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
    rows = {row.check: row for row in doctor._torch()}
    assert rows["GPU kernels"].state is State.NOTE
    assert "GPU driver" not in rows


def test_without_a_library_or_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_library", lambda: None)
    monkeypatch.setattr(doctor, "find_compiler", lambda: None)
    [row] = doctor._kernels()
    assert row.state is State.NOTE
    assert "install a C compiler" in row.advice
    monkeypatch.setattr(doctor, "find_compiler", lambda: "/usr/bin/cc")
    [row] = doctor._kernels()
    assert (row.state, row.found) == (State.OK, "compiled by /usr/bin/cc at the first start, about 20 s")


def test_a_missing_default_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sources.model_source.importlib.util.find_spec", lambda _: None)
    [row] = doctor._model()
    assert row.state is State.NOTE
    assert "pip install" in row.advice


def test_little_memory_and_a_full_disk_are_notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 1 << 30)
    assert [row.state for row in doctor._memory()] == [State.NOTE]
    row = doctor._folder("cache", tmp_path / "not" / "there", 1 << 60)
    assert row.state is State.NOTE
    assert "--download-dir" in row.advice


def test_no_check_raises_for_an_empty_machine(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(empty_home / "hub"))
    rows: Iterator[Finding] = doctor._caches()
    assert ", 0 models of 0 B, " in [row.found for row in rows][1]
