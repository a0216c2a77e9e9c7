"""The engine without HTTP: `LLM(model).generate(prompts, SamplingParams(...))`, in a script or a notebook.

It runs the engine thread that the daemon runs; the thread that calls is to it what the event loop is to the daemon.

This is the one room of the engine that may import from `server`, and of that only what knows no HTTP: the tokenizer, the
chat template, stop strings, grammars, readers of calls and thoughts and the checks of fields are the daemon's own, so
that a prompt means the same in both. Like engine/build.py it only puts parts together, and nothing of the engine imports it. It stands here because this
is where people look for it.
"""

from engine.llm.job import CompletionOutput, RequestOutput, ToolCall
from engine.llm.offline import LLM
from engine.llm.params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "ToolCall"]
