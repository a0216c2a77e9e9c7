"""The engine's settings as a user gives them, each declared once.

None means "choose for me"; engine/startup/build.py resolves it and derives the core's SchedulerConfig. Everything else made from a
setting (flag, variable, YAML key, --help, docs/reference/) follows from its field here. Imports no third-party module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from engine.core.errors import ConfigError
from engine.core.queues import POLICIES
from engine.files.formats import FORMATS
from engine.runtime.attention import BACKENDS
from engine.runtime.schemes import SCHEMES
from engine.settings.conflicts import CONFLICTS
from engine.settings.kv_events_config import KVEventsConfig
from engine.settings.setting import check, feature, section
from engine.settings.speculative_config import SpeculativeConfig

DEFAULT_MAX_LORAS = 8  # where adapters may be loaded while the daemon runs


class LoraModule(NamedTuple):
    """An adapter that is loaded at the start, by the name that requests have for it."""

    name: str
    path: str


_model = section("Model")
_device = section("Device and memory")
_scheduling = section("Scheduling")
_lora = section("LoRA adapters")
_logging = section("Logging and configuration")
_offload = feature("kv_offload_config", "Device and memory")
_MOST_ROWS = 1 << 20  # of a step; the start makes tables for them


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asks of the engine. Frozen and checked when made."""

    model: str
    most_pool_bytes: int | None = None  # of a KV pool whose size is not given: several models share the memory
    revision: str | None = _model(None, "REV", "branch, tag or commit of a Hugging Face id", unset="its main branch")
    download_dir: str | None = _model(
        None,
        "DIR",
        "folder for models of the hub, in the layout of its cache",
        unset="$HF_HUB_CACHE, else ~/.cache/huggingface/hub",
    )
    hf_overrides: Mapping[str, Any] | None = _model(
        None, "JSON", "keys of the model's config.json and other values for them", unset="none"
    )
    mmproj: str | None = _model(
        None,
        "FILE",
        "the vision half of a GGUF model",
        unset="a fitting mmproj*.gguf beside the model",
        short="-mm",
    )
    load_format: str = _model(
        "auto", "", "where weights come from; dummy makes random ones", choices=("auto", *FORMATS)
    )
    model_impl: str = _model(
        "auto", "", "whose model code runs; auto prefers Quire's", choices=("auto", "quire", "transformers")
    )
    dtype: str = _model(
        "auto",
        "",
        "number format of weights, activations and KV cache",
        choices=("auto", "float32", "bfloat16", "float16"),
        is_essential=True,
    )
    quantization: str = _model(
        "auto",
        "",
        "weights: gguf and stored multiply them as the files have them (auto, unless --dtype names another format), none dequantises them; at load int8 quantises any on a CPU, fp8 on CUDA",
        choices=("auto", *SCHEMES),
        is_essential=True,
    )
    max_model_len: int | None = _model(
        None,
        "TOKENS",
        "longest prompt plus answer; auto, or -1, is the model's context, or as much of it as the KV pool holds",
        unset="auto",
        is_auto=True,
        at_least=1,
        is_essential=True,
    )
    seed: int = _model(0, "SEED", "seed of dummy weights", at_least=0, at_most=2**63 - 1)

    device: str = _device(
        "auto",
        "",
        "where the model runs; auto takes a GPU if there is one",
        choices=("auto", "cpu", "cuda"),
        is_essential=True,
    )
    num_threads: int | None = _device(
        None,
        "N",
        "CPU threads of the model",
        unset="one per core",
        short="--threads --cpu-threads",
        at_least=1,
        at_most=1024,  # thread libraries end the process where the system gives no more
    )
    numa: str = _device(
        "distribute",
        "",
        "on a machine with several memory nodes: pages in turns on all of them, and ranks on one each; or all as numactl has it",
        choices=("distribute", "numactl"),
    )
    tensor_parallel_size: int = _device(
        1,
        "N",
        "processes that hold the model together, on a GPU each or sharing the CPU's cores",
        short="-tp",
        at_least=1,
        at_most=64,
    )
    attention_backend: str = _device(
        "auto",
        "",
        "attention implementation; auto takes the best one for the device",
        choices=("auto", *BACKENDS),
    )
    cpu_kernels: str = _device(
        "auto",
        "",
        "native kernels on a CPU; auto takes its best instruction set, off uses torch alone",
        choices=(
            "auto",
            "off",
            "portable",
            "avx2",
            "avxvnni",
            "avx512",
            "avx512vnni",
            "avx512bf16",
            "amx",
            "neon_dot",
            "neon_bf16",
        ),
    )
    portable_bits: bool = _device(
        False, "", "on a CPU, compute the same bits with every instruction set; needs native kernels"
    )
    weights_cache: str | None = _device(
        None,
        "DIR",
        "folder that keeps packed weights of models on a CPU; the next start maps them",
        unset="weights are packed at every start",
    )
    weights_cache_size: int = _device(
        16 << 30, "SIZE", "bytes of --weights-cache, such as 16GiB; files that were used longest ago go", at_least=1
    )
    gpu_memory_utilization: float = _device(
        0.9, "SHARE", "share of the GPU's memory that Quire may use", above=0, at_most=1, is_essential=True
    )
    kv_cache_memory_bytes: int | None = _device(
        None, "SIZE", "KV pool size, such as 2GiB; overrides the share", unset="measured", at_least=1
    )
    num_gpu_blocks_override: int | None = _device(
        None, "N", "blocks of the KV pool, instead of as many as there is memory for", unset="measured", at_least=1
    )
    image_cache_memory: int = _device(
        256 << 20,
        "SIZE",
        "vectors of images that are kept, such as 1GiB; 0 loads no vision tower, and serves text alone",
        at_least=0,
    )
    kv_cache_dtype: str = _device(
        "auto",
        "",
        "number format of the KV pool; auto is the model's; int8, and on CUDA fp8, hold nearly twice the tokens",
        choices=("auto", "int8", "fp8"),
    )
    state_dtype: str = _device(
        "float32",
        "",
        "number format of recurrent states, rounded after every token, or on CUDA every 64 of a prompt; bfloat16 halves "
        "their memory and its traffic",
        choices=("float32", "bfloat16"),
    )
    block_size: int = _device(16, "TOKENS", "tokens per KV block, a power of two", at_least=1, at_most=1024)
    swap_space: float = _device(
        0.0, "GIB", "host memory for the K/V of preempted sequences; 0 recomputes it", at_least=0
    )
    kv_offload_gib: float = _offload(
        "host_gib", 0.0, "GIB", "host memory for cached blocks that the KV pool has no room for", at_least=0
    )
    kv_offload_dir: str | None = _offload(
        "folder", None, "DIR", "folder for cached blocks that survive a restart; daemons may share it", unset="none"
    )
    kv_offload_disk_gib: float = _offload(
        "disk_gib", 8.0, "GIB", "largest size of what this daemon keeps in that folder", at_least=0
    )

    max_num_seqs: int | None = _scheduling(
        None,
        "N",
        "most sequences in one step",
        unset="chosen for the device",
        at_least=1,
        at_most=_MOST_ROWS,
        is_essential=True,
    )
    max_num_batched_tokens: int | None = _scheduling(
        None, "N", "most tokens in one step", unset="chosen for the device", at_least=1, at_most=_MOST_ROWS
    )
    scheduling_policy: str = _scheduling("fcfs", "", "which request goes first", choices=tuple(POLICIES))
    target_itl_ms: float | None = _scheduling(
        None,
        "MS",
        "gap between two tokens that steps are kept within, by taking fewer prompt tokens",
        unset="none; only long prompts are held back",
        above=0,
    )
    target_ttft_ms: float | None = _scheduling(
        None, "MS", "wait for the first token that long prompts are sped up to keep", unset="none", above=0
    )
    model_share: float = _scheduling(
        1.0,
        "N",
        "this model's share of the step time while several models have work; 2 beside 1 is two thirds",
        above=0,
    )
    enable_prefix_caching: bool = _scheduling(True, "", "reuse the KV blocks of shared prompt prefixes")
    kv_events_config: str | Mapping[str, Any] | None = _scheduling(
        None,
        "JSON",
        'publish which blocks are cached, for routers, with vLLM\'s keys: {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}; the events hold token ids',
        unset="off",
    )
    pinned_prefix_share: float = _scheduling(
        0.25,
        "SHARE",
        "share of the KV pool, and of each tier behind it, that pinned prefixes may keep",
        at_least=0,
        below=1,
    )
    async_scheduling: bool | None = _scheduling(
        None, "", "plan the next step while this one runs", unset="chosen for the device"
    )
    speculative_config: str | Mapping[str, Any] | None = _scheduling(
        None,
        "JSON",
        'draft tokens ahead, with vLLM\'s keys: {"method": "ngram"} from the text so far, "suffix" from recent answers too, "mtp" by the checkpoint\'s MTP layer, or {"model": PATH} by a smaller model or an EAGLE-3 draft',
        unset="off",
    )
    enforce_eager: bool = _scheduling(
        False, "", "on CUDA, launch decode steps kernel by kernel instead of as CUDA graphs"
    )
    max_num_queued_reqs: int | None = _scheduling(
        None,
        "N",
        "requests that may wait, each with all its inputs; more are refused with 429",
        unset="1024",
        at_least=1,
    )
    max_num_queued_tokens: int | None = _scheduling(
        None, "N", "prompt tokens that may wait; more are refused with 429", unset="8 times the KV pool", at_least=1
    )

    lora_modules: tuple[LoraModule, ...] = _lora(
        (),
        "NAME=PATH",
        "adapters: folders saved by PEFT, or ids of a hub; requests name one as their model",
        unset="none",
        is_essential=True,
    )
    max_loras: int | None = _lora(
        None,
        "N",
        "most adapters held at the same time",
        unset=f"those of --lora-modules; {DEFAULT_MAX_LORAS} if others may be loaded",
        at_least=1,
    )
    max_lora_rank: int = _lora(64, "N", "highest rank that an adapter may have", at_least=1)
    allow_runtime_lora_updating: bool = _lora(
        False, "", "let clients load and unload adapters; they name paths of this machine, so set --api-key too"
    )

    record: str | None = _logging(
        None,
        "FILE",
        "write the scheduler's inputs, without texts and keys, for `quire simulate replay FILE`; ends at 256 MiB",
        unset="none",
    )

    def __post_init__(self) -> None:
        check(self, CONFLICTS)
        drafts = self.speculation
        if drafts is not None:
            drafts.check_room("--max-model-len", self.max_model_len)
            drafts.check_room("--max-num-batched-tokens", self.max_num_batched_tokens)

    @property
    def asked_dtype(self) -> str:
        """Return --dtype; with --portable-bits auto is float32, whatever the machine multiplies."""
        return "float32" if self.portable_bits and self.dtype == "auto" else self.dtype

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Return --speculative-config, read. Raises ConfigError."""
        return None if self.speculative_config is None else SpeculativeConfig.read(self.speculative_config)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Return --kv-events-config, read, or None if nothing is published. Raises ConfigError."""
        config = None if self.kv_events_config is None else KVEventsConfig.read(self.kv_events_config)
        return config if config is not None and config.is_on else None

    @property
    def num_loras(self) -> int:
        """Return the most adapters held at the same time; 0 if none can be loaded."""
        if not (self.lora_modules or self.allow_runtime_lora_updating):
            return 0
        least = DEFAULT_MAX_LORAS if self.allow_runtime_lora_updating else 0
        return self.max_loras or max(len(self.lora_modules), least)

    @property
    def repeated_lora(self) -> str | None:
        """Return a name that --lora-modules has twice, if there is one."""
        names = [module.name for module in self.lora_modules]
        return next((name for name in names if names.count(name) > 1), None)

    def check_length(self, longest: int) -> None:
        """Raise ConfigError if more positions are asked for than the model was made for."""
        asked = self.max_model_len
        if asked is not None and asked > longest:
            raise ConfigError(
                f"--max-model-len is {asked}, but the model was made for {longest} positions; set it to at most {longest}."
            )

    def of_draft(self, asked: SpeculativeConfig) -> EngineConfig:
        """Return the settings that the draft model of `asked` is loaded with."""
        assert asked.model is not None, "n-grams need no model"
        return replace(
            self,
            model=asked.model,
            revision=asked.revision,
            quantization=asked.quantization,
            max_model_len=None,
            load_format=self.load_format if self.load_format == "dummy" else "auto",
            hf_overrides=None,
            mmproj=None,
            lora_modules=(),
            max_loras=None,
            allow_runtime_lora_updating=False,
        )
