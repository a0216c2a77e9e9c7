"""Makes engine parameters and text rules of a request's fields. Pure."""

from __future__ import annotations

import dataclasses
import secrets

from engine.core.errors import InvalidRequestError
from engine.core.types import BeamParams, EarlyStopping, SamplingParams
from engine.text.chat.choice import TextRules
from engine.text.chat.limits import ModelLimits
from engine.text.fields.sampling import SamplingFields
from engine.text.types import SamplingDefaults

GREEDY_BELOW = 1e-5  # a temperature too small to divide logits by asks for the most likely token
MAX_BAD_CHARS = 8192  # of all bad words; they are encoded in 10 ms
# Fields whose default depends on the model.
_LENGTHS = ("max_tokens", "max_new_tokens")
_MODELS_OWN = [each.name for each in dataclasses.fields(SamplingDefaults) if each.name not in _LENGTHS]
_SHARED = SamplingFields.model_fields.keys() & {each.name for each in dataclasses.fields(SamplingParams)}


def truncated(fields: SamplingFields, prompt: list[int], limits: ModelLimits, *, has_images: bool = False) -> list[int]:
    """Return what truncate_prompt_tokens keeps of a prompt: its end; -1: what fits; None: all. Raises InvalidRequestError."""
    keep = fields.truncate_prompt_tokens
    if keep is None:
        return prompt
    if has_images:
        _refuse("truncate_prompt_tokens", "truncate_prompt_tokens may cut an image in two; leave it out.")
    room = limits.max_model_len - (1 if fields.max_tokens is None else fields.max_tokens)
    return prompt[-(keep if keep > 0 else max(room, 1)) :]


def sampling_params(
    fields: SamplingFields, limits: ModelLimits, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters. Raises InvalidRequestError."""
    limits.check_logprobs(fields.prompt_logprobs, "prompt_logprobs")
    defaults = limits.tokenizer.sampling_defaults
    max_tokens = max_tokens if defaults.max_new_tokens is None else min(max_tokens, defaults.max_new_tokens)
    if fields.use_beam_search:
        defaults = SamplingDefaults()  # a search goes by the model's own probabilities
    if fields.min_tokens > max_tokens:
        _refuse("min_tokens", f"min_tokens is {fields.min_tokens}, more than max_tokens ({max_tokens}); lower it.")
    if fields.stop_token_ids:
        limits.check_ids(fields.stop_token_ids, "stop_token_ids")
    if fields.use_beam_search:
        _check_width(fields, limits)
    # A field of the same name is passed on as it is, unless it is converted below.
    values = {name: getattr(fields, name) for name in _SHARED}
    for name in _MODELS_OWN:
        if values[name] is None:
            values[name] = getattr(defaults, name)
    bad_words = _bad_words(fields, limits) if fields.bad_words else ()
    values |= {
        "max_tokens": max_tokens,
        "temperature": values["temperature"] if values["temperature"] >= GREEDY_BELOW else 0.0,
        "top_k": max(values["top_k"], 0),
        "logit_bias": _logit_bias(fields, limits) if fields.logit_bias else (),
        "allowed_token_ids": _allowed_ids(fields.allowed_token_ids, limits, bad_words)
        if fields.allowed_token_ids
        else None,
        "bad_words": bad_words,
        "seed": secrets.randbits(63) if fields.seed is None else fields.seed & (2**64 - 1),
        "n": fields.num_drawn,
        "eos_token_ids": frozenset() if fields.ignore_eos else limits.tokenizer.eos_token_ids,
        "stop_token_ids": frozenset(fields.stop_token_ids),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "beam": beam_params(fields) if fields.use_beam_search else None,
    }
    return SamplingParams(**values)


def text_rules(fields: SamplingFields, params: SamplingParams, *, echo: bool = False) -> TextRules:
    """Return how the answer's text is made."""
    return TextRules(
        stops=tuple(fields.stop),
        include_stop=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        min_tokens=fields.min_tokens,
        ending_ids=params.eos_token_ids | params.stop_token_ids,
        echo=echo,
    )


def beam_params(fields: SamplingFields) -> BeamParams:
    """Return how to search, for a request that asks for a beam search."""
    return BeamParams(
        width=fields.beam_width,
        length_penalty=fields.length_penalty,
        early_stopping=EarlyStopping(fields.early_stopping),
    )


def _check_width(fields: SamplingFields, limits: ModelLimits) -> None:
    """Refuse a search with more beams than tokens that do not end an answer."""
    width, num_ends = fields.beam_width, len(limits.tokenizer.eos_token_ids | set(fields.stop_token_ids))
    if width + num_ends > limits.vocab_size:
        _refuse(
            "n",
            f"{width} beams are too many for {limits.vocab_size} tokens, {num_ends} of which end an answer; "
            "lower n, or best_of.",
        )


def _logit_bias(fields: SamplingFields, limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    if not all(key.isascii() and key.isdecimal() and len(key) < 20 for key in fields.logit_bias):
        _refuse("logit_bias", "logit_bias has a key that is not a token id; keys are ids in decimal digits.")
    biases = {int(key): bias for key, bias in fields.logit_bias.items()}
    limits.check_ids(tuple(biases), "logit_bias")
    return tuple(biases.items())


def _allowed_ids(ids: list[int], limits: ModelLimits, bad_words: tuple[tuple[int, ...], ...]) -> frozenset[int]:
    limits.check_ids(ids, "allowed_token_ids")
    allowed = frozenset(ids)
    if {(token_id,) for token_id in allowed} <= set(bad_words):
        _refuse("allowed_token_ids", "allowed_token_ids has nothing that bad_words does not rule out; allow more.")
    return allowed


def _bad_words(fields: SamplingFields, limits: ModelLimits) -> tuple[tuple[int, ...], ...]:
    """Return every word's tokens, with and without a space before it."""
    if sum(map(len, fields.bad_words)) > MAX_BAD_CHARS:
        _refuse("bad_words", f"bad_words has more than {MAX_BAD_CHARS} characters altogether; shorten it.")
    words = [word.lstrip() or word for word in fields.bad_words]
    forms = [
        tuple(limits.tokenizer.encode(space + word, add_special_tokens=False)) for word in words for space in ("", " ")
    ]
    return tuple(dict.fromkeys(form for form in forms if form))


def _refuse(param: str, message: str) -> None:
    raise InvalidRequestError(message, param=param)
