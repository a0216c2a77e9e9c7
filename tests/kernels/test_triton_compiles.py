"""The kernels compile for GPUs, which the interpreter says nothing about; and none keeps its registers in memory."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

LINE = re.compile(
    r"(sm_\d+) (\w+) \((.+?)\): (\d+) registers, (\d+) bytes spilled, (\d+) bytes shared, \d+ instructions(?:, (\d+) a tile)?"
)
ROOT = Path(__file__).parents[2]
RESOURCES = ROOT / "tools" / "kernel_resources.txt"  # python -m tools.kernel_resources


def launched_kernels() -> list[str]:
    """Find the kernels that the engine launches, as `kernel[grid](...)`."""
    kernels, launched = set(), set()
    for file in (ROOT / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(x) for x in node.decorator_list):
                kernels.add(node.name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value))
    return sorted(kernels & launched)


def test_every_kernel_compiles_for_every_generation(tmp_path: Path) -> None:
    """What a kernel takes is what the table says, if Triton is the table's; a change of a kernel changes the table.

    Kernels are either interpreted or compiled, so it is another process. A launch that the table has is not compiled: the
    same compiler makes the same of the same sources. Another compiler makes each kernel in one shape.
    """
    version, *table = RESOURCES.read_text().splitlines()
    is_the_tables = version.startswith(f"triton {metadata.version('triton')};")
    env = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [
        sys.executable,
        "-m",
        "tools.kernel_resources",
        *(["--known", str(RESOURCES)] if is_the_tables else ["--brief"]),
    ]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{run.stdout}{run.stderr}"
    lines = [line.partition(" # ")[0] for line in run.stdout.splitlines()[1:]]
    listed = [line.partition(" # ")[0] for line in table]
    if is_the_tables:
        assert sorted(lines) == sorted(listed)
    launched = launched_kernels()
    assert sorted({match[2] for match in map(LINE.fullmatch, listed) if match}) == launched
    kernels = [match.groups() for match in map(LINE.fullmatch, lines) if match]
    for generation in ("sm_80", "sm_90", "sm_100"):
        # e4m3 begins with 8.9.
        expected = [kernel for kernel in launched if generation != "sm_80" or kernel != "_quantise_rows"]
        assert sorted({kernel for target, kernel, *_ in kernels if target == generation}) == expected
    for _, kernel, shape, *_, num_instructions in kernels:
        if kernel == "_decode_kernel" and "heads of 128, bf16, K/V" in shape:
            # Four fifths of the cycles in which an H200's memory brings that many keys: 1765, and 910 of a narrow pool.
            assert int(num_instructions) < 0.8 * (1765 if "K/V bf16" in shape else 910), shape
