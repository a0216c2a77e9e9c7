"""From token ids to text: incremental detokenization, and stop strings. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.tokenizer import TextTokenizer
from engine.text.types import held_back

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 6  # of the prompt: enough to know whether the first token continues a word or a character
MAX_BYTES = 4  # of a character
MAX_HELD_TOKENS = 32  # without whole text: far beyond MAX_BYTES, so they are not a character


class Detokenizer:
    """Turns ids into text as they arrive, whole characters only.

    Decoding one id alone loses its connection to its neighbours (a leading space, half a character), so a short window
    is decoded without and with the new id; the difference is the new text. A window that ends in a broken character is
    held back until the character is whole, or until `flush`.
    """

    __slots__ = ("_known", "_num_settled", "_skip", "_tokenizer", "_window")

    def __init__(self, tokenizer: TextTokenizer, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        for size in range(NUM_CONTEXT_TOKENS, NUM_CONTEXT_TOKENS + MAX_BYTES):
            self._window = list(context[-size:])
            if not self._decode().startswith(REPLACEMENT):
                break  # else the window begins within a character; one of these sizes does not
        self._num_settled = len(self._window)
        self._known = len(self._decode().rstrip(REPLACEMENT))  # a prompt may end within a character

    def push(self, token_id: int) -> str:
        """Return the text that this id completes; empty while a character is incomplete."""
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
        """Return the text that is held back, U+FFFD for an incomplete character."""
        return self._decode()[self._known :] if len(self._window) > self._num_settled else ""

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)


class StopStrings:
    """Finds the stop string that is completed first, and holds back text for it.

    Of two that end at the same character, the longer one wins. The result does not depend on how the text was cut.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is safe to show; it is the last if `matched` is set."""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        safe = len(text) - held_back(text, self._stops)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """Return the held text, which did not become a stop string."""
        held, self._held = self._held, ""
        return held
