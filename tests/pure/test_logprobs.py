"""Log probabilities as clients get them: numbers that JSON can say, and bytes where a token is no whole character."""

from __future__ import annotations

import json
import math
from typing import Any

from engine.core.types import TokenLogprob
from engine.text.chat.choice import Delta, DeltaLogprobs
from engine.text.tokenizer import LOWEST, TextTokenizer, prompt_logprobs
from server.openai.logprobs import chat_logprobs, completion_logprobs

HALF = 0xC3  # the first byte of a two-byte character


class OneByteEach:
    """A token is the byte of its own number."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


TOKENIZER: TextTokenizer = OneByteEach()  # type: ignore[assignment]  # all that shaping asks for
# "a" was ruled out by the model itself, and drawn by a client's bias.
ENTRY = TokenLogprob(ord("a"), -math.inf, 3, ((ord("b"), -0.5), (HALF, -math.inf)))
DELTA = Delta(scored=DeltaLogprobs([ENTRY], [ord("a")], [4]))


def test_completions() -> None:
    assert json.loads(completion_logprobs(TOKENIZER, DELTA, 2).json_bytes()) == {
        "text_offset": [4],
        "token_logprobs": [LOWEST],
        "tokens": ["a"],
        "top_logprobs": [{"b": -0.5, "bytes:\\xc3": LOWEST, "a": LOWEST}],
    }


def test_of_two_tokens_with_one_text_the_likelier_counts() -> None:
    class Doubled(OneByteEach):
        """Ids 256 and up spell the same bytes once more, as byte tokens beside a vocabulary's letters do."""

        def token_bytes(self, token_id: int) -> bytes:
            return bytes([token_id % 256])

    doubled: TextTokenizer = Doubled()  # type: ignore[assignment]
    entry = TokenLogprob(256 + ord("b"), -4.0, 9, ((ord("b"), -0.5), (256 + ord("b"), -4.0)))
    delta = Delta(scored=DeltaLogprobs([entry], [entry.token_id], [0]))
    shaped = completion_logprobs(doubled, delta, 2)
    assert (shaped.token_logprobs, shaped.top_logprobs) == ([-4.0], [{"b": -0.5}])
    told_apart = completion_logprobs(doubled, delta, 2, as_ids=True)
    assert told_apart.top_logprobs == [{"token_id:98": -0.5, "token_id:354": -4.0}]
    assert told_apart.tokens == ["token_id:354"]
    [token] = chat_logprobs(doubled, delta.logprobs, as_ids=True).content
    assert [token.token, *(top.token for top in token.top_logprobs)] == ["token_id:354", "token_id:98", "token_id:354"]


def test_chat() -> None:
    def shaped(token: str, logprob: float, byte: int, **more: Any) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": [byte], **more}

    top = [shaped("b", -0.5, ord("b")), shaped("\ufffd", LOWEST, HALF)]
    answer = json.loads(chat_logprobs(TOKENIZER, DELTA.logprobs).json_bytes())
    assert answer == {"content": [shaped("a", LOWEST, ord("a"), top_logprobs=top)], "refusal": None}


def test_prompt() -> None:
    first, second = prompt_logprobs(TOKENIZER, [None, ENTRY], 1)
    assert first is None
    assert second is not None
    assert {token: (entry.logprob, entry.rank, entry.decoded_token) for token, entry in second.items()} == {
        ord("b"): (-0.5, 1, "b"),
        ord("a"): (LOWEST, 3, "a"),
    }
