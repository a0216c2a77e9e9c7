"""Refuses requests that can never run, by their lengths.

Pure; called at submission, and again by the scheduler.
"""

from __future__ import annotations

from engine.core.config import SchedulerConfig
from engine.core.errors import ContextLengthError, InvalidRequestError, NeverFitsError
from engine.core.kv.page_table import blocks_for
from engine.core.types import Request


def peak_positions(num_prompt: int, max_tokens: int) -> int:
    """Return the most positions whose K/V a sequence holds: the last generated token is never fed back."""
    return num_prompt + max(max_tokens - 1, 0)


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Raise a ClientError if the request can never be served, however long it waits."""
    params = request.params
    num_prompt, max_tokens = len(request.prompt), params.max_tokens
    if not num_prompt:
        raise InvalidRequestError("The prompt is empty; send at least one token.", param="prompt")
    if num_prompt > config.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {config.max_model_len} tokens, but the prompt has {num_prompt}; "
            "shorten the prompt.",
            param="prompt",
            num_prompt=num_prompt,
            limit=config.max_model_len,
        )
    if num_prompt + max_tokens > config.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {config.max_model_len} tokens, but {num_prompt + max_tokens} were "
            f"requested ({num_prompt} in the prompt, {max_tokens} to generate); shorten the prompt or lower max_tokens.",
            param="max_tokens",
            num_prompt=num_prompt,
            limit=config.max_model_len,
            max_tokens=max_tokens,
        )
    if params.beam is not None and params.grammar is not None:
        raise InvalidRequestError(
            "A beam search cannot follow a grammar yet; leave out use_beam_search, or what constrains the answer.",
            param="use_beam_search",
        )
    if params.num_sequences > config.max_num_seqs:
        name = "n" if params.num_sequences == params.n else "best_of"
        raise NeverFitsError(
            f"{name} is {params.num_sequences}, but this server runs at most {config.max_num_seqs} sequences concurrently "
            f"(--max-num-seqs); lower {name}.",
            param=name,
        )
    needed = blocks_for(peak_positions(num_prompt, max_tokens), config.block_size)
    if params.beam is not None:
        # No beam can wait for the others, so all have to fit; they share the prompt's full blocks.
        num_shared = num_prompt // config.block_size
        needed = num_shared + params.beam.width * (needed - num_shared)
    if needed > config.num_blocks:
        raise NeverFitsError(
            f"The request needs up to {needed} KV blocks ({num_prompt} prompt + {max_tokens} generated tokens), but the "
            f"pool has {config.num_blocks}; shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
