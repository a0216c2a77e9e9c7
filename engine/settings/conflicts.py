"""The settings of the engine that do not go together. `c` is the EngineConfig; server/settings/conflicts.py has the server's rows.

Imports no third-party module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.core.config import FEW_TOKENS
from engine.settings.setting import Conflict


def _ranked(refuses: Callable[[Any], object], sentence: str) -> Conflict:
    return Conflict(
        lambda c: c.tensor_parallel_size > 1 and refuses(c),
        f"--tensor-parallel-size is {{c.tensor_parallel_size}}, {sentence}; leave one of the two out.",
    )


CONFLICTS = (
    Conflict(
        lambda c: None not in (c.max_num_batched_tokens, c.max_num_seqs) and c.max_num_batched_tokens < c.max_num_seqs,
        FEW_TOKENS,
    ),
    Conflict(
        lambda c: c.block_size & (c.block_size - 1),
        "--block-size is {c.block_size}; it must be a power of two from 1 to 1024.",
    ),
    Conflict(
        lambda c: None not in (c.num_gpu_blocks_override, c.kv_cache_memory_bytes),
        "--num-gpu-blocks-override and --kv-cache-memory-bytes both size the KV pool; leave one of the two out.",
    ),
    Conflict(
        lambda c: c.portable_bits and (c.cpu_kernels == "off" or c.model_impl == "transformers"),
        "--portable-bits is what the native kernels compute, and --cpu-kernels or --model-impl leaves them out; leave one of "
        "the two out.",
    ),
    Conflict(
        lambda c: c.speculation is not None and c.async_scheduling,
        "--async-scheduling plans a step before the tokens of the last one are known, and --speculative-config needs them; "
        "leave one of the two out.",
    ),
    Conflict(
        lambda c: c.kv_offload_dir is not None and not c.kv_offload_gib,
        "--kv-offload-config: folder is {c.kv_offload_dir!r}, and blocks go there through host memory; set host_gib, too, "
        "such as 1.",
    ),
    Conflict(
        lambda c: c.kv_offload_gib and not c.enable_prefix_caching,
        "--kv-offload-config keeps blocks of the prefix cache, which is off; leave out one of the two.",
    ),
    Conflict(
        lambda c: c.kv_events is not None and not c.enable_prefix_caching,
        "--kv-events-config publishes what the prefix cache holds, and it is off; leave out one of the two.",
    ),
    Conflict(
        lambda c: c.record is not None and c.kv_offload_dir is not None,
        "--record does not cover the folder of --kv-offload-config; leave one of them out.",
    ),
    _ranked(lambda c: c.num_loras, "and adapters are for models on one device"),
    _ranked(
        lambda c: c.speculation is not None and not c.speculation.is_text,
        "and of --speculative-config only the methods ngram and suffix work with it",
    ),
    _ranked(lambda c: c.swap_space, "and --swap-space holds the K/V of one device"),
    _ranked(lambda c: c.kv_offload_gib, "and --kv-offload-config keeps the K/V of one device"),
    _ranked(lambda c: c.model_impl == "transformers", "and transformers' code runs on one device"),
    Conflict(
        lambda c: c.repeated_lora is not None,
        "--lora-modules names {c.repeated_lora!r} twice; give each adapter a name of its own.",
    ),
    Conflict(
        lambda c: len(c.lora_modules) > c.num_loras,
        "--max-loras is {c.max_loras}, less than the number of --lora-modules; raise it.",
    ),
)
