"""The kernels compile for GPUs, which the interpreter says nothing about; and none keeps its registers in memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

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


RESOURCES = Path(__file__).parents[2] / "loadtest" / "gpu" / "resources.txt"  # python -m loadtest.gpu.compile


def without_shape(line: str) -> str:
    """A kernel is listed with the first shape that it is compiled for."""
    return re.sub(r" \(.+\):", ":", line)


def test_every_kernel_compiles_for_every_generation(compiling: dict[str, subprocess.Popen[str]]) -> None:
    """What a kernel takes is what the table says, if Triton is the table's; a change of a kernel changes the table."""
    version, *table = RESOURCES.read_text().splitlines()
    for name, process in compiling.items():
        told, complaints = process.communicate()
        found, *lines = told.splitlines()
        if found == version:
            assert set(map(without_shape, lines)) <= set(map(without_shape, table))
            assert name != "sm_90" or lines == [line for line in table if line.startswith("sm_90 ")]
        assert process.returncode == 0, f"{name}: {told}{complaints}"
        kernels = [match.groups() for match in map(LINE.fullmatch, told.splitlines()) if match]
        # e4m3 begins with 8.9.
        expected = [kernel for kernel in KERNELS if name != "sm_80" or kernel != "_quantise_rows"]
        assert sorted({kernel for target, kernel, *_ in kernels if target == name}) == expected
        for _, kernel, shape, *_, num_instructions in kernels:
            if kernel == "_decode_kernel" and "heads of 128, bf16, K/V" in shape:
                # Four fifths of the cycles in which an H200's memory brings that many keys: 1765, and 910 of a narrow pool.
                assert int(num_instructions) < 0.8 * (1765 if "K/V bf16" in shape else 910), shape
