"""The engine's settings: what was asked (EngineConfig) and what the scheduler runs on once it is known (SchedulerConfig).

Both are frozen and validated at birth. Where a value depends on the device or the model, EngineConfig holds None for
"choose for me", and engine/build.py resolves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from engine.core.draft_costs import FREE, DraftCosts
from engine.core.errors import ConfigError
from engine.core.kv.eviction import EVICTION_POLICIES
from engine.core.queues import POLICIES
from engine.core.speculative_config import SpeculativeConfig

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "gguf", "int8", "fp8")
ATTENTION_BACKENDS = ("auto", "cpu_native", "cpu", "torch", "reference", "triton", "torch_varlen", "flashinfer")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
DEVICES = ("auto", "cpu", "cuda")
CPU_KERNELS = ("auto", "off", "portable", "avx2", "avx512", "avx512bf16")
MODEL_IMPLS = ("auto", "quire", "transformers")
RECORD_CONTENTS = ("lengths", "ids")
DEFAULT_MAX_LORAS = 8  # where they may be loaded while the daemon runs
MAX_NUM_THREADS = 1024  # thread libraries end the process where the system gives no more


class LoraModule(NamedTuple):
    """An adapter that is there from the start, by the name that requests have for it."""

    name: str
    path: str


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asked for. Sizes are bytes, tokens or blocks as named; None means "choose for me"."""

    model: str
    revision: str | None = None
    load_format: str = "auto"
    model_impl: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None  # --max-model-len auto: the model's own, or what the pool holds of it
    block_size: int | None = 16  # --block-size auto: chosen at the start
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    prefix_cache_eviction: str = "lru"
    scheduling_policy: str = "fcfs"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    pinned_prefix_share: float = 0.25
    swap_space: float = 0.0  # GiB
    kv_offload_gib: float = 0.0
    kv_offload_dir: str | None = None
    kv_offload_disk_gib: float = 8.0
    attention_backend: str = "auto"
    cpu_kernels: str = "auto"
    async_scheduling: bool | None = None
    speculative_config: str | Mapping[str, Any] | None = None  # as SpeculativeConfig reads it
    enforce_eager: bool = False
    num_threads: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    target_itl_ms: float | None = None
    target_ttft_ms: float | None = None
    lora_modules: tuple[LoraModule, ...] = ()
    max_loras: int | None = None
    max_lora_rank: int = 64
    allow_runtime_lora_updating: bool = False
    record: str | None = None  # a file; see engine/recording.py
    record_contents: str = "lengths"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("load_format", LOAD_FORMATS),
            ("dtype", DTYPES),
            ("quantization", QUANTIZATIONS),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("device", DEVICES),
            ("model_impl", MODEL_IMPLS),
            ("cpu_kernels", CPU_KERNELS),
            ("attention_backend", ATTENTION_BACKENDS),
            ("scheduling_policy", tuple(POLICIES)),
            ("prefix_cache_eviction", tuple(EVICTION_POLICIES)),
            ("record_contents", RECORD_CONTENTS),
        ):
            value = getattr(self, name)
            _require(value in allowed, f"{_flag(name)} is {value!r}; choose one of {', '.join(allowed)}.")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
            "num_threads",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
            "max_loras",
            "max_lora_rank",
        ):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{_flag(name)} is {value}; it must be at least 1.")
        if self.speculative_config is not None:
            drafts = SpeculativeConfig.read(self.speculative_config)
            drafts.check_room("--max-model-len", self.max_model_len)
            drafts.check_room("--max-num-batched-tokens", self.max_num_batched_tokens)
            _require(
                not self.async_scheduling,
                "--async-scheduling plans a step before the tokens of the last one are known, and --speculative-config "
                "begins with them; leave one of the two out.",
            )
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        _require(tokens is None or seqs is None or tokens >= seqs, _few_tokens(tokens, seqs))
        share = self.pinned_prefix_share
        _require(0.0 <= share < 1.0, f"--pinned-prefix-share is {share}; it must be at least 0 and less than 1.")
        threads = self.num_threads
        _require(
            threads is None or threads <= MAX_NUM_THREADS,
            f"--num-threads is {threads}; it must be at most {MAX_NUM_THREADS}, best the number of cores.",
        )
        for name in ("target_itl_ms", "target_ttft_ms"):
            value = getattr(self, name)
            _require(
                value is None or 0.0 < value < inf, f"{_flag(name)} is {value}; it must be a number of ms above 0."
            )
        size = self.block_size
        _require(
            size is None or (1 <= size <= 1024 and size & (size - 1) == 0),
            f"--block-size is {size}; it must be a power of two from 1 to 1024, or auto.",
        )
        _require(
            0.0 < self.gpu_memory_utilization <= 1.0,
            f"--gpu-memory-utilization is {self.gpu_memory_utilization}; it must be in (0, 1].",
        )
        for name in ("swap_space", "kv_offload_gib", "kv_offload_disk_gib"):
            value = getattr(self, name)
            _require(0.0 <= value < inf, f"{_flag(name)} is {value}; it must be a number of GiB, 0 for none.")
        _require(
            self.kv_offload_dir is None or self.kv_offload_gib > 0,
            f"--kv-offload-dir is {self.kv_offload_dir!r}, and blocks go there through main memory; set --kv-offload-gib "
            "to some of that, such as 1.",
        )
        _require(
            self.enable_prefix_caching or not self.kv_offload_gib,
            "--kv-offload-gib keeps blocks of the prefix cache, which is switched off; leave out one of the two.",
        )
        _require(
            self.record is None or self.kv_offload_dir is None,
            "--record does not cover the disk of --kv-offload-dir; leave one of them out.",
        )
        names = [module.name for module in self.lora_modules]
        twice = next((name for name in names if names.count(name) > 1), None)
        _require(twice is None, f"--lora-modules names {twice!r} twice; give each adapter a name of its own.")
        _require(
            len(names) <= num_loras(self),
            f"--max-loras is {self.max_loras}, less than the {len(names)} of --lora-modules; raise it.",
        )

    def check_length(self, longest: int) -> None:
        """Raise ConfigError if more positions are asked for than the model was made for."""
        asked = self.max_model_len
        _require(
            asked is None or asked <= longest,
            f"--max-model-len is {asked}, but the model was made for {longest} positions; set it to at most {longest}.",
        )

    def of_draft(self, asked: SpeculativeConfig) -> EngineConfig:
        """The settings that the draft model of `asked` is loaded with."""
        assert asked.model is not None, "n-grams need no model"
        return replace(
            self,
            model=asked.model,
            revision=asked.revision,
            quantization=asked.quantization,
            max_model_len=None,
            load_format=self.load_format if self.load_format == "dummy" else "auto",
            lora_modules=(),
            max_loras=None,
            allow_runtime_lora_updating=False,
        )


# Rows of logits that a step with drafts may come to: a large vocabulary's are a megabyte each, several times over.
_MAX_DRAFTED_ROWS = 256
# Of fields that no flag names.
_LEAST = {
    "min_copied_tokens": 1,
    "num_host_blocks": 0,
    "num_speculative_tokens": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """All the scheduler needs to know, resolved to numbers."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    eviction: str = "lru"
    pinned_share: float = 0.0  # of the blocks of each tier: as many may be pinned
    min_copied_tokens: int = 1  # of a cached block that a prompt shares the beginning of, for it to be copied
    policy: str = "fcfs"
    target_itl_s: float | None = None  # between two tokens of a sequence
    target_ttft_s: float | None = None
    num_host_blocks: int = 0  # in main memory, for what preempted sequences have computed
    host_caching: bool = False  # cached blocks that the pool gives up go there too
    stores: tuple[tuple[str, int], ...] = ()  # keepers of cached blocks behind host memory: name, blocks
    num_speculative_tokens: int = 0  # most that a runner drafts for a sequence in a step
    draft_costs: DraftCosts = FREE

    @property
    def max_num_rows(self) -> int:
        """Draws of a step, with those behind drafts: what memory is measured for."""
        return max(self.max_num_seqs, min(self.max_num_seqs * (1 + self.num_speculative_tokens), _MAX_DRAFTED_ROWS))

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            _require(value >= 1, f"{_flag(name)} is {value}; it must be at least 1.")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            _require(value >= least, f"{name} is {value}; it must be at least {least}.")
        for name in ("target_itl_s", "target_ttft_s"):
            value = getattr(self, name)
            _require(value is None or 0.0 < value < inf, f"{name} is {value}; it must be a number of seconds above 0.")
        share = self.pinned_share
        _require(0.0 <= share < 1.0, f"pinned_share is {share}; it must be at least 0 and less than 1.")
        assert self.host_caching or not self.stores, "stores are behind host blocks"
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            _few_tokens(self.max_num_batched_tokens, self.max_num_seqs),
        )
        _require(
            self.policy in POLICIES, f"--scheduling-policy is {self.policy!r}; choose one of {', '.join(POLICIES)}."
        )
        _require(
            self.eviction in EVICTION_POLICIES,
            f"--prefix-cache-eviction is {self.eviction!r}; choose one of {', '.join(EVICTION_POLICIES)}.",
        )


def num_loras(config: EngineConfig) -> int:
    """Adapters that may be held at once; 0 where there will never be any."""
    if not (config.lora_modules or config.allow_runtime_lora_updating):
        return 0
    least = DEFAULT_MAX_LORAS if config.allow_runtime_lora_updating else 0
    return config.max_loras or max(len(config.lora_modules), least)


def _few_tokens(tokens: int | None, seqs: int | None) -> str:
    return (
        f"--max-num-batched-tokens is {tokens}, less than --max-num-seqs ({seqs}); every running sequence needs one token "
        "of a step's budget."
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
