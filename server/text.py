"""From token ids to the text a client reads: incremental detokenization, stop strings, and where a text may be cut.

Everything here is pure and runs on the event loop, one object a choice. It knows the Tokenizer protocol, no HTTP and no
engine; server/tokenizer.py implements the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What the model's generation_config recommends where a client names nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Tokenizer(Protocol):
    """What the server needs of a tokenizer. Used by the event loop thread only."""

    @property
    def vocab_size(self) -> int:
        """Ids 0 .. vocab_size - 1 can be decoded, added tokens included."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a sequence, of the tokenizer and of the generation_config."""
        ...

    @property
    def sampling_defaults(self) -> SamplingDefaults: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, never truncated."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of some ids, with U+FFFD for broken UTF-8. Called per token: must cost microseconds."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one id stands for: its raw bytes, perhaps part of a character; a special token's own name."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt of a conversation, special tokens spelled out: encode it with add_special_tokens=False.

        Raises InvalidRequestError(param="messages") where there is no template or it refuses the messages.
        """
        ...
