"""What the APIs share that only read prompts, to make vectors or scores of them: nothing is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from engine.core.errors import ContextLengthError, InvalidRequestError
from engine.core.types import Pooling, SamplingParams
from server.protocol.base import RequestBody
from server.protocol.limits import Limits
from server.protocol.sampling import MAX_CACHE_SALT, MAX_DEADLINE_MS, MAX_USER

MAX_INPUTS = 2048  # of one request, as OpenAI has it


class ReadingBody(RequestBody):
    """The request, but for what is read."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"request_id"})
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "stream": (False,),
        "truncate_prompt_tokens": (),
        "truncation_side": ("left", "right"),
    }

    model: str | None = None
    add_special_tokens: bool = True
    include_metrics: bool = False
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    deadline_ms: int | None = Field(None, ge=1, le=MAX_DEADLINE_MS)
    max_queue_ms: int | None = Field(None, ge=1, le=MAX_DEADLINE_MS)
    cache_salt: str = Field("", max_length=MAX_CACHE_SALT)
    user: str = Field("", max_length=MAX_USER)

    retained_s: ClassVar[float] = 0.0

    @property
    def tenant(self) -> str:
        """Whom it says it is from."""
        return self.user

    def dropped_hints(self, limits: Limits) -> list[str]:
        """Return the priority, where the server serves in another order."""
        return ["priority"] if self.priority and not limits.has_priorities else []

    def reading_params(self, *, pooling: Pooling | None = None, prompt_logprobs: int | None = None) -> SamplingParams:
        """Return the engine's parameters."""
        return SamplingParams(max_tokens=0, pooling=pooling, prompt_logprobs=prompt_logprobs)

    def check_lengths(self, prompts: Sequence[Sequence[int]], param: str, limits: Limits) -> None:
        """Raise ContextLengthError for one that does not fit."""
        longest, most = max(map(len, prompts)), min(limits.max_model_len, limits.pool_tokens)
        if longest > most:
            raise ContextLengthError(
                f"At most {most} tokens can be read at once here, but an item of {param} has {longest}; shorten it.",
                param=param,
                num_prompt=longest,
                limit=most,
            )


def check_num_inputs(num: int, param: str) -> None:
    """Raise InvalidRequestError for more than one request may have."""
    if num > MAX_INPUTS:
        raise InvalidRequestError(f"{param} has {num} items; one request may have at most {MAX_INPUTS}.", param=param)
