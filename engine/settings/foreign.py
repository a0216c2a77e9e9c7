"""Flags of vLLM, llama-server, SGLang and TGI, and their meaning here: one table.

A row says one of three things: the flag has no effect, which the start reports once; it is another name of a setting, and its
values are translated; or it is refused, with the reason and the remedy. A flag that differs in speed or memory only has no
effect. A flag that would change an answer is translated or refused, so that no meaning changes silently.

`split` takes the rows' flags off a command line and `translate` turns them into settings. `known_value` translates values that
other servers spell differently in settings of the same name. The table's page is docs/reference/foreign-flags.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from engine.core.errors import ConfigError
from engine.settings.setting import to_flag


class Takes(Enum):
    """The number of values behind a flag."""

    SWITCH = "no value; --no-FLAG is its opposite"
    MAYBE = "on, off, auto, or no value"
    ONE = "one value"
    MANY = "one or more values"


@dataclass(frozen=True, slots=True)
class NoEffect:
    """The flag changes nothing; with `only`, that holds for these values, and others are refused."""

    why: str
    only: tuple[str, ...] = ()
    otherwise: str = ""


@dataclass(frozen=True, slots=True)
class Alias:
    """The flag is another name of a setting, or of a key of a JSON setting."""

    setting: str
    key: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)  # translated; others are passed on
    convert: Callable[[Any], Any] | None = None  # of a value that is not in `values`
    note: str = ""
    wins: bool = False  # over the setting's own flag, which other servers give another meaning


@dataclass(frozen=True, slots=True)
class Refusal:
    """The flag is refused."""

    why: str


Meaning: TypeAlias = NoEffect | Alias | Refusal


class Foreign(NamedTuple):
    """One row."""

    flags: tuple[str, ...]
    meaning: Meaning
    takes: Takes = Takes.ONE

    @property
    def name(self) -> str:
        """Return the flag that names the row: the first long one."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])


class Given(NamedTuple):
    """A foreign flag of a command line or a file: its row, its spelling and value. A switch's value is True or False."""

    row: Foreign
    flag: str
    value: Any

    @property
    def text(self) -> str:
        """Return the flag as a sentence shows it."""
        if isinstance(self.value, bool):
            return self.flag
        words = self.value if isinstance(self.value, list) else [self.value]
        return " ".join(
            [self.flag, *(f"{word:.60}" if isinstance(word, str) else json.dumps(word, default=str) for word in words)]
        )


class Translated(NamedTuple):
    """The settings that foreign flags stand for, the flag behind each, and a remark for each one without effect.

    `faults` are the sentences of those that are refused: `refuse` raises all of them together.
    """

    values: dict[str, Any]
    flags: dict[str, Given]
    remarks: list[str]
    faults: list[str]


def _row(flags: str, meaning: Meaning, takes: Takes = Takes.ONE) -> Foreign:
    return Foreign(tuple(flags.split()), meaning, takes)


def _switch(flags: str, meaning: Meaning) -> Foreign:
    return _row(flags, meaning, Takes.SWITCH)


_ONE_DEVICE = "one daemon runs one model on one machine"
_PARALLEL = (
    "a model is divided among the GPUs of one machine alone; leave it out, set --tensor-parallel-size, or run a daemon per "
    "machine behind a router"
)
_TUNED = "Quire decides this for the device"
_NO_IMAGES = "prompts are text"
_ASK = "send it with each request"
_ROPE = 'write --hf-overrides with the keys of config.json, such as \'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}\''
_LOGPROBS = "logprobs are those of the model"


def _pooler(value: Any) -> str:
    """Return --pooling for vLLM's --pooler-config."""
    given = _object(value)
    extra = given.keys() - {"pooling_type", "seq_pooling_type", "normalize", "use_activation"}
    if extra or given.get("normalize", True) is not True or given.get("use_activation", True) is not True:
        raise ValueError('vectors are of length one, and only {"pooling_type": "LAST"} or "MEAN" can be chosen')
    return str(given.get("pooling_type", given.get("seq_pooling_type", "last"))).lower()


def _object(value: Any) -> Mapping[str, Any]:
    given = json.loads(value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ValueError("it must be a JSON object")
    return given


def _device_of_layers(value: Any) -> str:
    """Return --device for llama-server's -ngl: without layers on the GPU the model runs on the CPU."""
    return "cpu" if str(value) == "0" else "auto"


def _context(value: Any) -> Any:
    return "auto" if str(value) == "0" else value


def _thinking(value: Any) -> Any:
    raise ValueError(
        f"{value!r} cannot be set for all requests; send thinking_token_budget or reasoning_effort with them"
    )


def _rope(value: Any) -> Mapping[str, Any]:
    """Return vLLM's --rope-scaling; llama-server's and TGI's are the name of a kind."""
    if isinstance(value, str) and value in ("none", "linear", "dynamic", "yarn"):
        raise ValueError(_ROPE)
    return _object(value)


def _names(value: Any) -> list[str]:
    return [name.strip() for name in str(value).split(",") if name.strip()]


_PERFORMANCE = NoEffect(_TUNED)

VLLM = (
    # -- model
    _row("--model", Alias("model")),
    _row("-q", Alias("quantization")),
    _row("--tokenizer-mode", NoEffect("tokenizers are Hugging Face's fast ones", ("auto", "hf", "fast"), "only the fast tokenizers of Hugging Face are served; name a repository that has tokenizer.json with --tokenizer")),
    _row("--config-format", NoEffect("the format is read off the files", ("auto", "hf"), "only Hugging Face's config.json is read; serve a repository that has one")),
    _switch("--trust-remote-code", NoEffect("code of a model repository is never run; a model that needs it is refused")),
    _row("--runner", NoEffect("answers, vectors and scores are served together", ("auto", "generate", "pooling"), "models that draft are named in --speculative-config; leave it out")),
    _row("--task", NoEffect("answers, vectors and scores are served together", ("auto", "generate", "embed", "embedding", "score"), "classifiers, reward models and speech are not served; name a language model and leave it out")),
    _row("--convert", NoEffect("vectors are served by /v1/embeddings", ("auto", "none", "embed"), "classifiers and reward models are not served; leave it out")),
    _row("--pooler-config --override-pooler-config", Alias("pooling", convert=_pooler, note="`pooling_type` LAST or MEAN")),
    _row("--limit-mm-per-prompt", NoEffect(f"{_NO_IMAGES}, as with a limit of 0")),
    _row("--mm-processor-kwargs --media-io-kwargs --mm-encoder-tp-mode --mm-encoder-attn-backend --mm-shm-cache-max-object-size-mb --video-pruning-rate --default-mm-loras --mm-processor-cache-gb --mm-processor-cache-type", NoEffect(_NO_IMAGES)),
    _switch("--disable-mm-preprocessor-cache --skip-mm-profiling --language-model-only --enable-mm-embeds --interleave-mm-strings", NoEffect(_NO_IMAGES)),
    _row("--model-loader-extra-config", NoEffect(_TUNED)),
    _row("--max-parallel-loading-workers --safetensors-load-strategy --ignore-patterns", NoEffect("weights are read as the machine does it fastest")),
    _row("--rope-scaling", Alias("hf_overrides", "rope_scaling", convert=_rope)),
    _row("--rope-theta", Alias("hf_overrides", "rope_theta", convert=float)),
    _row("--hf-config-path", Refusal("config.json is read beside the weights; change keys of it with --hf-overrides")),
    _row("--logits-processor-pattern --logits-processors", Refusal("code named by a flag is not run; use logit_bias, bad_words or structured_outputs in requests")),
    _switch("--disable-sliding-window", Refusal("layers attend as the model was trained; bound the length with --max-model-len")),
    _switch("--skip-tokenizer-init", Refusal("text is encoded and decoded here; send token ids as the prompt where you have them")),
    _switch("--enable-prompt-embeds", Refusal("prompts are text or token ids")),
    _row("--code-revision", NoEffect("code of a model repository is never run")),
    _row("--override-attention-dtype", _PERFORMANCE),
    _row("--pt-load-map-location --tokenizer-pool-size --renderer-num-workers", _PERFORMANCE),
    _row("--io-processor-plugin --override-neuron-config", Refusal("code named by a flag is not run, and CPUs and CUDA are served; leave it out")),
    _row("--quantization-config", Refusal("the checkpoint has its settings; --quantization int8 or fp8 quantises others as they are loaded")),
    _row("--qlora-adapter-name-or-path", Refusal("write --lora-modules NAME=FOLDER with an adapter that PEFT saved")),
    _switch("--enable-prompt-adapter", Refusal("prompt adapters are not served; --lora-modules names LoRA adapters")),
    _switch("--use-tqdm-on-load", NoEffect("a terminal shows progress bars")),
    _switch("--calculate-kv-scales", NoEffect("scales of 8-bit K/V are computed from the values")),
    # -- devices
    _row("--pipeline-parallel-size -pp", NoEffect(_ONE_DEVICE, ("1",), _PARALLEL)),
    _row("--data-parallel-size -dp", NoEffect(_ONE_DEVICE, ("1",), _PARALLEL)),
    _row("--decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp --data-parallel-size-local -dpl --nnodes -n-nodes", NoEffect(_ONE_DEVICE, ("1",), _PARALLEL)),
    _row("--data-parallel-rank --data-parallel-start-rank --node-rank", NoEffect(_ONE_DEVICE, ("0",), _PARALLEL)),
    _row("--data-parallel-address --data-parallel-rpc-port --data-parallel-backend --master-addr --master-port", NoEffect(_ONE_DEVICE)),
    _row("--distributed-executor-backend", NoEffect(f"{_ONE_DEVICE}, in one process", ("mp", "uni", "ray", "external_launcher"), _PARALLEL)),
    _switch("--enable-expert-parallel", NoEffect("all experts are on the one device, as with vLLM on one GPU")),
    _switch("--enable-eplb --enable-dbo --disable-custom-all-reduce --ray-workers-use-nsight --disable-nccl-for-dp-synchronization", NoEffect(_ONE_DEVICE)),
    _switch("--data-parallel-hybrid-lb --data-parallel-external-lb --enable-multimodal-encoder-data-parallel --numa-bind", NoEffect(_ONE_DEVICE)),
    _row("--eplb-config --num-redundant-experts --expert-placement-strategy --all2all-backend --dbo-decode-token-threshold --dcp-kv-cache-interleave-size --cpu-distributed-timeout-seconds", NoEffect(_ONE_DEVICE)),
    _switch("--headless", Refusal("one process serves and computes; leave it out")),
    _row("--api-server-count -asc", NoEffect("one process serves HTTP")),
    _switch("--disable-frontend-multiprocessing", NoEffect("one process serves HTTP")),
    _row("--cpu-offload-gb", NoEffect("weights stay on the device", ("0", "0.0"), "weights are not split between GPU and CPU; serve a quantised model, or run on the CPU with --device cpu")),
    _row("--compilation-config -cc", _PERFORMANCE),
    _row("-O --optimization-level", _PERFORMANCE),
    _row("--cudagraph-capture-sizes --cuda-graph-sizes", NoEffect("CUDA graphs are captured for the sizes that steps have"), Takes.MANY),
    _row("--max-cudagraph-capture-size --max-seq-len-to-capture", NoEffect("CUDA graphs are captured for the sizes that steps have")),
    _switch("--disable-cascade-attn --enable-flashinfer-autotune", _PERFORMANCE),
    _row("--kernel-config --attention-config -ac --performance-mode --stream-interval", _PERFORMANCE),
    _row("--moe-backend --linear-backend --gdn-prefill-backend --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --watermark", _PERFORMANCE),
    _switch("--kv-sharing-fast-prefill --disable-async-output-proc --aggregate-engine-logging", _PERFORMANCE),
    _row("--num-lookahead-slots --num-scheduler-steps --preemption-mode", _PERFORMANCE),
    _switch("--use-v2-block-manager --multi-step-stream-outputs", NoEffect("K/V is always paged in blocks")),
    _row("--prefix-caching-hash-algo", NoEffect("blocks of the prefix cache are compared by BLAKE2b of their tokens")),
    # -- scheduling
    _switch("--enable-chunked-prefill", NoEffect("long prompts are always computed in pieces")),
    _row("--long-prefill-token-threshold --max-num-partial-prefills --max-long-partial-prefills", _PERFORMANCE),
    _row("--worker-cls", NoEffect("the worker is chosen for the device", ("auto",), "code named by a flag is not run; leave it out")),
    _row("--speculative-model --spec-model", Alias("speculative_config", "model")),
    _row("--num-speculative-tokens --spec-tokens", Alias("speculative_config", "num_speculative_tokens", convert=int)),
    _row("--scheduler-cls --worker-extension-cls", Refusal("code named by a flag is not run; --scheduling-policy chooses the order")),
    _switch("--disable-hybrid-kv-cache-manager --disable-chunked-mm-input", _PERFORMANCE),
    _row("--kv-cache-metrics-sample --kv-offloading-backend", _PERFORMANCE),
    _row("--kv-offloading-size", Alias("kv_offload_config", "host_gib", convert=float)),
    _row("--ec-transfer-config", Refusal("K/V is exchanged as --kv-transfer-config and --kv-offload-config say; leave it out")),
    _switch("--enable-sleep-mode", Refusal("the weights stay on the device; stop the daemon to free it, a start takes seconds")),
    # -- LoRA
    _switch("--enable-lora", NoEffect("adapters are on with --lora-modules or --allow-runtime-lora-updating")),
    _row("--max-cpu-loras", Alias("max_loras", note="adapters held; each may be in every batch", wins=True)),
    _row("--lora-extra-vocab-size --lora-dtype", NoEffect("adapters have the model's format")),
    _switch("--fully-sharded-loras --enable-lora-bias --specialize-active-lora", NoEffect("adapters are on one device")),
    _row("--long-lora-scaling-factors", Refusal("adapters keep the model's positions; leave it out")),
    # -- answers
    _switch("--enable-auto-tool-choice", NoEffect("calls are read off every answer to a request with tools")),
    _switch("--exclude-tools-when-tool-choice-none", NoEffect("a prompt never describes tools that may not be called")),
    _row("--tool-parser-plugin --reasoning-parser-plugin", Refusal("code named by a flag is not run; choose a format with --tool-call-parser or --reasoning-parser")),
    _row("--tool-server", Refusal("tools run in the client; leave it out")),
    _switch("--enable-reasoning", NoEffect("reasoning is read off the answers of models that reason")),
    _row("--reasoning-config", Refusal("a budget comes with each request, as thinking_token_budget")),
    _row("--guided-decoding-backend", NoEffect("one backend serves all grammars and schemas")),
    _row("--structured-outputs-config", NoEffect("one backend serves all grammars and schemas")),
    _switch("--guided-decoding-disable-fallback", NoEffect("one backend serves all grammars and schemas")),
    _switch("--guided-decoding-disable-additional-properties --guided-decoding-disable-any-whitespace", Refusal("the schema of a request decides; leave it out")),
    _row("--chat-template-content-format", NoEffect("the template gets the form of messages that it reads", ("auto", "string"), "text is passed to the template as a string; leave it out")),
    _switch("--trust-request-chat-template", Refusal("a request cannot bring a template; set it with --chat-template")),
    _row("--response-role", NoEffect("answers have the role assistant", ("assistant",), "answers have the role assistant; leave it out")),
    _row("--logprobs-mode", NoEffect(_LOGPROBS, ("raw_logprobs",), f"{_LOGPROBS}, before temperature and masks; leave it out")),
    _switch("--enable-prompt-tokens-details", NoEffect("usage always has prompt_tokens_details")),
    _switch("--enable-tokenizer-info-endpoint", NoEffect("/tokenizer_info is always served")),
    _switch("--enable-per-request-metrics", NoEffect("answers have the header Server-Timing, and metrics with include_metrics")),
    _row("--fingerprint-mode --fingerprint-value", NoEffect("system_fingerprint names the version")),
    _switch("--tokens-only", Refusal("all routes are served; close others in a proxy")),
    _row("--additional-config --weight-transfer-config --profiler-config", NoEffect("no plugin of a platform is used", ("{}",), "it configures parts of vLLM that Quire does not have; leave it out")),
    _row("--max-waiting-queue", Alias("max_num_queued_reqs")),
    _switch("--enable-request-id-headers", NoEffect("answers always have x-request-id")),
    _switch("--enable-server-load-tracking", NoEffect("/load is always served")),
    # -- HTTP
    _row("--uds", Refusal("the daemon listens on a port; use --host and --port")),
    _row("--middleware", Refusal("code named by a flag is not run; put a proxy before the daemon"), Takes.MANY),
    _row("--allowed-methods --allowed-headers", NoEffect("origins of --allowed-origins may send all", ('["*"]', "*"), "origins of --allowed-origins may send all methods and headers; leave it out"), Takes.MANY),
    _switch("--allow-credentials", Refusal("pages send a key, not cookies; leave it out")),
    _switch("--enable-ssl-refresh", NoEffect("the certificate is read again on SIGHUP")),
    _row("--ssl-ciphers", Refusal("Python's ciphers are used; put a proxy before the daemon to choose others")),
    _row("--h11-max-incomplete-event-size --h11-max-header-count", NoEffect("headers are bounded to 64 KiB")),
    _row("--allowed-local-media-path --allowed-media-domains", NoEffect("no files and addresses of requests are read")),
    # -- logs and metrics
    _switch("--disable-log-requests", Alias("enable_log_requests", values={"True": False, "False": True})),
    _switch("--disable-uvicorn-access-log", Alias("enable_log_requests", values={"True": False, "False": True}, note="one line a request is both logs")),
    _row("--disable-access-log-for-endpoints", NoEffect("probes and scrapes are logged at --log-level debug only")),
    _row("--max-log-len", NoEffect("prompts and answers are never logged")),
    _switch("--enable-log-outputs", Refusal("prompts and answers are never logged; log them in the client or a proxy")),
    _switch("--enable-log-deltas --log-error-stack", NoEffect("tracebacks are logged at --log-level debug")),
    _switch("--disable-log-stats", NoEffect("statistics are in /metrics, and are not logged")),
    _switch("--disable-fastapi-docs", Alias("openapi", values={"True": False, "False": True})),
    _switch("--enable-offline-docs", NoEffect("/openapi.json needs no other host")),
    _row("--log-config-file", Refusal("choose --log-level and --log-format; lines go to standard error")),
    _row("--collect-detailed-traces --show-hidden-metrics-for-version", NoEffect("all metrics are shown")),
    _switch("--kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics --enable-layerwise-nvtx-tracing --enable-logging-iteration-details", NoEffect("/metrics has Quire's own")),
)  # fmt: skip

_SAMPLER = "this sampler is not served; temperature, top_p, top_k, min_p and the penalties are"
_LEVELS = {"0": "error", "1": "error", "2": "warning", "3": "info", "4": "debug", "5": "debug"}
_KV_TYPES = {"f16": "auto", "bf16": "auto", "f32": "auto", "q8_0": "int8"}
_REST = {"-1": None}


def _sampling(key: str, kind: Callable[[Any], Any] = float) -> Alias:
    return Alias("override_generation_config", key, _REST if kind is int else {}, kind)


LLAMA_SERVER = (
    # -- model
    _row("-m -hf -hfr --hf-repo", Alias("model")),
    _row("-hft", Alias("hf_token")),
    _row("-hff --hf-file", Refusal("name the file by its tag, such as -hf org/repository:Q4_K_M")),
    _row("-mu --model-url -dr --docker-repo", Refusal("download the file and name its path, or name a repository with -hf")),
    _row("-a --alias", Alias("served_model_name", convert=_names)),
    _row("--tags", NoEffect("clients choose a model by its name")),
    _row("-c --ctx-size", Alias("max_model_len", convert=_context, note="per request: with -np N, the N-th part; 0 is the model's")),
    _row("--kv-unified-per-slot", Alias("max_model_len")),
    _row("-fitc --fit-ctx -fit --fit -fitt --fit-target", NoEffect("the KV pool is fitted to the memory")),
    _row("--override-kv", Refusal("metadata is read as it is; change keys of the config with --hf-overrides")),
    _row("--rope-scale --rope-freq-base --rope-freq-scale", Refusal(_ROPE)),
    _row("--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast", Refusal(_ROPE)),
    _row("-mm --mmproj -mmu --mmproj-url", Refusal("images are not served; leave it out to serve the text model")),
    _switch("--mmproj-auto --no-mmproj-auto --no-mmproj", NoEffect(_NO_IMAGES)),
    _switch("--mmproj-offload --no-mmproj-offload", NoEffect(_NO_IMAGES)),
    _row("--lora --lora-scaled --control-vector --control-vector-scaled", Refusal("write --lora-modules NAME=FOLDER with an adapter that PEFT saved")),
    _row("-md --model-draft --spec-draft-model", Alias("speculative_config", "model")),
    _row("--draft --draft-n --draft-max --spec-draft-n-max", Alias("speculative_config", "num_speculative_tokens", convert=int)),
    _row("--draft-min --draft-n-min --draft-p-min --spec-draft-n-min --spec-draft-p-min -ngld --gpu-layers-draft -devd --device-draft", _PERFORMANCE),
    _row("--spec-type", Refusal("write --speculative-config '{\"method\": \"ngram\"}' or name a draft with -md")),
    _row("--models-dir --models-preset --models-max", Refusal("one daemon serves one model; start one for each, behind a router")),
    _switch("--check-tensors", NoEffect("numbers that are not finite are refused at the start")),
    _switch("--offline", Refusal("set the variable HF_HUB_OFFLINE=1, as other Hugging Face programs read it")),
    # -- device and memory
    _row("-ngl --gpu-layers --n-gpu-layers", Alias("device", convert=_device_of_layers, note="0 is the CPU; else the whole model is on the GPU, if there is one")),
    _row("-t", Alias("num_threads", values={"-1": None})),
    _row("-tb --threads-batch", NoEffect("the threads of --num-threads compute prompts, too")),
    _row("--threads-http -to --timeout", NoEffect("one event loop serves all connections, as long as they are open")),
    _row("-np --parallel", Alias("max_num_seqs", values={"-1": None})),
    _row("-b --batch-size -ub --ubatch-size", NoEffect("the size of a step is chosen for the device; --max-num-batched-tokens sets it")),
    _row("-fa --flash-attn", NoEffect("attention is always computed without its matrix of weights"), Takes.MAYBE),
    _row("-ctk --cache-type-k -ctv --cache-type-v", Alias("kv_cache_dtype", values=_KV_TYPES, note="K and V have one format; f16, bf16 and f32 are the model's, q8_0 is int8")),
    _row("-sm --split-mode -ts --tensor-split", NoEffect(_ONE_DEVICE)),
    _row("-mg --main-gpu", NoEffect("the first GPU that is visible is used", ("0",), "choose the GPU with the variable CUDA_VISIBLE_DEVICES")),
    _row("-ot --override-tensor -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn", Refusal("weights are not split between GPU and CPU; serve a smaller quantisation, or run on the CPU with --device cpu")),
    _switch("-cmoe --cpu-moe", Refusal("weights are not split between GPU and CPU; serve a smaller quantisation, or run on the CPU with --device cpu")),
    _switch("--mlock --mmap --no-mmap -dio --direct-io --no-host --repack -nr --no-repack --op-offload --no-op-offload", NoEffect("weights are read as the machine does it fastest")),
    _row("-lm --load-mode -lzm --lazy-mode", NoEffect("weights are read as the machine does it fastest")),
    _switch("-kvo --kv-offload -nkvo --no-kv-offload -kvu --kv-unified -no-kvu --no-kv-unified --swa-full", NoEffect("all requests share one paged KV pool on the device")),
    _row("-dt --defrag-thold -ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step -cram --cache-ram", NoEffect("all requests share one paged KV pool on the device")),
    _row("--numa --prio --poll --prio-batch --poll-batch -C --cpu-mask -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch", NoEffect("the system schedules the threads; taskset and numactl work")),
    _switch("-cb --cont-batching -nocb --no-cont-batching", NoEffect("batching is always continuous")),
    _switch("--cache-prompt", Alias("enable_prefix_caching")),
    _row("--cache-reuse", NoEffect("prompts are cached from their beginning")),
    _switch("--cache-idle-slots --no-cache-idle-slots --warmup --no-warmup --perf --no-perf -e --escape --no-escape", _PERFORMANCE),
    _switch("--context-shift", Refusal("an answer ends at the model's context; raise -c, or shorten the conversation in the client")),
    _row("--slot-save-path", Refusal("cached prompts survive a restart with --kv-offload-config")),
    _row("--rpc", Refusal(_PARALLEL)),
    # -- answers
    _switch("--jinja", NoEffect("the model's Jinja template is always used", ("true",), "the model's Jinja template is always used; name another with --chat-template")),
    _row("--chat-template-file", Alias("chat_template")),
    _row("--chat-template-kwargs", Alias("default_chat_template_kwargs")),
    _row("--reasoning-format", Alias("reasoning_parser", values={"deepseek": "auto"})),
    _row("-rea --reasoning", Alias("default_chat_template_kwargs", "enable_thinking", {"on": True, "off": False, "auto": None}, _thinking, note="by the variable that templates have for it")),
    _row("--reasoning-budget", Alias("default_chat_template_kwargs", "enable_thinking", {"-1": None, "0": False}, _thinking, note="-1 or 0, by the variable that templates have for it; a request sets others as thinking_token_budget")),
    _row("--reasoning-effort", NoEffect("the template's default holds", ("default",), "send reasoning_effort with each request")),
    _row("--temp --temperature", _sampling("temperature")),
    _row("--top-k", _sampling("top_k", int)),
    _row("--top-p", _sampling("top_p")),
    _row("--min-p", _sampling("min_p")),
    _row("--repeat-penalty", _sampling("repetition_penalty")),
    _row("-n --predict --n-predict", _sampling("max_tokens", int)),
    _row("--presence-penalty --frequency-penalty -l --logit-bias", Refusal(_ASK)),
    _row("-s", Refusal("a request names its seed; others are drawn at random")),
    _row("--grammar --grammar-file -j --json-schema -jf --json-schema-file", Refusal(f"{_ASK}, as structured_outputs or response_format")),
    _row("--samplers --sampler-seq --sampling-seq --top-nsigma --top-n-sigma --typical --typical-p --repeat-last-n --mirostat --mirostat-lr --mirostat-ent", Refusal(_SAMPLER)),
    _row("--xtc-probability --xtc-threshold --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --dynatemp-range --dynatemp-exp --adaptive-target --adaptive-decay", Refusal(_SAMPLER)),
    _switch("--ignore-eos -sp --special", Refusal(f"{_ASK}, as ignore_eos or skip_special_tokens")),
    _switch("--embedding --embeddings", NoEffect("vectors are served by /v1/embeddings, beside answers")),
    _switch("--rerank --reranking", Refusal("rerank models are not served; compare vectors of /v1/embeddings")),
    _row("--embd-normalize", NoEffect("vectors are of length one", ("2",), "vectors are of length one; scale them in the client")),
    # -- HTTP and logs
    _row("--api-prefix", Alias("root_path")),
    _row("--api-key-file", Refusal("set the variable QUIRE_API_KEY to the keys, separated by commas, or use --tenants")),
    _row("--ssl-key-file", Alias("ssl_keyfile")),
    _row("--ssl-cert-file", Alias("ssl_certfile")),
    _row("--cors-origins", Alias("allowed_origins", convert=_names)),
    _row("--cors-methods --cors-headers", NoEffect("origins of --allowed-origins may send all")),
    _row("--sse-ping-interval", Alias("sse_keep_alive_interval", values={"-1": 0})),
    _switch("--ui --webui", Alias("page")),
    _switch("--metrics", NoEffect("/metrics is always served")),
    _switch("--slots --no-slots", NoEffect("the page at / shows running requests")),
    _switch("--props", NoEffect("POST /props is not served: settings do not change while the daemon runs")),
    _row("--path --media-path --tools --tools-runtime --mcp-servers-config --mcp-servers-json", Refusal("files and tools of this machine are not offered to clients")),
    _switch("-ag --agent --ui-mcp-proxy --webui-mcp-proxy", Refusal("files and tools of this machine are not offered to clients")),
    _switch("--log-disable", Alias("log_level", values={"True": "error", "False": "info"})),
    _switch("-v --verbose --log-verbose", Alias("log_level", values={"True": "debug", "False": "info"})),
    _row("-lv --verbosity --log-verbosity", Alias("log_level", values=_LEVELS)),
    _switch("--log-jsonl", Alias("log_format", values={"True": "json", "False": "text"})),
    _row("--log-file", Refusal("lines go to standard error; redirect it")),
    _row("--log-colors", NoEffect("lines have no colours"), Takes.MAYBE),
    _switch("--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps", NoEffect("a line has its time and level")),
)  # fmt: skip

_POOL = "the KV pool is fitted to the memory; --kv-cache-memory-bytes sets its size"
_ORDER = "another order of requests with equal rights; --scheduling-policy chooses among Quire's"
_FITTED = "steps are bounded by --max-num-batched-tokens and the memory"
_BOUNDED = "requests are bounded by the model's context and --max-body-bytes"

SGLANG = (
    _row("--model-path", Alias("model")),
    _row("--tokenizer-path", Alias("tokenizer")),
    _row("--context-length", Alias("max_model_len")),
    _row("--json-model-override-args", Alias("hf_overrides")),
    _row("--preferred-sampling-params", Alias("override_generation_config")),
    _row("--sampling-defaults", Alias("generation_config", values={"model": "auto", "openai": "vllm"})),
    _switch("--is-embedding", NoEffect("vectors are served by /v1/embeddings, beside answers")),
    _row("--random-seed", Alias("seed")),
    _row("--tokenizer-worker-num --detokenizer-worker-num", NoEffect("one process serves HTTP")),
    _row("--hf-chat-template-name --completion-template", Refusal("name the file of a template with --chat-template")),
    _row("--weight-version --model-checksum", NoEffect("files of a hub are checked as they arrive, and /v1/models names the model")),
    _row("--tp --tp-size", Alias("tensor_parallel_size")),
    _row("--dp --dp-size --pp-size --ep --ep-size --expert-parallel-size --attn-cp-size --moe-dp-size", NoEffect(_ONE_DEVICE, ("1",), _PARALLEL)),
    _row("--dist-init-addr --nccl-init-addr --nccl-port --dist-timeout --load-balance-method --gpu-id-step", NoEffect(_ONE_DEVICE)),
    _row("--base-gpu-id", NoEffect("the first GPU that is visible is used", ("0",), "choose the GPU with the variable CUDA_VISIBLE_DEVICES")),
    _switch("--enable-dp-attention --enable-p2p-check --disable-mla --enable-two-batch-overlap --enable-mscclpp", NoEffect(_ONE_DEVICE)),
    _row("--mem-fraction-static", Alias("gpu_memory_utilization")),
    _row("--max-running-requests", Alias("max_num_seqs")),
    _row("--max-queued-requests", Alias("max_num_queued_reqs")),
    _row("--chunked-prefill-size", Alias("max_num_batched_tokens", values={"-1": None}, note="prompts are computed in pieces beside decodes; -1 is the default")),
    _row("--max-prefill-tokens --prefill-max-requests --schedule-conservativeness --num-continuous-decode-steps", NoEffect(_FITTED)),
    _row("--schedule-policy", NoEffect(_ORDER, ("fcfs", "lpm", "dfs-weight", "random", "lof"), "write --scheduling-policy fcfs, sjf, priority or fair")),
    _switch("--enable-priority-scheduling", Refusal("here lower numbers go first; write --scheduling-policy priority, and turn the sign of the requests' priority")),
    _switch("--schedule-low-priority-values-first", Alias("scheduling_policy", values={"True": "priority", "False": None})),
    _row("--priority-scheduling-preemption-threshold --page-size --swa-full-tokens-ratio", _PERFORMANCE),
    _switch("--enable-mixed-chunk --enable-dynamic-chunking --disable-chunked-prefix-cache --disable-hybrid-swa-memory --sleep-on-idle", _PERFORMANCE),
    _switch("--disable-radix-cache", Alias("enable_prefix_caching", values={"True": False, "False": True})),
    _row("--radix-eviction-policy", Alias("prefix_cache_eviction")),
    _switch("--disable-overlap-schedule", Alias("async_scheduling", values={"True": False, "False": True})),
    _switch("--disable-cuda-graph", Alias("enforce_eager")),
    _switch("--disable-cuda-graph-padding --enable-torch-compile --enable-profile-cuda-graph --enable-nan-detection", _PERFORMANCE),
    _row("--cuda-graph-max-bs --torch-compile-max-bs", NoEffect("CUDA graphs are captured for the sizes that steps have")),
    _row("--cuda-graph-bs", NoEffect("CUDA graphs are captured for the sizes that steps have"), Takes.MANY),
    _row("--sampling-backend --prefill-attention-backend --decode-attention-backend --fp8-gemm-backend --moe-runner-backend --moe-a2a-backend --lora-backend --max-lora-chunk-size --triton-attention-num-kv-splits", _PERFORMANCE),
    _row("--grammar-backend", NoEffect("one backend serves all grammars and schemas", ("xgrammar", "outlines", "llguidance"), "grammars and schemas are always served; leave it out")),
    _row("--constrained-json-whitespace-pattern", Refusal("the schema of a request decides; leave it out")),
    _switch("--constrained-json-disable-any-whitespace", Refusal("the schema of a request decides; leave it out")),
    _switch("--enable-deterministic-inference", Refusal("on a CPU an answer is the same in any batch, always; on CUDA that is not promised, so leave it out")),
    _row("--speculative-algorithm", Alias("speculative_config", "method", {"NGRAM": "ngram", "NEXTN": "mtp", "EAGLE3": "eagle3", "STANDALONE": "draft_model"})),
    _row("--speculative-draft-model-path --speculative-draft", Alias("speculative_config", "model")),
    _row("--speculative-num-draft-tokens", Alias("speculative_config", "num_speculative_tokens", convert=int)),
    _row("--speculative-num-steps --speculative-eagle-topk --speculative-token-map", NoEffect("drafts are one chain of num_speculative_tokens")),
    _row("--lora-paths", Alias("lora_modules"), Takes.MANY),
    _row("--max-loras-per-batch --max-loaded-loras", Alias("max_loras", note="adapters held; each may be in every batch")),
    _row("--lora-target-modules", NoEffect("an adapter's own settings name its modules"), Takes.MANY),
    _row("--lora-eviction-policy", NoEffect("adapters stay loaded until they are unloaded")),
    _switch("--enable-hierarchical-cache --enable-lmcache", Refusal('K/V is kept beyond the device with --kv-offload-config, such as \'{"host_gib": 8}\'')),
    _row("--hicache-ratio --hicache-size --hicache-write-policy --hicache-storage-backend --hicache-io-backend --hicache-mem-layout", Refusal('K/V is kept beyond the device with --kv-offload-config, such as \'{"host_gib": 8}\'')),
    _row("--disaggregation-mode", NoEffect("prompts and answers are computed here", ("null",), 'write --kv-transfer-config \'{"role": "prefill"}\' on one daemon and {"role": "decode", "prefill_url": "http://..."} on the other')),
    _row("--cpu-offload-gb-per-layer --quantization-param-path", Refusal("the checkpoint has its settings, and weights stay on the device; leave it out")),
    _row("--torchao-config", Refusal("--quantization int8 or fp8 quantises weights as they are loaded")),
    _row("--fastapi-root-path", Alias("root_path")),
    _row("--admin-api-key", Refusal("a key without a tenant is the operator's: name keys with --api-key, and tenants' with --tenants")),
    _row("--file-storage-path", Alias("data_dir")),
    _row("--watchdog-timeout", Alias("stall_limit", note="a hung engine turns /health red; the supervisor restarts it")),
    _row("--soft-watchdog-timeout --decode-log-interval --gc-warning-threshold-secs --log-requests-level --log-requests-format --crash-dump-folder --warmups", _PERFORMANCE),
    _switch("--skip-server-warmup --enable-request-time-stats-logging --show-time-cost", _PERFORMANCE),
    _row("--log-level-http", Alias("uvicorn_log_level")),
    _switch("--log-requests", Alias("enable_log_requests", note="one line a request; prompts and answers are never logged")),
    _switch("--enable-metrics --enable-cache-report --enable-metrics-for-all-schedulers --collect-tokens-histogram", NoEffect("/metrics and cached tokens in usage are always served")),
    _switch("--enable-trace", NoEffect("--otlp-traces-endpoint turns traces on")),
    _switch("--enable-multimodal", Refusal(_NO_IMAGES)),
    _switch("--grpc-mode", Refusal("the daemon speaks HTTP; leave it out")),
    _switch("--enable-memory-saver --enable-weights-cpu-backup", Refusal("the weights stay on the device; stop the daemon to free it, a start takes seconds")),
    _switch("--enable-custom-logit-processor", Refusal("code of a request is not run; use logit_bias, bad_words or structured_outputs")),
)  # fmt: skip

TGI = (
    _row("--model-id", Alias("model")),
    _row("--num-shard", Alias("tensor_parallel_size")),
    _row("--sharded", NoEffect(_ONE_DEVICE, ("false",), _PARALLEL)),
    _row("--quantize", Alias("quantization", values={**dict.fromkeys(("awq", "gptq", "marlin", "compressed-tensors"), "auto"), "fp8": "fp8"}, note="bitsandbytes, eetq and others are refused")),
    _row("--speculate", Refusal('write --speculative-config \'{"method": "ngram", "num_speculative_tokens": 2}\'')),
    _row("--max-concurrent-requests", Alias("max_num_queued_reqs", note="of requests that wait; beyond it they get a 429")),
    _row("--max-batch-size", Alias("max_num_seqs")),
    _row("--max-batch-prefill-tokens", Alias("max_num_batched_tokens")),
    _row("--max-total-tokens", Refusal("TGI means the longest sequence: write --max-model-len; SGLang means the KV pool: write --kv-cache-memory-bytes, or leave it out")),
    _row("--max-input-tokens --max-input-length", NoEffect("prompts may take the whole context; --max-model-len bounds prompt and answer together")),
    _row("--max-batch-total-tokens", NoEffect(_POOL)),
    _row("--waiting-served-ratio --max-waiting-tokens --validation-workers --cuda-graphs", _PERFORMANCE),
    _row("--max-best-of --max-stop-sequences --max-client-batch-size", NoEffect(_BOUNDED)),
    _row("--max-top-n-tokens", Alias("max_logprobs")),
    _row("--payload-limit", Alias("max_body_bytes")),
    _row("--hostname", Alias("host")),
    _row("--huggingface-hub-cache --weights-cache-override", Alias("download_dir")),
    _row("--cuda-memory-fraction", Alias("gpu_memory_utilization")),
    _row("--rope-factor", Refusal(_ROPE)),
    _switch("--json-output", Alias("log_format", values={"True": "json", "False": "text"})),
    _row("--otlp-endpoint", Refusal("write --otlp-traces-endpoint with a collector's HTTP address, such as http://localhost:4318/v1/traces")),
    _row("--otlp-service-name", NoEffect("set the variable OTEL_SERVICE_NAME")),
    _row("--cors-allow-origin", Alias("allowed_origins", convert=_names)),
    _row("--lora-adapters", Refusal("write --lora-modules NAME=FOLDER with an adapter that PEFT saved")),
    _row("--graceful-termination-timeout", Alias("shutdown_timeout")),
    _row("--tokenizer-config-path", Refusal("tokenizer_config.json is read beside the weights; name another repository with --tokenizer")),
    _row("--watermark-gamma --watermark-delta", NoEffect("no answer is watermarked")),
    _row("--usage-stats", NoEffect("no statistics leave the daemon")),
    _row("--shard-uds-path --prometheus-port", NoEffect("one process serves HTTP, with /metrics")),
    _row("--ngrok-authtoken --ngrok-edge", Refusal("no tunnel is opened; put a proxy before the daemon")),
    _switch("--ngrok", Refusal("no tunnel is opened; put a proxy before the daemon")),
    _switch("--disable-custom-kernels", Refusal("choose with --attention-backend torch or --cpu-kernels")),
    _switch("--disable-grammar-support", Refusal("grammars and schemas are always served; leave it out")),
    _switch("--enable-prefill-logprobs", NoEffect("a request asks for prompt_logprobs")),
)  # fmt: skip

PROGRAMS = {"vLLM": VLLM, "llama-server": LLAMA_SERVER, "SGLang": SGLANG, "TGI": TGI}
_ROWS = {flag: row for rows in PROGRAMS.values() for row in rows for flag in row.flags}
SPELLINGS = tuple(_ROWS)

IN_CHECKPOINT = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "auto-round", "mxfp4", "modelopt")
OF_CHECKPOINT = "a checkpoint's own format is recognised; others stay as they are"
_BACKENDS = (
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "TORCH_SDPA",
    "CPU_ATTN",
    "FLASHMLA",
    "FLASHINFER_MLA",
    "CUTLASS_MLA",
    *("fa3", "fa4", "flashmla", "cutlass_mla", "trtllm_mha", "trtllm_mla", "torch_native", "flex_attention"),
)

# Values of Quire's own settings that other servers spell differently.
VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8", "float16": "auto", "bfloat16": "auto", "bf16": "auto"},
    "generation_config": {"quire": "vllm"},
    "tool_call_parser": {
        **dict.fromkeys(("qwen", "qwen25", "qwen3"), "hermes"),
        "llama3": "llama3_json",
        "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31",
        "glm": "glm45",
        "gpt-oss": "harmony",
    },
    "reasoning_parser": {
        "deepseek-r1": "deepseek_r1",
        "deepseek-v3": "deepseek_v3",
        "qwen3-thinking": "deepseek_r1",
        "kimi": "kimi_k2",
        "gpt-oss": "harmony",
    },
    "quantization": {"None": "auto", **dict.fromkeys(IN_CHECKPOINT, "auto")},
    "load_format": {"hf": "auto", "fastsafetensors": "safetensors", "runai_streamer": "safetensors"},
    "model_impl": {"vllm": "quire", "sglang": "quire"},
    "attention_backend": dict.fromkeys(_BACKENDS, "auto"),
    "device": {"none": "cpu", "CUDA0": "cuda"},
    "max_model_len": {"-1": "auto"},
}

# Words in the values of Quire's own settings that are refused, and why.
REFUSED_VALUES = (
    ("kv_transfer_config", "kv_connector", 'K/V goes from one Quire to another; write {"role": "prefill"} on one, and {"role": "decode", "prefill_url": "http://..."} on the other'),
    ("quantization", "bitsandbytes", "weights are not quantised by bitsandbytes; write int8 on a CPU, fp8 on a GPU, or name a quantised checkpoint"),
    ("load_format", "bitsandbytes", "weights are not quantised by bitsandbytes; write --quantization int8 on a CPU, fp8 on a GPU, or name a quantised checkpoint"),
    ("load_format", "pt", "pickled weights can run code when read; convert them to safetensors"),
    ("kv_cache_dtype", "fp8_e5m2", "8-bit K/V is e4m3, which is more precise; write fp8"),
)  # fmt: skip

KEY_VARIABLES = ("VLLM_API_KEY", "LLAMA_API_KEY")  # served as --api-key: ignored, they would leave a daemon open
_VARIABLES = ("VLLM_", "LLAMA_ARG_")

_NUMBER = re.compile(r"-\d[\d.]*")
_WORD = re.compile(r"[\w-]+")
_LEVEL = re.compile(r"-O(\d+)")


def split(argv: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Return a command line without the foreign flags, and these. Raises ConfigError.

    Underscores in names become hyphens, and `--FLAG.KEY VALUE` becomes a key of a JSON setting, as in vLLM.
    """
    words, rest, found = list(argv), list[str](), list[Given]()
    keys: dict[str, dict[str, Any]] = {}  # of JSON settings, given one by one
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name, dot, key = name.partition(".")
            name = name.replace("_", "-")
            if dot and name not in _ROWS:
                keys.setdefault(name, {})[key] = _json_value(value if equals else words.pop(0) if words else "")
                continue
        if level := _LEVEL.fullmatch(name):
            name, equals, value = "-O", "=", level[1]
        is_on, row = _find(name)
        if row is None:
            rest.append(name + equals + value)
        elif row.takes is Takes.SWITCH:
            if equals:
                raise ConfigError(f"{name} takes no value; write {name} or leave it out.")
            found.append(Given(row, name, is_on))
        else:
            found.append(Given(row, name, _values(row, name, [value] if equals else [], words)))
    for name, values in keys.items():
        rest += [name, json.dumps(values)]
    return rest, found


def _json_value(text: str) -> Any:
    """Return the value of `--FLAG.KEY VALUE`: JSON, or else a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _values(row: Foreign, name: str, values: list[str], words: list[str]) -> Any:
    """Return the value behind a flag, taken off the words that follow it."""
    most = {Takes.MAYBE: 1, Takes.ONE: 1, Takes.MANY: len(words)}[row.takes] if not values else 0
    for _ in range(most):
        if not words or (words[0].startswith("-") and not _NUMBER.fullmatch(words[0])):
            break
        if row.takes is Takes.MAYBE and words[0] not in ("on", "off", "auto", "0", "1"):
            break
        values.append(words.pop(0))
    if not values and row.takes is not Takes.MAYBE:
        raise ConfigError(f"{name} needs a value; write it behind the flag.")
    return values if row.takes is Takes.MANY else (values[0] if values else True)


def _find(name: str) -> tuple[bool, Foreign | None]:
    """Return the row of a flag; False with it for the `--no-` form of a switch."""
    row = _ROWS.get(name)
    if row is not None or not name.startswith("--no-"):
        return True, row
    row = _ROWS.get("--" + name.removeprefix("--no-"))
    return False, row if row is not None and row.takes is Takes.SWITCH else None


def split_file(values: Mapping[str, Any], known: Iterable[str]) -> tuple[dict[str, Any], list[Given]]:
    """Return the settings of a file that are not foreign flags, and those that are. `known` are Quire's settings."""
    known, rest, found = set(known), dict[str, Any](), list[Given]()
    for name, value in values.items():
        is_on, row = _find(to_flag(name))
        if name in known or row is None:
            rest[name] = value
        elif row.takes is Takes.SWITCH:
            found.append(Given(row, to_flag(name), bool(value) == is_on))
        else:
            found.append(Given(row, to_flag(name), value))
    return rest, found


def translate(given: Iterable[Given]) -> Translated:
    """Return the meaning of foreign flags."""
    made = Translated({}, {}, [], [])
    without: dict[str, list[str]] = {}  # by the reason
    for each in given:
        meaning = each.row.meaning
        if isinstance(meaning, Alias):
            _set(made, each, meaning)
        elif isinstance(meaning, Refusal):
            if each.value is not False:
                made.faults.append(f"{each.text} is not served: {meaning.why}.")
        elif meaning.only and not _is_harmless(each.value, meaning.only):
            made.faults.append(f"{each.text} is not served: {meaning.otherwise}.")
        else:
            without.setdefault(meaning.why, []).append(each.text)
    _share_context(made)
    made.remarks.extend(f"{', '.join(texts)} ({why})" for why, texts in without.items())
    return made


def _is_harmless(value: Any, harmless: tuple[str, ...]) -> bool:
    return all(str(each).lower() in harmless for each in (value if isinstance(value, list) else [value]))


def _set(made: Translated, given: Given, meaning: Alias) -> None:
    """Add the setting that a flag stands for, or a fault."""
    try:
        value = given.value
        if str(value) in meaning.values:
            value = meaning.values[str(value)]
        elif meaning.convert is not None:
            value = meaning.convert(value)
    except (ValueError, TypeError) as error:
        made.faults.append(f"{given.text} is not understood: {error}.")
        return
    if value is None:
        return  # the default
    name, other = meaning.setting, made.flags.get(meaning.setting)
    if meaning.key:
        made.values[name] = {**made.values.get(name, {}), meaning.key: value}
    elif other is not None and made.values[name] != value:
        made.faults.append(
            f"{other.flag} and {given.flag} set {to_flag(name)} to different values; leave one of them out."
        )
    else:
        made.values[name] = value
    made.flags[name] = given


def _share_context(made: Translated) -> None:
    """Divide llama-server's context among its slots, as it does."""
    context, slots = made.flags.get("max_model_len"), made.values.get("max_num_seqs")
    if context is None or slots is None or context.row.name != "--ctx-size" or made.values["max_model_len"] == "auto":
        return
    try:
        made.values["max_model_len"] = int(made.values["max_model_len"]) // int(slots)
    except (ValueError, ZeroDivisionError):
        return  # the settings' own bounds say what is wrong


def refuse(faults: Sequence[str]) -> None:
    """Raise ConfigError with all sentences, if there are any, so that one start names all that has to change."""
    if faults:
        head = "" if len(faults) == 1 else f"{len(faults)} arguments have to change:\n  "
        raise ConfigError(head + "\n  ".join(faults))


def check_same(made: Translated, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return Quire's flags and the translated ones together; a setting with two values is a fault."""
    for name, given in made.flags.items():
        meaning = given.row.meaning
        assert isinstance(meaning, Alias)
        if name in flags and flags[name] != made.values[name] and not meaning.wins:
            own = "MODEL" if name == "model" else to_flag(name)
            made.faults.append(
                f"{own} and {given.flag} mean the same and have different values; leave one of them out."
            )
    return {**flags, **made.values}


def known_value(name: str, value: Any) -> Any:
    """Return Quire's spelling of a value of its setting `name`. Raises ConfigError for one that is refused."""
    for setting, word, why in REFUSED_VALUES:
        if name == setting and word in _WORD.findall(str(value)):
            raise ConfigError(f"{to_flag(name)} {value} is not served: {why}.")
    return VALUES.get(name, {}).get(str(value), value)


def narrower(settings: Any) -> list[str]:
    """Return remarks on settings that mean more to other servers than they do here."""
    if not settings.seed or settings.load_format == "dummy":
        return []
    return [f"--seed {settings.seed} (it seeds random weights; a request names the seed of its answer)"]


def keys_of(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the variable of another server that has API keys, and its value."""
    return next(((name, environ[name]) for name in KEY_VARIABLES if name in environ), None)


def unread_variables(environ: Iterable[str]) -> list[str]:
    """Return the variables of other servers, which may be for another program on the machine and are not read."""
    return sorted(name for name in environ if name.startswith(_VARIABLES) and name not in KEY_VARIABLES)
