"""Log probabilities as clients get them: numbers that JSON can say, and bytes where a token is no whole character."""

from __future__ import annotations

import json
import math
from typing import Any

from engine.core.types import TokenLogprob
from server.choice import Delta
from server.protocol.logprobs import LOWEST, chat_logprobs, completion_logprobs, prompt_logprobs
from server.text import Tokenizer

HALF = 0xC3  # the first byte of a two-byte character


class OneByteEach:
    """A token is the byte of its own number."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


TOKENIZER: Tokenizer = OneByteEach()  # type: ignore[assignment]  # all that shaping asks for
# "a" was ruled out by the model itself, and drawn by a client's bias.
ENTRY = TokenLogprob(ord("a"), -math.inf, 3, ((ord("b"), -0.5), (HALF, -math.inf)))
DELTA = Delta(logprobs=[ENTRY], logprob_ids=[ord("a")], offsets=[4])


def test_completions() -> None:
    assert json.loads(completion_logprobs(TOKENIZER, DELTA, 2).json_bytes()) == {
        "text_offset": [4],
        "token_logprobs": [LOWEST],
        "tokens": ["a"],
        "top_logprobs": [{"b": -0.5, "bytes:\\xc3": LOWEST, "a": LOWEST}],
    }


def test_chat() -> None:
    def shaped(token: str, logprob: float, byte: int, **more: Any) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": [byte], **more}

    top = [shaped("b", -0.5, ord("b")), shaped("\ufffd", LOWEST, HALF)]
    answer = json.loads(chat_logprobs(TOKENIZER, DELTA).json_bytes())
    assert answer == {"content": [shaped("a", LOWEST, ord("a"), top_logprobs=top)], "refusal": None}


def test_prompt() -> None:
    first, second = prompt_logprobs(TOKENIZER, [None, ENTRY], 1)
    assert first is None
    assert second is not None
    assert {token: (entry.logprob, entry.rank, entry.decoded_token) for token, entry in second.items()} == {
        ord("b"): (-0.5, 1, "b"),
        ord("a"): (LOWEST, 3, "a"),
    }
