"""From token ids to the text a client reads: incremental detokenization, stop strings, and where a text may be cut.

Everything here is pure and runs on the event loop, one object a choice. It knows the Tokenizer protocol, no HTTP and no
engine; engine/text/tokenizer.py implements the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What the model's generation_config recommends where a client names nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Tokenizer(Protocol):
    """What the server needs of a tokenizer. Everything but `encode` is called by the event loop thread only."""

    @property
    def vocab_size(self) -> int:
        """Ids 0 .. vocab_size - 1 can be decoded, added tokens included."""
        ...

    @property
    def max_token_chars(self) -> int:
        """The most characters that one token stands for."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a sequence, of the tokenizer and of the generation_config."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that skip_special_tokens leaves out of a text."""
        ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def description(self) -> Mapping[str, str | None]:
        """As a tokenizer_config.json says it: the special tokens' texts by role, and the chat template."""
        ...

    @property
    def sampling_defaults(self) -> SamplingDefaults: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, never truncated. Long texts are encoded on a worker thread: must not hold the GIL."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of some ids, with U+FFFD for broken UTF-8. Called per token: must cost microseconds."""
        ...

    def to_json(self) -> str:
        """All of it, as a tokenizer.json has it."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one id stands for: its raw bytes, perhaps part of a character; a special token's own name.

        Empty for an id that the model's vocabulary has and the tokenizer's has not.
        """
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt of a conversation, special tokens spelled out: encode it with add_special_tokens=False.

        Raises InvalidRequestError(param="messages") where there is no template or it refuses the messages.
        """
        ...


REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 6  # of the prompt: enough to tell whether the first token continues a word or a character
MAX_BYTES = 4  # of a character
MAX_HELD_TOKENS = 32  # without whole text: far beyond MAX_BYTES, so what is held is no character


class Detokenizer:
    """Turns ids into text as they come, whole characters only.

    Decoding one id alone loses what joins it to its neighbours (a leading space, half a character), so a short window
    is decoded twice, without and with the new id; what the second has more is new. A window that ends in a broken
    character is held back until it is whole, or until `flush`.
    """

    __slots__ = ("_known", "_num_settled", "_skip", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        for size in range(NUM_CONTEXT_TOKENS, NUM_CONTEXT_TOKENS + MAX_BYTES):
            self._window = list(context[-size:])
            if not self._decode().startswith(REPLACEMENT):
                break  # else the window begins within a character; one of these sizes does not
        self._num_settled = len(self._window)
        self._known = len(self._decode().rstrip(REPLACEMENT))  # a prompt may end within a character

    def push(self, token_id: int) -> str:
        """The text that this id settles; empty while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode()
        is_settled = len(text) > self._known and not text.endswith(REPLACEMENT)
        if not is_settled and len(self._window) - self._num_settled < MAX_HELD_TOKENS:
            return ""
        delta = text[self._known :]
        del self._window[: self._num_settled]
        self._num_settled = len(self._window)
        self._known = len(self._decode())
        return delta

    def flush(self) -> str:
        """What is still held back, U+FFFD where a character was never completed. Ends the stream."""
        return self._decode()[self._known :] if len(self._window) > self._num_settled else ""

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)


class StopStrings:
    """Finds the stop string that is completed first, and holds back text that may still become one.

    Of two that are completed by the same character the longer one wins. The result does not depend on how the text was
    cut into pieces.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show; `matched` tells whether it is the last."""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        safe = len(text) - self._num_undecided(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return len(tail)
        return 0
