"""The kernels compile for GPUs, which the interpreter says nothing about; and none keeps its registers in memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

KERNELS = [
    "_act_mul_kernel",
    "_add_rms_norm",
    "_add_to_tokens",
    "_ban_tokens",
    "_choose",
    "_combine_kernel",
    "_copy_best",
    "_count_tokens",
    "_decode_kernel",
    "_decode_rows",
    "_expert_kernel",
    "_find_candidates",
    "_find_peaks",
    "_latent_decode_kernel",
    "_latent_prefill_kernel",
    "_mask_kernel",
    "_merge_kernel",
    "_prefill_kernel",
    "_quantise_rows",
    "_rotate_and_store",
    "_route_kernel",
    "_search_borders",
    "_sort_kernel",
    "_store_kernel",
    "_tally",
]
LINE = re.compile(
    r"(sm_\d+) (\w+) \((.+?)\): (\d+) registers, (\d+) bytes spilled, (\d+) bytes shared, \d+ instructions(?:, (\d+) a tile)?"
)


RESOURCES = Path(__file__).parents[2] / "tools" / "kernel_resources.txt"  # python -m tools.kernel_resources


def without_shape(line: str) -> str:
    """A kernel is listed with the first shape that it is compiled for."""
    return re.sub(r" \(.+\):", ":", line)


@pytest.fixture
def compiling(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """`python -m tools.kernel_resources` in a process for each GPU, since kernels are either interpreted or compiled.

    Each kernel in one shape; the command without --brief compiles all.
    """
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    with ExitStack() as stack:
        processes = {}
        for target in ("80", "90", "100"):
            command = [sys.executable, "-m", "tools.kernel_resources", "--brief", "--sm", target]
            processes[f"sm_{target}"] = stack.enter_context(
                subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        yield processes
        for process in processes.values():
            process.kill()


def test_every_kernel_compiles_for_every_generation(compiling: dict[str, subprocess.Popen[str]]) -> None:
    """What a kernel takes is what the table says, if Triton is the table's; a change of a kernel changes the table."""
    version, *table = RESOURCES.read_text().splitlines()
    for name, process in compiling.items():
        told, complaints = process.communicate()
        found, *lines = told.splitlines()
        if found == version:
            assert set(map(without_shape, lines)) <= set(map(without_shape, table))
        assert process.returncode == 0, f"{name}: {told}{complaints}"
        kernels = [match.groups() for match in map(LINE.fullmatch, told.splitlines()) if match]
        # e4m3 begins with 8.9.
        expected = [kernel for kernel in KERNELS if name != "sm_80" or kernel != "_quantise_rows"]
        assert sorted({kernel for target, kernel, *_ in kernels if target == name}) == expected
        for _, kernel, shape, *_, num_instructions in kernels:
            if kernel == "_decode_kernel" and "heads of 128, bf16, K/V" in shape:
                # Four fifths of the cycles in which an H200's memory brings that many keys: 1765, and 910 of a narrow pool.
                assert int(num_instructions) < 0.8 * (1765 if "K/V bf16" in shape else 910), shape
