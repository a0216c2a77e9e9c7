"""Every setting of `quire serve`, spelled once, group by group: its name, its default, its bounds and its line of --help.

The groups are headings of --help, and server/settings/settings.py puts them together. What is the engine's has its default in EngineConfig,
what is the front's in AppConfig.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, Field, SecretStr
from pydantic_core import PydanticCustomError
from pydantic_settings import NoDecode

from engine.core.config import (
    CPU_KERNELS,
    DEFAULT_MAX_LORAS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    MODEL_IMPLS,
    QUANTIZATIONS,
    RECORD_CONTENTS,
    EngineConfig,
    LoraModule,
)
from engine.core.kv.eviction import EVICTION_POLICIES
from engine.core.queues import POLICIES
from server.http.origins import read_hosts, read_origins
from server.settings.app_config import AppConfig
from server.settings.lora_modules import read_modules

_ENGINE = EngineConfig(model="")  # where the defaults are spelled
_APP = AppConfig(model="", served_model_names=())


class LogFormat(str, Enum):
    """How a log line is written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(str, Enum):
    """The least severe line that is written. `debug` adds the traceback behind a start-up fault."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _split(value: object) -> object:
    """Variables and YAML strings list their items with commas; flags and YAML lists come as lists."""
    return [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value


def _split_keys(value: object) -> object:
    """As above, but an empty key is refused: left out, it would open the daemon to all."""
    keys = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
    if isinstance(keys, list) and not (
        keys and all(not isinstance(key, str) or (key and key == key.strip()) for key in keys)
    ):
        sentence = "a key is empty, or begins or ends with a space; give every key, or leave the setting out"
        raise PydanticCustomError("empty_key", sentence)
    return keys


def _none_if_auto(value: object) -> object:
    return None if value == "auto" else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_keys)]
Hosts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(read_hosts)]
Origins = Annotated[tuple[str, ...], NoDecode, BeforeValidator(read_origins)]

Json = Annotated[str | dict[str, Any] | None, NoDecode]  # the engine reads it
LoraModules = Annotated[tuple[LoraModule, ...], NoDecode, BeforeValidator(read_modules)]
Length = Annotated[int | None, BeforeValidator(_none_if_auto)]


def _setting(default: Any, metavar: str, text: str, *, unset: str = "", **limits: Any) -> Any:
    """A field with its line of --help. `unset` says what a default of None, or of no items, comes to."""
    return Field(default, description=text, json_schema_extra={"metavar": metavar, "unset": unset}, **limits)


def _choices(*names: str) -> str:
    return "{" + ",".join(names) + "}"


class ModelSettings(BaseModel):
    """Model"""

    model: str | None = _setting(
        None,
        "MODEL",
        "Hugging Face id, folder with safetensors, or .gguf file",
        unset="the embedded SmolLM2-135M-Instruct",
    )
    served_model_name: Names = _setting(
        (),
        "NAME",
        "names that clients may use, such as smol 'claude-*'; the first is reported, those with * are not listed",
        unset="MODEL",
    )
    revision: str | None = _setting(
        _ENGINE.revision, "REV", "branch, tag or commit of a Hugging Face id", unset="its main branch"
    )
    tokenizer: str | None = _setting(None, "PATH", "tokenizer folder, id or .gguf file", unset="the model's own")
    chat_template: Path | None = _setting(None, "FILE", "Jinja chat template", unset="the model's own")
    generation_config: Literal["quire", "auto"] = _setting(
        "quire",
        _choices("quire", "auto"),
        "sampling where a request names none: OpenAI's defaults, or what the model's generation_config says",
    )
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral", "json", "qwen3_xml", "harmony"] = (
        _setting(
            "auto",
            _choices("auto", "none", "hermes", "llama3_json", "mistral", "json", "qwen3_xml", "harmony"),
            "how the model writes calls of tools; auto reads it off the chat template, none leaves them in the text",
        )
    )
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "mistral", "harmony"] = _setting(
        "auto",
        _choices("auto", "none", "qwen3", "deepseek_r1", "mistral", "harmony"),
        "how the model marks its reasoning; auto reads it off the chat template, none leaves it in the text",
    )
    pooling: Literal["last", "mean"] = _setting(
        "last",
        _choices("last", "mean"),
        "what /v1/embeddings makes a vector of: the last token's hidden state, or the mean of all",
    )
    load_format: str = _setting(
        _ENGINE.load_format, _choices(*LOAD_FORMATS), "where weights come from; dummy makes random ones"
    )
    model_impl: str = _setting(
        _ENGINE.model_impl, _choices(*MODEL_IMPLS), "whose model code runs; auto prefers Quire's"
    )
    dtype: str = _setting(_ENGINE.dtype, _choices(*DTYPES), "number format of weights, activations and KV cache")
    quantization: str = _setting(
        _ENGINE.quantization,
        _choices(*QUANTIZATIONS),
        "weights on a CPU: gguf as their file has them (auto, unless --dtype names another format), or int8; on CUDA: fp8",
    )
    max_model_len: Length = _setting(
        _ENGINE.max_model_len,
        "TOKENS",
        "longest prompt plus answer; auto is the model's context, or as much of it as the KV pool holds",
        unset="auto",
    )
    seed: int = _setting(_ENGINE.seed, "N", "seed of dummy weights")


class DeviceSettings(BaseModel):
    """Device and memory"""

    device: str = _setting(_ENGINE.device, _choices(*DEVICES), "where the model runs; auto takes a GPU if there is one")
    num_threads: int | None = _setting(_ENGINE.num_threads, "N", "CPU threads of the model", unset="one a core")
    attention_backend: str = _setting(
        _ENGINE.attention_backend, "NAME", "attention implementation; auto takes the device's best"
    )
    cpu_kernels: str = _setting(
        _ENGINE.cpu_kernels,
        _choices(*CPU_KERNELS),
        "native kernels on a CPU; auto takes its best instruction set, off is torch alone",
    )
    gpu_memory_utilization: float = _setting(
        _ENGINE.gpu_memory_utilization, "SHARE", "share of the GPU's memory that Quire may use, in (0, 1]"
    )
    kv_cache_memory_bytes: ByteSize | None = _setting(
        _ENGINE.kv_cache_memory_bytes, "SIZE", "KV pool size, such as 2GiB; overrides the share", unset="measured"
    )
    kv_cache_dtype: str = _setting(
        _ENGINE.kv_cache_dtype,
        _choices(*KV_CACHE_DTYPES),
        "number format of the KV pool; auto is the model's, int8, and on CUDA fp8, hold nearly twice the tokens",
    )
    block_size: Length = _setting(
        _ENGINE.block_size,
        "TOKENS",
        "tokens a KV block holds, a power of two; auto weighs speed against waste, for requests like those of the last run",
    )
    swap_space: float = _setting(
        _ENGINE.swap_space, "GIB", "host memory for the K/V of preempted sequences; 0 computes them anew"
    )
    kv_offload_gib: float = _setting(
        _ENGINE.kv_offload_gib, "GIB", "host memory for cached blocks that the KV pool has no room for"
    )
    kv_offload_dir: str | None = _setting(
        _ENGINE.kv_offload_dir, "DIR", "a folder for cached blocks that survive a restart", unset="none"
    )
    kv_offload_disk_gib: float = _setting(_ENGINE.kv_offload_disk_gib, "GIB", "how much of them that folder may hold")


class SchedulingSettings(BaseModel):
    """Scheduling"""

    max_num_seqs: int | None = _setting(
        _ENGINE.max_num_seqs, "N", "most sequences in one step", unset="chosen for the device"
    )
    max_num_batched_tokens: int | None = _setting(
        _ENGINE.max_num_batched_tokens, "N", "most tokens in one step", unset="chosen for the device"
    )
    scheduling_policy: str = _setting(_ENGINE.scheduling_policy, _choices(*POLICIES), "who goes first")
    target_itl_ms: float | None = _setting(
        _ENGINE.target_itl_ms,
        "MS",
        "gap between two tokens that steps are kept within, by taking less of prompts into them",
        unset="none; long prompts alone are held back",
    )
    target_ttft_ms: float | None = _setting(
        _ENGINE.target_ttft_ms, "MS", "wait for the first token that long prompts are hurried to keep", unset="none"
    )
    enable_prefix_caching: bool = _setting(
        _ENGINE.enable_prefix_caching, "", "reuse the KV blocks of shared prompt prefixes"
    )
    prefix_cache_eviction: str = _setting(
        _ENGINE.prefix_cache_eviction,
        _choices(*EVICTION_POLICIES),
        "which cached blocks go first when room is needed",
    )
    pinned_prefix_share: float = _setting(
        _ENGINE.pinned_prefix_share,
        "SHARE",
        "share of the KV pool, and of what is behind it, that prefixes which requests ask to retain may keep",
    )
    pinned_prefixes: Path | None = _setting(
        None,
        "FILE",
        "JSON lines of messages, or a prompt, each: computed at the start, and cached for good",
        unset="none",
    )
    async_scheduling: bool | None = _setting(
        _ENGINE.async_scheduling, "", "plan the next step while this one runs", unset="chosen for the device"
    )
    speculative_config: Json = _setting(
        _ENGINE.speculative_config,
        "JSON",
        'draft tokens ahead, as {"method": "ngram"} from the text so far, or {"model": PATH} by a smaller model',
        unset="off",
    )
    enforce_eager: bool = _setting(
        _ENGINE.enforce_eager, "", "on CUDA, launch decode steps kernel by kernel, without graphs"
    )
    max_num_queued_reqs: int | None = _setting(
        _ENGINE.max_num_queued_reqs, "N", "requests that may wait; more are refused with 429", unset="1024"
    )
    max_num_queued_tokens: int | None = _setting(
        _ENGINE.max_num_queued_tokens,
        "N",
        "prompt tokens that may wait; more are refused with 429",
        unset="8 times the KV pool",
    )


class AdapterSettings(BaseModel):
    """LoRA adapters"""

    lora_modules: LoraModules = _setting(
        _ENGINE.lora_modules,
        "NAME=PATH",
        "adapters, folders that PEFT has saved; requests name one as their model",
        unset="none",
    )
    max_loras: int | None = _setting(
        _ENGINE.max_loras,
        "N",
        "most adapters held at once",
        unset=f"those of --lora-modules; {DEFAULT_MAX_LORAS} if others may be loaded",
    )
    max_lora_rank: int = _setting(_ENGINE.max_lora_rank, "N", "highest rank that an adapter may have")
    allow_runtime_lora_updating: bool = _setting(
        _ENGINE.allow_runtime_lora_updating,
        "",
        "let clients load and unload adapters; they name paths of this machine, so set --api-key too",
    )


class HandoffSettings(BaseModel):
    """Prefill and decode apart"""

    role: Literal["both", "prefill", "decode"] = _setting(
        _APP.role,
        _choices("both", "prefill", "decode"),
        "prefill also computes prompts for decode daemons, which take over their K/V",
    )
    prefill_url: str | None = _setting(
        None, "URL", "of a decode daemon's prefill daemon, which has the same --api-key", unset="none"
    )
    prefill_timeout: float = _setting(
        _APP.prefill_timeout_s, "SECONDS", "a prompt that is not handed over in this time is computed here", gt=0
    )
    kv_connector_dir: Path | None = _setting(
        None,
        "DIR",
        "folder in shared memory through which the two hand K/V over",
        unset="one of the user's own under /dev/shm",
    )
    kv_connector_gib: float = _setting(
        _APP.kv_connector_bytes / (1 << 30), "GIB", "what K/V on its way may take there", gt=0
    )


class HttpSettings(BaseModel):
    """HTTP"""

    host: str = _setting("127.0.0.1", "ADDR", "address to bind; 0.0.0.0 opens the daemon to the network")
    port: int = _setting(8000, "PORT", "port to bind; 0 takes a free one", ge=0, le=65535)
    max_body_bytes: ByteSize = _setting(_APP.max_body_bytes, "SIZE", "largest request body, such as 32MiB", ge=1)
    max_json_values: int = _setting(
        _APP.max_json_values,
        "N",
        "most JSON values in a request body, by the memory they take: a string counts as 4, a list or an object as 32",
        ge=1,
    )
    max_logprobs: int = _setting(_APP.max_logprobs, "N", "most logprobs a request may ask for", ge=0)
    max_stored_responses: int = _setting(
        _APP.max_stored_responses, "N", "answers of /v1/responses that are kept to be continued; 0 keeps none", ge=0
    )
    page: bool = _setting(_APP.page, "", "serve the playground and the live view of the engine at /")
    strict_fields: bool = _setting(
        _APP.strict_fields, "", "refuse requests with unknown fields, or hints that cannot be followed"
    )
    metrics_compat: Literal["none", "vllm"] = _setting(
        "none", _choices("none", "vllm"), "also export metrics under another server's names"
    )
    sse_keep_alive_interval: float = _setting(
        _APP.sse_keep_alive_interval_s,
        "SECONDS",
        "a silent stream sends a comment this often, and its place in the queue; 0 is never",
        ge=0,
    )
    stall_limit: float = _setting(
        _APP.stall_limit_s, "SECONDS", "/health turns red when there is work but no step for this long", gt=0
    )
    shutdown_timeout: float = _setting(
        _APP.shutdown_timeout_s, "SECONDS", "time for open requests to finish after SIGTERM", ge=0
    )


class BatchSettings(BaseModel):
    """Files and batches"""

    data_dir: Path | None = _setting(
        None, "DIR", "folder to keep uploaded files and batches in, so that they survive a restart", unset="no batches"
    )
    max_file_bytes: ByteSize = _setting(
        _APP.max_file_bytes, "SIZE", "largest upload to /v1/files, such as 200MiB", ge=1
    )


class SecuritySettings(BaseModel):
    """Security"""

    api_key: Secrets = _setting(
        (), "KEY", "keys that clients must present; set the variable, a flag shows in ps", unset="open to all"
    )
    tenants: Path | None = _setting(
        None,
        "FILE",
        "YAML file of tenants: their keys, tiers, weights and limits; read again on SIGHUP",
        unset="all keys are equal",
    )
    share_prefix_cache: bool = _setting(
        _APP.share_prefix_cache,
        "",
        "tenants share cached prompts, and can tell from times and usage which others have sent; off, only those of "
        "--pinned-prefixes",
    )
    allowed_hosts: Hosts = _setting(
        (),
        "NAME",
        "host names to answer to without a key, beside IP addresses and localhost; *.example.com and * are patterns",
        unset="none; with a key, any name",
    )
    allowed_origins: Origins = _setting(
        (), "ORIGIN", "origins whose pages may call from a browser (CORS); * is any", unset="none"
    )
    protect_metrics: bool = _setting(_APP.protect_metrics, "", "ask for a key on /metrics and /version, too")


class LoggingSettings(BaseModel):
    """Logging and configuration"""

    log_level: LogLevel = _setting(LogLevel.INFO, _choices(*LogLevel), "least severe line to write")
    log_format: LogFormat = _setting(LogFormat.TEXT, _choices(*LogFormat), "how a line is written")
    record: str | None = _setting(
        _ENGINE.record,
        "FILE",
        "write what the scheduler sees, without texts and keys, for `quire simulate replay FILE`; ends at 256 MiB",
        unset="none",
    )
    record_contents: str = _setting(
        _ENGINE.record_contents,
        _choices(*RECORD_CONTENTS),
        "of prompts and answers: their lengths and which begin alike, or their token ids",
    )
    config: Path | None = _setting(None, "FILE", "YAML file of these settings, keys spelled as the flags", unset="none")
