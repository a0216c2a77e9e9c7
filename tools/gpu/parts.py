"""The parts of a run in their stages, the most important first, and the targets.

Each stage fits one command of ten minutes, and all of them fit one loan of a GPU for half an hour.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from tools.gpu import names
from tools.gpu.figures import Target
from tools.gpu.models import ON_GPU
from tools.gpu.task import Task


class Part(NamedTuple):
    """A part, whose process an error of the device ends alone."""

    name: str
    budget_s: float
    function: str  # "module:function" of this package
    arguments: tuple[Any, ...] = ()

    def run(self, task: Task) -> None:
        module, _, function = self.function.partition(":")
        called: Callable[..., None] = getattr(import_module(f"tools.gpu.{module}"), function)
        called(task, *self.arguments)


_FP8_KV, _INT8_KV = "qwen3-0.6b, fp8 K/V", "qwen3-0.6b, int8 K/V"
_FP8_WEIGHTS = "llama-3.1-8b, fp8 weights"
_VARIANT = "offline:run_variant"  # arguments: a shape, a label, settings, and the bytes of a number
_NARROW = {"kv_bytes": 132 / 128}  # a row has a float32 scale beside its 128 numbers
LIMIT_S = 540.0  # for a stage, with the part `machine` before it
MACHINE = Part("machine", 30, "machine:run")  # measures the rates that limit the other figures
STAGES = {
    "tests": (Part("engine-tests", 260, "suites:run_engine"), Part("kernel-tests", 220, "suites:run_kernels")),
    "speed": (
        Part("qwen3-0.6b", 90, "offline:run", ("qwen3-0.6b",)),
        Part("llama-3.1-8b", 100, "offline:run", ("llama-3.1-8b",)),
        Part("kernels", 70, "kernels:run"),
        Part("http", 60, "serving:run", ("qwen3-0.6b",)),
        Part("fp8-kv", 40, _VARIANT, ("qwen3-0.6b", _FP8_KV, {"kv_cache_dtype": "fp8"}, _NARROW)),
        Part(
            "fp8-weights", 50, _VARIANT, ("llama-3.1-8b", _FP8_WEIGHTS, {"quantization": "fp8"}, {"linear_bytes": 1.0})
        ),
        Part("int8-kv", 40, _VARIANT, ("qwen3-0.6b", _INT8_KV, {"kv_cache_dtype": "int8"}, _NARROW)),
        Part("http-8b", 60, "serving:run", ("llama-3.1-8b",)),
    ),
    "beside": (Part("vllm", 240, "serving:run_vllm", ("qwen3-0.6b",)),),
}
PARTS = (MACHINE, *(part for stage in STAGES.values() for part in stage))
# Runs only with --tune, after the part `machine`.
TUNE = Part("tune", 420, "tune:run")

TARGET_GPU = "H200"
# Prefill attention: 60 % of 648 TFLOP/s, the best published rate of FlashAttention-3 on an H100 for a forward pass with
# heads of 128 in 16 bits and 16k tokens. No figure is published for 8k tokens, which are slower.
TARGETS = {
    **{names.decode_attention(32, 128, context): Target(0.85, of_limit=True) for context in (1024, 4096, 8192)},
    names.prefill_attention(32, 1, 8192): Target(0.6 * 648),
    names.throughput("qwen3-0.6b"): Target(25_000),
    names.throughput("llama-3.1-8b"): Target(9_500),
    names.decode_step("qwen3-0.6b", 1): Target(1.2),
    names.decode_step("llama-3.1-8b", 1): Target(4.3),
    names.prefill("llama-3.1-8b", 1024): Target(35_000),
    **{names.idle(model): Target(3.0) for model in ON_GPU},
    **{names.memory(model): Target(91.0) for model in ON_GPU},  # the default share, and one percent
    names.gain(_FP8_KV): Target(1.4),
}
