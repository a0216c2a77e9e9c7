"""The tokenizer as LLM.get_tokenizer returns it, with the methods of transformers' that scripts use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.text.tokenizer import TextTokenizer


class PlainTokenizer:
    """Encodes, decodes and renders chats exactly as the engine does. Any thread."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return {"input_ids": ids, "attention_mask": ones}."""
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self._tokenizer.vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        """The ids that end an answer."""
        return sorted(self._tokenizer.eos_token_ids)

    @property
    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's own end token, or else one of `eos_token_ids`."""
        own = self._tokenizer.special_tokens.get(str(self._tokenizer.description.get("eos_token")))
        return own if own is not None else next(iter(self.eos_token_ids), None)

    @property
    def chat_template(self) -> str | None:
        """The template in Jinja, or None."""
        return self._tokenizer.description.get("chat_template")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises InvalidRequestError for bad Unicode."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of one id or of several."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """Return a conversation as a prompt, in ids or as text. Raises InvalidRequestError."""
        template = self._tokenizer.chat_template
        if template is None:
            raise InvalidRequestError("This model has no chat template; give one to LLM(chat_template=...).")
        text = template.render(
            conversation,
            tools=tools or (),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text
