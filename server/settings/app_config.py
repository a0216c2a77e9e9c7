"""What the HTTP application needs to know, and nothing else: its own narrow input.

server/settings/settings.py (flags, variables, files) builds one at start-up; tests build theirs by hand. Frozen, so any thread may
read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """Settings of the HTTP surface. Sizes are bytes, times seconds."""

    model: str  # the name or path that was loaded; shown as `root` in /v1/models
    served_model_names: tuple[str, ...]  # what clients may call it; the first is the one reported
    model_aliases: tuple[str, ...] = ()  # patterns of further names, which are accepted but not listed
    api_keys: tuple[str, ...] = ()  # empty: no key is asked for
    tenants: Path | None = None  # the file of those who may call, each with a key of its own
    share_prefix_cache: bool = False  # tenants find each other's prompts in the prefix cache
    allowed_hosts: tuple[str, ...] = ()  # answered beside IP addresses and loopback names; with a key, any host is
    allowed_origins: tuple[str, ...] = ()  # empty: no CORS headers at all
    protect_metrics: bool = False  # /metrics and /version ask for a key, too
    max_body_bytes: int = 32 * 1024 * 1024
    max_json_values: int = 1_000_000  # of a body; server/http/json_values.py says how they count
    data_dir: Path | None = None  # where files and batches are kept; None: there are none
    max_file_bytes: int = 200 * 1024 * 1024  # of an upload
    max_logprobs: int = 20
    pooling: str = "last"  # which hidden states an embedding is made of; a Pooling of the engine
    max_stored_responses: int = 1000  # of /v1/responses, kept in memory to be continued; 0: none
    allow_runtime_lora_updating: bool = False  # clients may load adapters, from paths of this machine
    role: str = "both"  # prefill: also computes prompts for others; decode: has them computed at prefill_url
    prefill_url: str | None = None
    prefill_timeout_s: float = 60.0
    kv_connector_dir: Path | None = None  # where prefill and decode daemons hand K/V over
    kv_connector_bytes: int = 4 << 30
    pinned_prefixes: Path | None = None  # a file of prompts' beginnings that are computed at the start
    page: bool = True  # the playground and the live view at /
    strict_fields: bool = False  # unknown fields and dropped hints are a 400 instead of a note in a header
    tool_call_parser: str = "auto"  # how calls of tools are written; engine/text/tools/dialects.py
    reasoning_parser: str = "auto"  # how thoughts are marked; engine/text/reasoning.py
    sse_keep_alive_interval_s: float = 15.0  # a stream that is silent for this long sends a comment; 0: never
    stall_limit_s: float = 60.0  # busy for this long without a step: /health turns red
    shutdown_timeout_s: float = 30.0  # open requests may finish for this long
    metrics_compat: str | None = None  # "vllm": also expose the metrics under vLLM's names
