"""The settings of the HTTP application; engine/settings/setting.py says how to add one.

server/settings/settings.py builds one AppConfig at start-up from flags, variables and files; tests build theirs by hand.
Frozen. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from engine.core.types import Pooling
from engine.settings.setting import feature, section
from engine.text.channels import CHANNEL_NAMES
from engine.text.reasoning import REASONING_TAGS
from engine.text.tools.formats import TOOL_FORMATS
from server.settings.origins import read_hosts, read_media_hosts, read_origins

_model = section("Model")
_device = section("Device and memory")
_scheduling = section("Scheduling")
_http = section("HTTP")
_batches = section("Files and batches")
_security = section("Security")
_logging = section("Logging and configuration")
_transfer = feature("kv_transfer_config", "Prefill and decode apart")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """Settings of the HTTP surface. Sizes are bytes, times seconds. Fields without help are derived from other settings."""

    model: str  # the name or path that was loaded; `root` in /v1/models
    served_model_names: tuple[str, ...]  # names that clients may use; the first is reported
    model_aliases: tuple[str, ...] = ()  # patterns of further names, accepted but not listed
    allow_runtime_lora_updating: bool = False  # the engine's setting

    tool_call_parser: str = _model(
        "auto",
        "",
        "format of the model's tool calls; auto reads it off the chat template, none leaves calls in the text",
        choices=("auto", "none", *TOOL_FORMATS),
        is_essential=True,
    )
    reasoning_parser: str = _model(
        "auto",
        "",
        "format of the model's reasoning; auto reads it off the chat template, none leaves reasoning in the text",
        choices=("auto", "none", *REASONING_TAGS, *CHANNEL_NAMES),
        is_essential=True,
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = _model(
        None,
        "JSON",
        'variables of the chat template where a request names none, such as {"enable_thinking": false}',
        unset="none",
    )
    limit_mm_per_prompt: Mapping[str, Any] | None = _model(
        None, "JSON", 'most images of a prompt, such as {"image": 4}', unset='{"image": 32}'
    )
    mm_processor_kwargs: Mapping[str, Any] | None = _model(
        None,
        "JSON",
        'options of the model\'s image processor, such as {"max_pixels": 1003520}: fewer pixels are fewer tokens',
        unset="the checkpoint's own",
    )
    guard: str | None = _model(
        None,
        "NAME",
        "served model that judges prompts, and answers before they are shown: Llama Guard or Qwen3Guard-Gen",
        unset="none",
    )
    guard_every: int = _model(64, "TOKENS", "an answer is judged after so many tokens each, and at its end", at_least=1)
    guard_strict: bool = _model(False, "", "of a Qwen3Guard: what it calls controversial is unsafe, too")
    pooling: str = _model(
        "auto",
        "",
        "how /v1/embeddings makes one vector of hidden states: the last token's, the first one's (cls), or the mean of all; auto is "
        "as the model's files say",
        choices=("auto", *(each.value for each in Pooling)),
    )
    keep: tuple[str, ...] = _model(
        (),
        "NAME",
        "of several models, those that are loaded at the start and stay; others are loaded by the first request for them",
        unset="all; with --idle-unload or --models-max none, and the first is loaded at the start",
    )
    idle_unload: float | None = _model(
        None, "SECONDS", "unload a model without work for so long, unless it is kept", unset="never", above=0
    )
    models_max: int = _device(
        0,
        "N",
        "most models that are loaded at the same time; the least useful one leaves for another; 0 is no limit",
        at_least=0,
    )
    models_memory: int | None = _device(
        None,
        "SIZE",
        "memory of all models that are loaded at the same time: weights, KV pools and caches",
        unset="on a CPU, what is free at the start",
        at_least=1,
    )
    models_autoload: bool = _device(
        True, "", "load a model when a request names it; otherwise POST /v1/models/NAME/load does"
    )
    history_cache: int = _scheduling(
        4096,
        "N",
        "answers whose generated tokens are kept, so that a conversation that comes back as text is found in the prefix cache; "
        "0 keeps none",
        at_least=0,
    )

    role: str = _transfer(
        "role",
        "both",
        "",
        "prefill also computes prompts for decode daemons, which take over their K/V",
        choices=("both", "prefill", "decode"),
    )
    kv_transfer_timeout_s: float = _transfer(
        "timeout_s",
        60.0,
        "SECONDS",
        "longest wait of a decode daemon for K/V; then the prompt is computed here",
        name="kv_transfer_timeout",
        above=0,
    )
    kv_connector_dir: Path | None = _transfer(
        "folder",
        None,
        "DIR",
        "folder in shared memory through which the two exchange K/V",
        unset="one of the user's own under /dev/shm",
    )
    kv_connector_gib: float = _transfer("gib", 4.0, "GIB", "most K/V in that folder", above=0)
    kv_connector_expiry_s: float = _transfer(
        "expiry_s", 120.0, "SECONDS", "K/V that no decode daemon took is dropped", name="kv_connector_expiry", above=0
    )
    kv_connector_listen: str | None = _transfer(
        "listen",
        None,
        "HOST:PORT",
        "address at which a prefill daemon offers K/V to other machines",
        unset="this machine only",
    )
    kv_connector_host: str | None = _transfer(
        "host",
        None,
        "HOST",
        "name or address of this machine that a prefill daemon's answers give",
        unset="the host of listen",
    )
    kv_connector_peers: tuple[str, ...] = _transfer(
        "peers",
        (),
        "HOST:PORT",
        "prefill daemons on other machines whose K/V a decode daemon takes, as their listen and host say",
        unset="none",
    )
    kv_connector_key: str | None = _transfer(
        "key",
        None,
        "KEY",
        "key that both prove to have before K/V goes to another machine",
        unset="the first --api-key",
        is_secret=True,
    )

    max_body_bytes: int = _http(32 << 20, "SIZE", "largest request body, such as 32MiB", at_least=1)
    max_json_values: int = _http(
        1_000_000,
        "N",
        "most JSON values in a request body, by the memory they take: a string counts as 4, a list or an object as 32",
        at_least=1,
    )
    max_logprobs: int = _http(20, "N", "most logprobs a request may ask for", at_least=0)
    max_stored_responses: int = _http(
        1000, "N", "responses of /v1/responses kept in memory to be continued; 0 keeps none", at_least=0
    )
    root_path: str = _http("", "PATH", "path under which a proxy serves the daemon, such as /quire", unset="none")
    openapi: bool = _http(True, "", "serve /openapi.json")
    enable_force_include_usage: bool = _http(False, "", "end every stream with its usage, asked for or not")
    return_tokens_as_token_ids: bool = _http(
        False, "", "write tokens of logprobs as token_id:N, so that tokens of equal text differ"
    )
    page: bool = _http(True, "", "serve the playground and the live view of the engine at /")
    strict_fields: bool = _http(False, "", "refuse requests with unknown fields, or hints that cannot be followed")
    metrics_compat: str = _http(
        "none", "", "also export metrics under another server's names", choices=("none", "vllm")
    )
    otlp_traces_endpoint: str | None = _http(
        None,
        "URL",
        "collector that takes traces by OTLP over HTTP, such as http://localhost:4318/v1/traces",
        unset="as OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT say",
    )
    sse_keep_alive_interval_s: float = _http(
        15.0,
        "SECONDS",
        "interval of the comments that a silent stream sends, with its place in the queue; 0 sends none",
        name="sse_keep_alive_interval",
        at_least=0,
    )
    stall_limit_s: float = _http(
        60.0, "SECONDS", "/health fails when there is work but no step for this long", name="stall_limit", above=0
    )
    shutdown_timeout_s: float = _http(
        30.0, "SECONDS", "time for open requests to finish after SIGTERM", name="shutdown_timeout", at_least=0
    )

    data_dir: Path | None = _batches(
        None, "DIR", "folder for uploaded files and batches, which survive a restart", unset="no batches"
    )
    max_file_bytes: int = _batches(200 << 20, "SIZE", "largest upload to /v1/files, such as 200MiB", at_least=1)

    api_keys: tuple[str, ...] = _security(
        (),
        "KEY",
        "keys that clients must present; set the variable, as ps shows flags",
        name="api_key",
        unset="open to all",
        is_secret=True,
        is_essential=True,
    )
    tenants: Path | None = _security(
        None,
        "FILE",
        "YAML file of tenants: their keys, tiers, weights and limits; read again on SIGHUP",
        unset="all keys are equal",
    )
    share_prefix_cache: bool = _security(
        False,
        "",
        "tenants share cached prompts, and can infer from times and usage which prompts others sent",
    )
    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(read_hosts)] = _security(
        (),
        "NAME",
        "host names to answer to without a key, beside IP addresses and localhost; *.example.com and * are patterns",
        unset="none; with a key, any name",
    )
    allowed_origins: Annotated[tuple[str, ...], BeforeValidator(read_origins)] = _security(
        (), "ORIGIN", "origins whose pages may call from a browser (CORS); * is any", unset="none"
    )
    allowed_media_domains: Annotated[tuple[str, ...], BeforeValidator(read_media_hosts)] = _security(
        (),
        "HOST",
        "hosts that images of requests are fetched from by http or https; another port than theirs as HOST:PORT",
        unset="none: images come with their requests",
    )
    allowed_local_media_path: Path | None = _security(
        None, "DIR", "folder of this machine that images of requests may name a file of, as file:///...", unset="none"
    )
    protect_metrics: bool = _security(False, "", "ask for a key on /metrics and /version, too")

    enable_log_requests: bool = _logging(
        True, "", "write a line for each answered POST and each refused request, without texts"
    )

    def is_alias(self, name: str) -> bool:
        """Return whether a pattern stands for a name."""
        return any(fnmatchcase(name, pattern) for pattern in self.model_aliases)
