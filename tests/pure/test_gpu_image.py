"""What a GPU's image has, what is carried to it, and what Quire needs there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu.image import IMAGE, WHEELS, needed, normalised, read_packages

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
THERE = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux", "platform_system": "Linux"}
IN_IMAGE = {package.name for package in read_packages(IMAGE)}
CARRIED = {package.name for package in read_packages(WHEELS)}


def test_wheels_are_what_quire_needs_and_the_image_lacks() -> None:
    """Computed from the dependencies of the package, and from theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lacking = needed(project["dependencies"], THERE, stop=IN_IMAGE)
    assert lacking - CARRIED == set(), "add these to tools/gpu/wheels.txt, or to image.txt if the image has them"
    # A package of the image is carried too where ours needs a newer one.
    assert CARRIED - lacking <= IN_IMAGE, "nothing needs these"


def test_carried_packages_have_versions_for_its_python() -> None:
    """`gpu.sh --wheels` asks for exactly these versions."""
    from packaging.requirements import Requirement

    pinned = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate(THERE):
                pinned[normalised(pin.name)] = str(pin.specifier)
    assert CARRIED - pinned.keys() == set()


IMPORTS = """
import importlib, pkgutil, engine, server, tools.gpu

missing = set()
for package in (engine, server, tools.gpu):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing.add((error.name, module.name))
print(sorted(missing))
"""


def test_in_an_environment_like_the_images_only_optional_modules_are_missing(tmp_path: Path) -> None:
    """Every module of the daemon and of the GPU's run is imported there, with what each imports first."""
    subprocess.run([sys.executable, "-m", "tools.gpu.image", str(tmp_path / "image")], cwd=ROOT, check=True)
    command = [str(tmp_path / "image/bin/python"), "-c", IMPORTS]
    run = subprocess.run(command, cwd=ROOT, env={"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert ast.literal_eval(run.stdout) == [
        ("msgspec", "engine.outbound.kv_events"),
        ("opentelemetry.exporter", "server.telemetry.otlp"),
    ]
