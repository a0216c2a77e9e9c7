"""What Triton needs of a machine beside its GPU: a compiler, headers, a folder. The machine here is made up of folders."""

from __future__ import annotations

import re
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from engine.core.errors import ConfigError
from engine.runtime.cuda import toolchain
from engine.runtime.cuda.toolchain import cache_folder, check_toolchain
from engine.settings.engine_config import EngineConfig
from engine.startup import build

ROOT = Path(__file__).parents[2]


class Machine:
    """Commands that are on its path, and a cache folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin, self.cache, self._patch = folder / "bin", folder / "cache", monkeypatch
        self.bin.mkdir()
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(self.cache))
        monkeypatch.delenv("CC", raising=False)
        self.use_headers(folder)
        (folder / "Python.h").touch()
        self.assembler, self.driver = (
            self.install("ptxas", "echo 'Cuda compilation tools, release 12.8, V12.8.93'"),
            folder,
        )
        (folder / "libcuda.so.1").touch()
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(self.assembler))
        monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(self.driver))

    def install(self, name: str, script: str = "exit 0") -> Path:
        command = self.bin / name
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        return command

    def use_headers(self, folder: Path) -> None:
        paths = {"include": str(folder)}
        self._patch.setattr(toolchain.sysconfig, "get_paths", lambda scheme: paths)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_compiler_on_the_path_will_do(machine: Machine, name: str) -> None:
    machine.install(name)
    check_toolchain()
    assert machine.cache.is_dir()
    assert not list(machine.cache.iterdir())


def test_the_compiler_that_is_named_goes_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.install("gcc", "exit 1")
    monkeypatch.setenv("CC", str(machine.install("mine")))
    check_toolchain()
    monkeypatch.setenv("CC", "absent-cc")
    with pytest.raises(ConfigError, match=r"CC is 'absent-cc', which is no command here; set it to a C compiler"):
        check_toolchain()


def test_no_compiler_is_one_sentence(machine: Machine) -> None:
    with pytest.raises(
        ConfigError, match=r"no C compiler: neither gcc nor clang.*install one \(Debian: gcc libc6-dev\)"
    ):
        check_toolchain()


def test_no_headers_are_one_sentence(machine: Machine, tmp_path: Path) -> None:
    machine.install("gcc")
    machine.use_headers(tmp_path / "nowhere")
    with pytest.raises(
        ConfigError, match=r"Python's headers are not in .*nowhere; install them \(Debian: python3-dev\)"
    ):
        check_toolchain()


def test_a_compiler_that_fails_is_quoted(machine: Machine) -> None:
    """As gcc does where the C library's headers are not installed."""
    machine.install("gcc", "echo 'Python.h:23:12: fatal error: stdlib.h: No such file or directory' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"gcc does not compile a library for Python \(.*stdlib.h: No such file"):
        check_toolchain()


def test_a_cache_that_cannot_be_written_is_one_sentence(machine: Machine) -> None:
    machine.install("gcc")
    machine.cache.write_text("a file")
    with pytest.raises(ConfigError, match=r"are kept in .*cache, which cannot be written to \(.*TRITON_CACHE_DIR"):
        check_toolchain()


def test_the_cache_is_where_triton_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".triton" / "cache"
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "other" / ".triton" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


@pytest.mark.skipif(
    not shutil.which("gcc") or not Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
    reason="this machine has no gcc, or no headers of Python's",
)
def test_a_real_compiler_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert toolchain.find_compiler()


@pytest.mark.skipif(find_spec("triton") is None, reason="this machine has no Triton")
def test_tritons_own_assembler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert re.match(r"ptxas \d+\.\d+, ", toolchain.find_assembler())


def test_an_assembler_that_does_not_run_is_one_sentence(machine: Machine) -> None:
    """As in a folder that is mounted without the right to execute."""
    machine.install("gcc")
    machine.assembler.chmod(0o644)
    with pytest.raises(ConfigError, match=r"are assembled by .*ptxas, which does not run \(.*TRITON_PTXAS_PATH"):
        check_toolchain()


def test_a_driver_is_found_where_triton_looks(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.install("gcc")
    assert toolchain.find_driver() == f"libcuda.so.1 in {tmp_path}"
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigError, match=r"libcuda.so.1, which is not in .*bin; run ldconfig as root, or set"):
        check_toolchain()
    monkeypatch.delenv("TRITON_LIBCUDA_PATH")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    monkeypatch.setattr(toolchain, "_linked_folders", list)
    assert toolchain.find_driver() == f"libcuda.so.1 in {tmp_path}"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with pytest.raises(ConfigError, match=r"not in what `/sbin/ldconfig -p` lists, and not in LD_LIBRARY_PATH"):
        check_toolchain()


def test_a_system_without_ldconfig_is_one_sentence(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_LIBCUDA_PATH")

    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError("No such file: /sbin/ldconfig")

    monkeypatch.setattr(toolchain.subprocess, "run", fail)
    with pytest.raises(ConfigError, match=r"by `/sbin/ldconfig -p`, which does not run \(.*TRITON_LIBCUDA_PATH"):
        toolchain.find_driver()


def test_it_is_checked_before_a_model_is_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine with a GPU and no compiler: nothing of the model is there, and nothing of it is complained about."""
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(build, "fetch_models", lambda config, report: config)
    monkeypatch.setattr(build, "resolve_device", lambda name: cuda)
    monkeypatch.setattr(build, "resolve_dtype", lambda config, device: torch.bfloat16)
    monkeypatch.setattr(build, "load_backend", lambda name, device: None)
    monkeypatch.setattr(build, "check_device", lambda device, dtype: None)
    monkeypatch.setattr(build, "has_triton", lambda device: True)
    monkeypatch.setattr(build, "describe_choice", lambda name, device: "")
    monkeypatch.setattr(build, "choose_kernels", lambda setting: None)
    with pytest.raises(ConfigError, match="no C compiler"):
        build.build_engine(EngineConfig(model=str(tmp_path / "absent")), lambda progress: None)


def test_the_image_for_cuda_has_what_is_asked_for() -> None:
    final = (ROOT / "Dockerfile").read_text().partition(" AS daemon\n")[2].partition("\nFROM ")[0]
    assert re.search(r'if \[ "\$DEVICE" = cuda \].*\n.*apt-get install .*\bgcc libc6-dev\b', final)
