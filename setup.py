"""Builds the package: puts the compiled CPU kernels and the commit into it. All other facts are in pyproject.toml.

The kernels are one shared library for Linux that chooses its instruction set when it runs, and that any Python 3 loads by
ctypes. Without a C compiler the wheel has none, and runs everywhere.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from engine.runtime.native.build import find_compiler, find_library  # noqa: E402 - needs the path
from engine.system.version import COMMIT_FILE, commit  # noqa: E402


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
        for stale in Path(self.build_lib, "engine/runtime/native").glob("*.so"):
            stale.unlink()  # an earlier build's, of other sources
        library = find_library()
        if library is not None:
            shutil.copy(library, Path(self.build_lib, "engine/runtime/native", packaged_name(library)))
        write_commit(Path(self.build_lib))


class SourceDistribution(sdist):
    """An archive of the sources that knows its commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


class Wheel(bdist_wheel):
    """A wheel for every Python 3, and for this platform if it has kernels."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = find_compiler() is None

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return "py3", "none", platform


class Package(Distribution):
    """Has a library in it if there is a compiler, so that the wheel is installed where platform libraries are."""

    def has_ext_modules(self) -> bool:
        return find_compiler() is not None


def packaged_name(library: Path) -> str:
    """Return the library's name without the compiler's part, as find_library looks for it in the package."""
    return "-".join(library.stem.split("-")[:2]) + library.suffix


setup(cmdclass={"build_py": BuildPackage, "sdist": SourceDistribution, "bdist_wheel": Wheel}, distclass=Package)
