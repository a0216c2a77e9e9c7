"""Builds the package: puts the compiled CPU kernels and the commit into it. All other facts are in pyproject.toml.

The kernels are shared libraries for Linux, one for each instruction set, of which a start chooses, and that any Python 3 loads
by ctypes. CC names another compiler, whose machine the wheel is for. Without a C compiler the wheel has no kernels, and runs
everywhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
KERNELS = "engine/runtime/native"
sys.path.insert(0, str(ROOT))

from engine.runtime.native.build import all_names, compile_libraries, find_compiler  # noqa: E402 - needs the path
from engine.system.version import COMMIT_FILE, commit  # noqa: E402

compiler = shutil.which(os.environ["CC"]) if os.environ.get("CC") else find_compiler()


def machine() -> str:
    """Return the kind of machine that the compiler is for."""
    asked = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=True)  # noqa: S603 - our own
    return asked.stdout.split("-")[0]


def write_commit(folder: Path) -> None:
    """Note the commit in a copy of the sources: BUILD_COMMIT, or that of the checkout."""
    known = os.environ.get("BUILD_COMMIT") or commit()
    if known:
        folder.joinpath("engine", COMMIT_FILE).write_text(known + "\n", encoding="ascii")


class BuildPackage(build_py):
    """Copies the sources, then adds the kernels and the commit; an editable installation needs neither."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for stale in Path(self.build_lib, KERNELS).glob("*.so"):
            stale.unlink()  # an earlier build's, of other sources
        if compiler is not None:
            self._add_kernels(compiler)
        write_commit(Path(self.build_lib))

    def _add_kernels(self, compiler: str) -> None:
        try:
            for library in compile_libraries(compiler, all_names(machine()), machine=machine()):
                shutil.copy(library, Path(self.build_lib, KERNELS))
        except RuntimeError as error:  # such as an old compiler's, which the first start asks for less
            self.warn(f"the wheel has no kernels: {error}")


class SourceDistribution(sdist):
    """An archive of the sources that knows its commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


class Wheel(bdist_wheel):
    """A wheel for every Python 3, and for this platform if it has kernels."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = compiler is None

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of the oldest C library that has what the kernels need."""
        platform = super().get_tag()[2]
        libraries = Path(self.get_finalized_command("build").build_lib, KERNELS).glob("*.so")
        versions = [int(number) for path in libraries for number in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
        return "py3", "none", f"manylinux_2_{max(versions)}_{machine()}" if versions else platform


class Package(Distribution):
    """Has a library in it if there is a compiler, so that the wheel is installed where platform libraries are."""

    def has_ext_modules(self) -> bool:
        return compiler is not None


setup(cmdclass={"build_py": BuildPackage, "sdist": SourceDistribution, "bdist_wheel": Wheel}, distclass=Package)
