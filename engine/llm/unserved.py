"""Names of vLLM's offline API that do not exist here, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.errors import InvalidRequestError

_ONE_PROCESS = "the engine runs in this process, without workers"
_NO_CLASSIFIERS = "classifiers and reward models are not served; for a text's vector use embed"
_STAYS = "the weights stay on the device; close the LLM to free it"
_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "LLM": {
        "encode": "use embed, which returns vectors",
        "classify": _NO_CLASSIFIERS,
        "reward": _NO_CLASSIFIERS,
        "sleep": _STAYS,
        "wake_up": _STAYS,
        "reset_prefix_cache": 'prompts with another cache_salt share nothing: {"prompt": ..., "cache_salt": "2"}',
        "start_profile": "profile this process with a profiler of Python or PyTorch",
        "stop_profile": "profile this process with a profiler of Python or PyTorch",
        "get_metrics": "the times of an answer are in its outputs[0].timings; the daemon has /metrics",
        "collective_rpc": _ONE_PROCESS,
        "apply_model": _ONE_PROCESS,
        "llm_engine": "its settings are the arguments of LLM, its tokenizer is get_tokenizer()",
        "set_tokenizer": "name it when the model is loaded, with LLM(tokenizer=...)",
        "preprocess_chat": "use get_tokenizer().apply_chat_template",
    },
    "RequestOutput": {
        "metrics": "the times of an answer are in its outputs[0].timings",
        "lora_request": "the adapter is the one that the call named",
        "encoder_prompt": "models with an encoder are not served",
        "multi_modal_placeholders": "prompts are text",
        "kv_transfer_params": "K/V is transferred between daemons",
    },
}
_ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], str]] = {  # the values that ask for nothing; what to do about others
    "prompt_token_ids": ((), 'give the ids as prompts, or {"prompt_token_ids": [...]}'),
    "chat_template": ((), "give it to LLM(chat_template=...)"),
    "chat_template_content_format": (("auto", "string"), "text is passed to the template as a string; leave it out"),
    "mm_processor_kwargs": (({},), "prompts are text; leave it out"),
    "pooling_params": ((), "give pooling or dimensions"),
    "pooling_task": (("embed",), "use embed or score"),
    "tokenization_kwargs": (({},), "truncate_prompt_tokens is in SamplingParams; leave it out"),
    "truncate_prompt_tokens": ((), "give it in SamplingParams, or cut the prompt"),
    "concurrency_limit": ((), "max_num_seqs of LLM bounds the requests of one step"),
    "priority": ((), "give it to generate, or in SamplingParams"),
}


def missing(kind: str, name: str) -> str:
    """Return the sentence for an attribute that an object of this API does not have."""
    instead = _ATTRIBUTES[kind].get(name)
    return f"{kind!r} object has no attribute {name!r}" + (f": {instead}." if instead else "")


def refuse_arguments(
    method: str, given: Mapping[str, Any], progress: bool, lora: str | None
) -> tuple[bool, str | None]:
    """Return `progress` and `lora`, perhaps from vLLM's names of them. Raises TypeError or InvalidRequestError for others."""
    for name, value in given.items():
        neutral, instead = _ARGUMENTS.get(name, ((), ""))
        if name == "use_tqdm":
            progress = bool(value)
        elif name == "lora_request":
            lora = getattr(value, "lora_name", value)
        elif name not in _ARGUMENTS:
            raise TypeError(f"LLM.{method}() got an unexpected keyword argument {name!r}")
        elif value is not None and value not in neutral:
            raise InvalidRequestError(f"{name} is not an argument of LLM.{method}; {instead}.", param=name)
    return progress, lora
