"""`quire doctor`: its findings and exit status, on this machine and on broken ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.runtime.native.build import Isa
from engine.startup import doctor
from engine.startup.doctor import Finding
from server.doctor import main

ROOT = Path(__file__).parents[2]


def test_this_machine_can_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = "\n" + capsys.readouterr().out
    for check in ("version", "torch", "host", "CPU kernels"):
        assert f"\n{check} " in printed
    assert printed.endswith("This machine can serve.\n")


def test_a_file_of_settings_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text("port: 0\nmax-num-seqs: 8\n", encoding="utf-8")
    assert main(["--config", str(path)]) == 0
    assert "max_num_seqs" in capsys.readouterr().out
    path.write_text(f"tenants: {tmp_path / 'absent.yaml'}\n", encoding="utf-8")
    assert main(["--config", str(path)]) == 1
    assert "absent.yaml" in capsys.readouterr().out


def test_a_machine_without_torch_is_told_to_install_it() -> None:
    program = "import sys; sys.modules['torch'] = None; from server.cli import main; sys.exit(main(['doctor']))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr == ""
    assert "pip install 'torch" in run.stdout


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
    assert rows["GPU 0"].found == "A GPU, 32.0 GiB, compute capability 9.0"
    assert rows["GPU compiler"] == Finding("GPU compiler", "gcc")
    assert rows["GPU driver"].is_fatal
    assert rows["GPU driver"].found.endswith("libcuda.so.1, which is not in /nowhere")
    assert rows["GPU driver"].advice.startswith(
        "run ldconfig as root, or set the environment variable TRITON_LIBCUDA_PATH"
    )
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
    rows = {row.check: row for row in doctor._torch()}
    assert "no Triton" in rows["GPU kernels"].found
    assert "GPU driver" not in rows


def test_without_a_library_or_a_compiler_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "best_library", lambda: None)
    monkeypatch.setattr(doctor, "find_compiler", lambda: None)
    assert "install a C compiler" in doctor._kernels().advice
    monkeypatch.setattr(doctor, "find_compiler", lambda: "/usr/bin/cc")
    monkeypatch.setattr(doctor, "machine_isas", tuple)  # such as of a home folder that is read-only
    assert "may be written to, or set XDG_CACHE_HOME" in doctor._kernels().advice
    monkeypatch.setattr(doctor, "machine_isas", lambda: (Isa.PORTABLE,))
    assert doctor._kernels() == Finding("CPU kernels", "compiled by /usr/bin/cc at the first start, about 7 s")


def test_variables_are_checked_without_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQ", "3")
    assert main([]) == 1
    assert "QUIRE_MAX_NUM_SEQS" in capsys.readouterr().out
