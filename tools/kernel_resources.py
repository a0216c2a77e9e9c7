"""Compiles every kernel for several GPUs without one, and prints its resources.

The launches of each kernel's host function are compiled instead of run; Triton brings the assembler and the
disassembler. A line shows registers a thread, bytes of spilled registers, shared memory a block, the kernel's
instructions and, for attention, those that a warp runs for 64 keys. The exit status is 1 if a kernel spills too much or
exceeds the shared memory. kernel_resources.txt is the output of one version of Triton, with which a test compares.

A line ends with a digest of what was compiled: the sources of a kernel and of the functions that it calls, and how it is
launched. With --known, a digest of the file is not compiled: the same compiler would make the same code, so its line is
printed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from struct import unpack_from
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tools.kernel_cases import Case, all_cases, brief_cases

# Bytes of shared memory of a block, by compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
_INSTRUCTION_BYTES = 16
_KEYS = 64  # for which instructions are counted
_MOST_SPILLED = 80  # bytes of registers a thread; smaller tiles would cost more
_TOO_MUCH = " <- too much"


class _Target:
    """The part of a driver that the compiler uses."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # by which a kernel keeps what it has compiled

    def get_current_stream(self, _: int) -> int:
        return 0


class Compiler:
    """Compiles the launches of functions for one compute capability."""

    def __init__(self, capability: int, known: dict[str, str]) -> None:
        self.capability = capability
        self.lines: dict[str, str] = {}  # by digest
        self._known = known
        self._shape = ""

    def compile(self, cases: Iterable[Case]) -> None:
        """Call the function of each case, and add the launched kernels to `lines`."""
        run, compile_one = JITFunction.run, JITFunction._do_compile  # noqa: SLF001 - after it has looked for the kernel
        triton.runtime.driver.set_active(_Target(self.capability))
        JITFunction.run = lambda *args, **kwargs: run(*args, **{**kwargs, "warmup": True})
        JITFunction._do_compile = self._instead_of(compile_one)  # noqa: SLF001
        try:
            for self._shape, call in cases:
                call()
        finally:
            JITFunction.run, JITFunction._do_compile = run, compile_one  # noqa: SLF001

    def _instead_of(self, compile_one: Any) -> Any:
        def compile_unless_known(kernel: Any, key: str, signature: Any, device: int, constants: Any, *rest: Any) -> Any:
            digest = sha256(f"sm_{self.capability} {kernel.cache_key} {key}".encode()).hexdigest()[:16]
            if digest in self._known:
                self.lines[digest] = self._known[digest]
                return None
            built = compile_one(kernel, key, signature, device, constants, *rest)
            block_n = next(
                (value for (place,), value in constants.items() if kernel.arg_names[place] == "BLOCK_N"), None
            )
            self.lines[digest] = f"{self._describe(built, block_n)} # {digest}"
            return built

        return compile_unless_known

    def _describe(self, built: Any, block_n: int | None) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            usage = _run_tool("cuobjdump", "--dump-resource-usage", file.name)
            loop = ""
            if block_n is not None and built.metadata.name in ("_decode_kernel", "_prefill_kernel"):
                per_keys = longest_loop(_run_tool("nvdisasm", "-c", file.name)) * _KEYS / block_n
                loop = f", {per_keys:.0f} a tile"
        found = dict(re.findall(r"(REG|STACK):(\d+)", usage))
        shared = built.metadata.shared
        is_faulty = int(found["STACK"]) > _MOST_SPILLED or shared > SHARED_BYTES[self.capability]
        return (
            f"sm_{self.capability} {built.metadata.name} ({self._shape}): {found['REG']} registers, {found['STACK']} bytes "
            f"spilled, {shared} bytes shared, {code_bytes(built.asm['cubin']) // _INSTRUCTION_BYTES} instructions{loop}"
            f"{_TOO_MUCH if is_faulty else ''}"
        )


def code_bytes(cubin: bytes) -> int:
    """Return the size of the machine code in an ELF file."""
    table, size, num, names = *unpack_from("<Q", cubin, 40), *unpack_from("<3H", cubin, 58)
    sections = [unpack_from("<I20xQQ", cubin, table + index * size) for index in range(num)]  # name, offset, size
    first_name = sections[names][1]
    return sum(length for name, _, length in sections if cubin.startswith(b".text.", first_name + name))


def _run_tool(name: str, *arguments: str) -> str:
    """Return the output of one of the assembler's tools."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout  # noqa: S603 - Triton's


def longest_loop(listing: str) -> int:
    """Return the number of instructions of the longest loop with a product."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    longest = 0
    for line in listing.splitlines():
        label = re.match(r"\s*(\.L_\w+):", line)
        if label:
            labels[label[1]] = len(instructions)
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            instructions.append(line)
            branch = re.search(r"BRA.*?`\((\.L_\w+)\)", line)
            if branch and branch[1] in labels:
                loop = instructions[labels[branch[1]] :]
                if any("MMA" in each for each in loop):
                    longest = max(longest, sum("NOP" not in each for each in loop))
    return longest


def compile_all(capability: int, known: dict[str, str], *, is_brief: bool) -> list[str]:
    """Compile for one compute capability, such as 90, and return a line for each kernel."""
    compiler = Compiler(capability, known)
    compiler.compile(brief_cases(capability) if is_brief else all_cases(capability))
    return sorted(compiler.lines.values())


def read_known(file: Path, version: str) -> dict[str, str]:
    """Return the lines of a file by their digests, if the same compiler has made them."""
    found, *lines = file.read_text(encoding="utf-8").splitlines()
    return {line.rpartition("# ")[2]: line for line in lines} if found == version else {}


def forget_places() -> None:
    """Take the line of each kernel out of its hash: one that moves in its file is the same kernel."""
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("engine.runtime.cuda.") else ():
            if isinstance(value, JITFunction):
                value.starting_line_number = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each kernel."""
    parser = argparse.ArgumentParser(prog="python -m tools.kernel_resources", description="Compile all kernels.")
    parser.add_argument("--sm", type=int, nargs="+", choices=SHARED_BYTES, default=list(SHARED_BYTES), metavar="XY")
    parser.add_argument("--brief", action="store_true", help="each kernel in one shape")
    parser.add_argument("--known", type=Path, metavar="FILE", help="an output whose kernels are not compiled again")
    options = parser.parse_args(argv)
    version = f"triton {triton.__version__}; a tile's instructions are a warp's, for {_KEYS} keys"
    known = read_known(options.known, version) if options.known else {}
    forget_places()
    print(version)
    num_faulty = 0
    for capability in options.sm:
        for line in compile_all(capability, known, is_brief=options.brief):
            num_faulty += _TOO_MUCH in line
            print(line)
    return int(num_faulty > 0)


if __name__ == "__main__":
    sys.exit(main())
