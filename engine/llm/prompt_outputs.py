"""Results of the offline API's other calls, with vLLM's names: vectors, scores and beams."""

from __future__ import annotations

from dataclasses import dataclass

from engine.llm.job import RequestOutput
from engine.text.logprobs import PromptLogprobs
from engine.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The vector's length."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """The result of one prompt of LLM.embed."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The log likelihood of one text after another."""

    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequestOutput:
    """The result of one pair of LLM.score."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One beam: the prompt and its continuation."""

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: PromptLogprobs
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_output(output: RequestOutput, tokenizer: TextTokenizer) -> BeamSearchOutput:
    """Return the answers of a beam search as vLLM's `beam_search` returns them."""
    prompt = output.prompt
    if prompt is None:
        prompt = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=output.prompt_token_ids + answer.token_ids,
                text=prompt + answer.text,
                cum_logprob=answer.cumulative_logprob or 0.0,
                logprobs=answer.logprobs or [],
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
            )
            for answer in output.outputs
        ]
    )
