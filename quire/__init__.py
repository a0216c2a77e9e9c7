"""The import name of Quire: `from quire import LLM, SamplingParams`.

The names are imported on first use, so that `import quire` takes milliseconds and works without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.llm import (
        LLM,
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        SamplingParams,
        ScoringRequestOutput,
        StructuredOutputsParams,
        TextPrompt,
        TokensPrompt,
    )

    __version__: str

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
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Return a public name, importing the module that defines it."""
    if name == "__version__":
        from engine.system.version import VERSION

        return VERSION
    if name in __all__:
        import engine.llm

        return getattr(engine.llm, name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
