"""The engine without HTTP: `LLM(model).generate(prompts, SamplingParams())`.

The engine thread is the daemon's; the calling thread takes the place of the event loop. Fields, ranges, sentences,
templates, parsers and grammars are those of engine/text, which the daemon uses too, so a prompt means the same in both.
"""

from engine.llm.job import (
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    ToolCall,
)
from engine.llm.offline import LLM
from engine.llm.params import SamplingParams, StructuredOutputsParams
from engine.llm.prompts import TextPrompt, TokensPrompt

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
]
