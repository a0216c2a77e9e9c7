"""Names the beginnings of a request's prompt, so that a router can tell which prompts begin alike.

The body is read as the daemon reads it and its prompt is tokenised, up to MAX_CHARS. Names are digests of a tenant's key,
the salt, the adapter and all tokens so far: they are of no use outside the router. Any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

from engine.core.errors import QuireError
from engine.core.kv.prefix_cache import chain_next, chain_root
from engine.text.chat.chat_format import ChatFormat
from engine.text.chat.limits import ModelLimits
from engine.text.requests.chat_preprocessor import ChatPreprocessor
from engine.text.tokenizer import TextTokenizer
from server.anthropic.messages import MessagesBody
from server.openai.chat import ChatBody
from server.openai.responses.body import ResponsesBody

BLOCK_TOKENS = 32
MAX_CHARS = 1 << 17  # of a prompt; what follows does not decide where it goes
_UNBOUNDED = 1 << 30


class PromptBlocks:
    """Finds the blocks of prompts, with one model's tokenizer and chat template."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        limits = ModelLimits(
            vocab_size=tokenizer.vocab_size,
            max_model_len=_UNBOUNDED,
            pool_tokens=_UNBOUNDED,
            max_logprobs=_UNBOUNDED,
            has_priorities=True,
            tokenizer=tokenizer,
            chat_format=ChatFormat.of(tokenizer, tool_call_parser="auto", reasoning_parser="auto"),
        )
        self._preprocessor = ChatPreprocessor(limits)
        self._readers: Mapping[str, Callable[[Any], list[int]]] = {
            "/v1/completions": self._completion,
            "/v1/chat/completions": lambda fields: self._chat(ChatBody.model_validate(fields)),
            "/v1/messages": lambda fields: self._chat(MessagesBody.model_validate(fields).to_chat()),
            "/v1/responses": lambda fields: self._chat(ResponsesBody.model_validate(fields).to_chat(())),
        }

    def of(self, path: str, body: bytes, key: str = "") -> list[bytes]:
        """Return the names of a prompt's full blocks, in order; none where the daemon will refuse the request."""
        reader = self._readers.get(path)
        if reader is None:
            return []
        try:
            fields = json.loads(body)
            tokens = reader(fields)
            root = chain_root(str(fields.get("cache_salt") or ""), owner=f"{key}\n{fields.get('model')}")
        except (QuireError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []
        names = [root]
        for begin in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            names.append(chain_next(names[-1], tokens[begin : begin + BLOCK_TOKENS]))
        return [_short(name) for name in names[1:]]

    def _completion(self, fields: Mapping[str, Any]) -> list[int]:
        prompt = fields["prompt"]
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]  # of several prompts, the first one decides
        return self._encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt[:MAX_CHARS]]

    def _chat(self, body: ChatBody) -> list[int]:
        return self._encode(self._preprocessor.render(body), add_special_tokens=body.add_special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text[:MAX_CHARS], add_special_tokens=add_special_tokens)


def _short(name: bytes) -> bytes:
    return blake2b(name, digest_size=16).digest()
