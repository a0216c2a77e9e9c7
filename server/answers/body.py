"""Fields that the generating APIs share: streaming, caching, tenants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from engine.core.errors import InvalidRequestError
from engine.text.fields.body import IdleFields, Integer, Refused, RequestBody
from engine.text.fields.chat import ChatFields
from engine.text.fields.sampling import QueueFields, SamplingFields

MAX_CACHE_SALT = 128
MAX_USER = 512

_OFF: tuple[Any, ...] = (False, 0, [], {}, "")

# Fields of OpenAI, vLLM and others that would change the answer, with the values that ask for nothing special.
UNSUPPORTED: Mapping[str, Refused] = {
    **dict.fromkeys(
        (
            "custom_logit_processor", "dry_multiplier", "dynatemp_range", "logits_processors", "logprob_token_ids",
            "lora_path", "mirostat", "prompt_embeds", "repetition_detection", "return_prompt_text", "stop_regex",
            "suffix", "top_n_sigma", "xtc_probability",
        ),
        Refused(_OFF),
    ),
    **dict.fromkeys(
        ("image_data", "images", "multi_modal_data"),
        Refused(_OFF, "send images in parts of messages, with /v1/chat/completions"),
    ),
    "chat_template": Refused(_OFF, "start the server with --chat-template, or render the prompt and use /v1/completions"),
    "documents": Refused(_OFF, "send chat_template_kwargs: {documents: ...}, if the model's template reads them"),
    "beam_width": Refused(_OFF, "send use_beam_search: true, and the width as n"),
    "extra_body": Refused(_OFF, "send its fields beside the others, as OpenAI's SDK does"),
    **dict.fromkeys(("ebnf", "grammar"), Refused(_OFF, "send structured_outputs: {grammar: ...}")),
    "json_schema": Refused(_OFF, "send structured_outputs: {json: ...}, or response_format"),
    "n_predict": Refused((-1,), "send max_tokens"),
    "no_stop_trim": Refused(_OFF, "send include_stop_str_in_output"),
    "repeat_penalty": Refused((1, 1.0), "send repetition_penalty"),
    "regex": Refused(_OFF, "send structured_outputs: {regex: ...}"),
    "truncation_side": Refused(("left",)),
    "typical_p": Refused((1, 1.0)),
}  # fmt: skip

# Fields of /v1/responses and /v1/messages, which chats and completions spell otherwise.
_OTHERS: Mapping[str, Refused] = {
    "max_output_tokens": Refused((), "send max_tokens"),
    "stop_sequences": Refused(([],), "send stop"),
    **dict.fromkeys(("instructions", "system"), Refused(_OFF, "send a first message of role system")),
}

# Fields that ask for another way to the same answer, which is dropped where it cannot be had.
HINTS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("ec_transfer_params", "guided_decoding_backend"), _OFF),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
}

# Fields that by their meaning leave the answer as it is: bookkeeping and hints.
NO_OPS = frozenset({"metadata", "prompt_cache_key", "service_tier", "store", "request_id"})


class PromptCacheOptions(RequestBody):
    """For how long to retain the prompt; `explicit` retains marked places only."""

    mode: Literal["implicit", "explicit"] = Field(
        "implicit", description="Whether the cache is used by itself or on request."
    )
    ttl: Literal["30m"] | None = Field(None, description="How long to keep it.")


class StreamOptions(RequestBody):
    """Whether a stream reports usage."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = Field(False, description="End the stream with a chunk that has the usage.")
    continuous_usage_stats: bool = Field(False, description="Put the usage so far into every chunk.")


class KVTransferParams(RequestBody):
    """Who computes a prompt and where its K/V is, in vLLM's shape.

    A router sends `do_remote_decode` to a prefill daemon, and what that answers to a decode daemon.
    """

    NO_OPS: ClassVar[frozenset[str]] = frozenset(
        {
            "dcp_size",
            "pp_size",
            "remote_block_ids",
            "remote_blocks_expiry_time",
            "remote_engine_id",
            "remote_num_tokens",
        }
        | {"tp_size", "transfer_mode"}
    )

    do_remote_decode: bool = Field(
        False, description="Compute the prompt, keep its K/V for a decode daemon, and answer where it is."
    )
    do_remote_prefill: bool = Field(False, description="Take the prompt's K/V from the daemon that computed it.")
    remote_request_id: str = Field(
        "", max_length=64, pattern=r"^[0-9A-Za-z._-]*$", description="The name of the K/V on that daemon."
    )
    remote_host: str = Field(
        "",
        max_length=255,
        pattern=r"^[0-9A-Za-z.:%_-]*$",
        description="That daemon's host, one of peers in --kv-transfer-config; absent for shared memory.",
    )
    remote_port: int = Field(0, ge=0, le=65535, description="That daemon's port for K/V.")

    @model_validator(mode="after")
    def _check(self) -> KVTransferParams:
        if self.do_remote_decode and self.do_remote_prefill:
            raise InvalidRequestError(
                "do_remote_decode and do_remote_prefill exclude each other; the first is for the daemon that computes the "
                "prompt.",
                param="kv_transfer_params",
            )
        return self


class EngineBody(QueueFields):
    """Fields of every request that runs on the engine."""

    model: str | None = Field(None, description="The served model or adapter; absent means the model of the daemon.")
    include_metrics: bool = Field(False, description="Add queue, prefill and decode times to the answer.")
    cache_salt: str = Field(
        "", max_length=MAX_CACHE_SALT, description="Requests with different salts share no cached K/V."
    )
    user: str = Field(
        "", max_length=MAX_USER, description="Names the tenant where there is no --tenants file; else no effect."
    )

    @property
    def tenant(self) -> str:
        """Return the tenant that the request names."""
        return self.user

    @property
    def retained_s(self) -> float:
        """Return for how long to keep the whole prompt cached; 0 for no longer."""
        return 0.0


class SamplingBody(EngineBody, SamplingFields):
    """Fields of /v1/completions and /v1/chat/completions alike."""

    NO_OPS: ClassVar[frozenset[str]] = NO_OPS
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = HINTS
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {**UNSUPPORTED, **_OTHERS}
    IDLE: ClassVar[IdleFields] = {**SamplingFields.IDLE, "stream_options": lambda body, _: not body.stream}

    return_token_ids: bool = Field(False, description="Return the ids of prompt and answer.")
    return_tokens_as_token_ids: bool = Field(False, description="Write tokens in log probabilities as token_id:N.")
    stream: bool = Field(False, description="Send the answer as server-sent events while it is generated.")
    stream_options: StreamOptions | None = Field(None, description="What else a stream contains.")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="24h keeps the prompt's K/V pinned in the cache."
    )  # both spellings have been in use
    prompt_cache_options: PromptCacheOptions | None = Field(
        None, description="For how long the prompt's K/V stays pinned."
    )
    kv_transfer_params: KVTransferParams | None = Field(
        None,
        description="Who computes the prompt and where its K/V is, as a router sends it to daemons that divide the work.",
    )
    safety_identifier: str = Field("", max_length=MAX_USER, description="Names the tenant, as user does.")

    @property
    def tenant(self) -> str:
        return self.user or self.safety_identifier

    @property
    def retained_s(self) -> float:
        if self.prompt_cache_retention == "24h":
            return 86_400.0
        options = self.prompt_cache_options
        return 1_800.0 if options is not None and options.mode == "implicit" and options.ttl == "30m" else 0.0


class ChatBody(SamplingBody, ChatFields):
    """The request of /v1/chat/completions, which other APIs are translated to."""

    NO_OPS: ClassVar[frozenset[str]] = NO_OPS | {"prediction"}
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {**HINTS, "verbosity": ("medium",)}
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        **SamplingBody.UNSUPPORTED,
        "functions": Refused(([],), "send tools"),
        **dict.fromkeys(("audio", "moderation", "web_search_options"), Refused()),
        "best_of": Refused((1,), "answers are ranked by /v1/completions only; send n to have several"),
        "echo": Refused((False,), "use /v1/completions, whose echo returns the prompt"),
        "function_call": Refused(("none",), "send tools and tool_choice"),
        "modalities": Refused((["text"],)),
    }
    IDLE: ClassVar[IdleFields] = {**SamplingBody.IDLE, **ChatFields.IDLE}

    max_completion_tokens: Integer | None = Field(
        None, ge=1, description="Another name of max_tokens; send one of the two."
    )
    max_tokens: Integer | None = Field(
        None, ge=1, description="The most tokens to generate; absent, up to the context's end."
    )
    include_reasoning: bool = Field(True, description="Return the reasoning beside the answer.")

    @field_validator("max_completion_tokens")
    @classmethod
    def _check_max_tokens(cls, value: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens")
        if max_tokens not in (None, value):
            raise InvalidRequestError(
                f"max_tokens is {max_tokens} and max_completion_tokens {value}; they mean the same, send one.",
                param="max_tokens",
            )
        return value

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
