"""Refuses requests that can never run, by their lengths. Any thread may ask."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.config import SchedulerConfig
from engine.core.errors import ContextLengthError, InvalidRequestError, NeverFitsError
from engine.core.shown import shorten
from engine.core.types import Request


def peak_positions(num_prompt: int, max_tokens: int) -> int:
    """Return the most positions whose K/V a sequence holds: the last generated token is never fed back."""
    return num_prompt + max(max_tokens - 1, 0)


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError for an id that the model does not have: it would be read from beyond a table."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocab_size:
            message = f"{param} has the token id {shorten(str(token_id))}; ids of this model are 0 to {vocab_size - 1}."
            raise InvalidRequestError(message, param=param)


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
    if request.spans:
        _check_spans(request, config)
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
    # Answers that fork read one state, and each writes another; one of each may be a snapshot's that was found.
    num_states = 2 if params.num_sequences == 1 else params.num_sequences + 2
    longest = request.longest_atomic
    needed = config.max_blocks(peak_positions(num_prompt, max_tokens), num_states, longest)
    if params.beam is not None:
        # No beam can wait for the others, so all have to fit; in the first group they share the prompt's full blocks.
        num_shared, num_states = config.has_full * (num_prompt // config.block_size), 2 * params.beam.width + 2
        needed = config.max_blocks(peak_positions(num_prompt, max_tokens), 0, longest)
        needed = num_shared + params.beam.width * (needed - num_shared) + num_states * config.state_blocks
    if needed > config.num_blocks:
        raise NeverFitsError(
            f"The request needs up to {needed} KV blocks ({num_prompt} prompt + {max_tokens} generated tokens), but the "
            f"pool has {config.num_blocks}; shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )


def _check_spans(request: Request, config: SchedulerConfig) -> None:
    ends = [0, *[span.end for span in request.spans]]
    assert all(span.start >= end for span, end in zip(request.spans, ends, strict=False)), "spans overlap"
    assert ends[-1] <= len(request.prompt), "a span is behind the prompt"
    longest = request.longest_atomic
    if longest > config.max_num_batched_tokens:
        raise NeverFitsError(
            f"The prompt has an input of {longest} tokens that is computed in one step, but a step holds "
            f"{config.max_num_batched_tokens} (--max-num-batched-tokens); send a smaller one, or raise it.",
            param="prompt",
        )
