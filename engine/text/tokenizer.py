"""A model's tokenizer, its special tokens and its chat template; incremental detokenization, and stop strings.

tokenizer_files.py loads a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import tokenizers

from engine.core.errors import ConfigError, InvalidRequestError
from engine.core.types import TokenLogprob
from engine.text.chat_template import ChatTemplate
from engine.text.grammars.spec import VocabularySource
from engine.text.types import SamplingDefaults, held_back

# Text in several scripts, which another model's tokenizer encodes to other ids.
PROBE = (
    "The quick brown fox jumps over 1,234,567 lazy dogs; it's \u00fcber-schnell, \u00e9l\u00e9gant and 42% cheaper.\n"
    "def f(x):\n    return {'a': [x ** 2, None]}  # \u0434\u0430, \u4f60\u597d, \U0001f98a\n"
)


def _byte_of_letter() -> dict[str, int]:
    """Return byte-level BPE's letters: printable bytes, and U+0100 on for others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()
_LONG_DECODE = 1024  # tokens, about 0.3 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer configuration that the `tokenizers` library does not hold."""

    special_tokens: Mapping[str, str]  # "bos_token" and the like, as chat templates call them
    eos_token_ids: frozenset[int]
    chat_template: str | None
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    sizes: tuple[int, int] | None = None  # number of ids, characters of the longest token; None: not known


class TextTokenizer:
    """A model's tokenizer, its special tokens and its chat template. Any thread."""

    def __init__(self, backend: tokenizers.Tokenizer, vocabulary: TokenizerConfig) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self.marks = tuple(self._added.values())  # special ones and others, such as <think>
        # llguidance takes every added token in angle brackets for special: no text of a grammar spells it.
        in_brackets = {mark: token_id for token_id, mark in self._added.items() if mark[:1] + mark[-1:] == "<>"}
        self.grammar_tokens = self.special_tokens | in_brackets
        self._byte_level = "ByteLevel" in str(backend.decoder)
        self.chat_template = (
            ChatTemplate(vocabulary.chat_template, vocabulary.special_tokens) if vocabulary.chat_template else None
        )
        self.vocab_size, self.max_token_chars = vocabulary.sizes or _sizes(backend)
        self.lengths = lengths_of(backend.decode)
        self._num_ids: int | None = None  # of the model, where the tokenizer has more
        self.eos_token_ids = vocabulary.eos_token_ids
        self.description = {**vocabulary.special_tokens, "chat_template": vocabulary.chat_template}
        self.sampling_defaults = vocabulary.sampling_defaults

    def encode(self, text: str | tuple[str, str], *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, or of two with what stands between them. Raises InvalidRequestError for bad Unicode."""
        try:
            # Unlike `encode` this releases the GIL; otherwise a long text would stop the engine on any thread.
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:  # the library's error for half of a surrogate pair, which JSON can spell
            raise InvalidRequestError("The text is not valid Unicode: it holds half of a surrogate pair.") from error
        if self._num_ids is not None and (beyond := max(ids, default=0)) >= self._num_ids:
            raise InvalidRequestError(
                f"The text holds {self._backend.id_to_token(beyond)!r:.80}, the tokenizer's id {beyond}, and the model has "
                f"{self._num_ids} tokens."
            )
        return ids

    @cached_property
    def num_around(self) -> tuple[int, int]:
        """Return how many special tokens come before a text and behind it."""
        mask = self._backend.encode_batch(["a"], add_special_tokens=True)[0].special_tokens_mask
        before, behind = (next((at for at, each in enumerate(side) if not each), 0) for side in (mask, mask[::-1]))
        return before, behind

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of some ids, with U+FFFD for broken UTF-8."""
        if len(token_ids) > _LONG_DECODE:  # unlike `decode` this releases the GIL
            return self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def hold_to(self, vocab_size: int) -> None:
        """Refuse from now on text with ids beyond the model's vocabulary.

        Raises ConfigError if ordinary text has such ids, because the tokenizer is another model's.
        """
        self.eos_token_ids = frozenset(token_id for token_id in self.eos_token_ids if 0 <= token_id < vocab_size)
        if self.vocab_size <= vocab_size:
            return
        self._num_ids = vocab_size
        try:
            self.encode(PROBE, add_special_tokens=True)
        except InvalidRequestError as error:
            raise ConfigError(f"{error} Name the model's own tokenizer with --tokenizer.") from error

    def close(self) -> None:
        """End the process of the chat template. Idempotent."""
        if self.chat_template is not None:
            self.chat_template.close()

    def vocabulary(self, vocab_size: int) -> VocabularySource:
        """Return what grammars need to know of the tokens; the model may have more. Takes 30 ms for 49,152 tokens."""
        size = max(vocab_size, self.vocab_size)
        marks = tuple(mark for mark in self.grammar_tokens if mark not in self.special_tokens)
        return VocabularySource(self._backend.to_str(), size, self.eos_token_ids, tuple(self.special_tokens), marks)

    def for_transformers(self) -> Any:
        """Return a copy as a tokenizer of transformers, whose `apply_chat_template` returns a text or a list of ids."""
        from transformers import PreTrainedTokenizerFast  # seconds to import

        made = PreTrainedTokenizerFast(
            tokenizer_object=self._backend, clean_up_tokenization_spaces=False, **self.description
        )
        made.apply_chat_template = partial(made.apply_chat_template, return_dict=False)  # as before its version 5
        return made

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id; empty for an id without a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF_LETTER[letter] for letter in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()


def _sizes(backend: tokenizers.Tokenizer) -> tuple[int, int]:
    """Return the number of ids and the length of the longest token; slow."""
    ids = backend.get_vocab(with_added_tokens=True)
    return max(ids.values()) + 1, max(map(len, ids))


LOWEST = -9999.0  # stands for minus infinity, which JSON cannot express


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """The log probability of one token; `rank` is None where it was not computed."""

    logprob: float = field(metadata={"description": "The natural logarithm of the probability."})
    rank: int | None = field(metadata={"description": "The token's place by probability, from 1."})
    decoded_token: str = field(metadata={"description": "The token's text."})


# One entry for each token: by token id, the token itself and its best alternatives. None for the first of a prompt.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


def token_text(tokenizer: TextTokenizer, token_id: int) -> str:
    """Return a token as text; part of a character is spelled as OpenAI does."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """Return a log probability that JSON can express."""
    return max(logprob, LOWEST)


def prompt_logprobs(tokenizer: TextTokenizer, entries: Sequence[TokenLogprob | None], num_top: int) -> PromptLogprobs:
    """Return the log probabilities of tokens, with `num_top` alternatives each."""
    return [None if entry is None else _by_id(tokenizer, entry, num_top) for entry in entries]


def _by_id(tokenizer: TextTokenizer, entry: TokenLogprob, num_top: int) -> dict[int, PromptLogprob]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)]
    ranked.append((entry.token_id, entry.logprob, entry.rank))
    return {
        token_id: PromptLogprob(finite(logprob), rank, token_text(tokenizer, token_id))
        for token_id, logprob, rank in ranked
    }


REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 6  # of the prompt: enough to know whether the first token continues a word or a character
MAX_BYTES = 4  # of a character
MAX_HELD_TOKENS = 32  # without whole text: far beyond MAX_BYTES, so they are not a character


class Lengths(dict[int, int]):
    """Characters of the text of each id alone, decoded once: that takes a quarter of a token's time on the event loop."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        super().__init__()
        self.decode = decode

    def __missing__(self, token_id: int) -> int:
        length = self[token_id] = len(self.decode([token_id]))
        return length


def lengths_of(decode: Callable[..., str]) -> list[Lengths]:
    """Return the lengths with special tokens, and without."""
    return [Lengths(partial(decode, skip_special_tokens=skips)) for skips in (False, True)]


class Detokenizer:
    """Turns ids into text as they arrive, whole characters only.

    Decoding one id alone loses its connection to its neighbours (a leading space, half a character), so a short window
    is decoded without and with the new id; the difference is the new text. A window that ends in a broken character is
    held back until the character is whole, or until `flush`.
    """

    __slots__ = ("_decode", "_known", "_lengths", "_num_settled", "_window")

    def __init__(self, tokenizer: TextTokenizer, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._lengths = tokenizer.lengths[skip_special_tokens]
        self._decode = self._lengths.decode
        for size in range(NUM_CONTEXT_TOKENS, NUM_CONTEXT_TOKENS + MAX_BYTES):
            self._window = list(context[-size:])
            if not self._decode(self._window).startswith(REPLACEMENT):
                break  # else the window begins within a character; one of these sizes does not
        self._num_settled = len(self._window)
        text, raw = self._decode(self._window), b"".join(map(tokenizer.token_bytes, self._window[-MAX_BYTES:]))
        # A prompt may end within a character, or with this one.
        self._known = len(text if raw.endswith(REPLACEMENT.encode()) else text.rstrip(REPLACEMENT))

    def push(self, token_id: int) -> str:
        """Return the text that this id completes; empty while a character is incomplete."""
        window, known = self._window, self._known
        window.append(token_id)
        text = self._decode(window)
        is_settled = len(text) > known and not text.endswith(REPLACEMENT)
        if not is_settled and len(window) - self._num_settled < MAX_HELD_TOKENS:
            return ""
        del window[: self._num_settled]
        self._num_settled = len(window)
        self._known = self._lengths[token_id] if len(window) == 1 else len(self._decode(window))
        return text[known:]

    def flush(self) -> str:
        """Return the text that is held back, U+FFFD for an incomplete character."""
        return self._decode(self._window)[self._known :] if len(self._window) > self._num_settled else ""


class StopStrings:
    """Finds the stop string that is completed first, and holds back text for it.

    Of two that end at the same character, the longer one wins. The result does not depend on how the text was cut.
    """

    __slots__ = ("_held", "_include", "_stops", "matched", "num_cut")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None
        self.num_cut = 0  # characters that are not shown

    def push(self, text: str) -> str:
        """Return the text that is safe to show; it is the last if `matched` is set."""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held, shown = "", text[: end if self._include else start]
            self.num_cut = len(text) - len(shown)
            return shown
        safe = len(text) - held_back(text, self._stops)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Return the held text, which did not become a stop string."""
        held, self._held = self._held, ""
        return held
