"""The names of the figures that have targets in parts.py."""

from __future__ import annotations


def decode_attention(heads: int, batch: int, context: int, kv: str = "") -> str:
    return f"decode attention, {heads} heads, batch {batch}, context {context}{kv and f', {kv} K/V'}"


def prefill_attention(heads: int, num: int, length: int) -> str:
    return f"prefill attention, {heads} heads, {num} x {length}"


def throughput(model: str) -> str:
    return f"{model}: nano-vllm workload"


def decode_step(model: str, batch: int) -> str:
    return f"{model}: step of {batch} decoding"


def prefill(model: str, length: int) -> str:
    return f"{model}: prefill, prompts of {length}"


def idle(model: str) -> str:
    return f"{model}: GPU idle while decoding"


def memory(model: str) -> str:
    return f"{model}: GPU memory in use"


def gain(model: str) -> str:
    return f"{model}: throughput over bf16"
