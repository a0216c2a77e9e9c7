"""As strict.py, for answers in channels: what is said is free, what is sent to a strict function is valid. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.core.errors import InvalidRequestError
from engine.text.channels import CHANNEL, CONSTRAIN, MARKS, MESSAGE, START
from engine.text.tools.offered import OfferedTool, embedded

_BETWEEN = {"whitespace_pattern": r"[\x20\x09\x0A\x0D]{0,40}"}


def free_text_grammar(tools: Sequence[OfferedTool], special_tokens: Mapping[str, int]) -> str:
    """Lark for messages of which some call `tools`. Raises InvalidRequestError for a model whose marks are no tokens."""
    if not special_tokens.keys() >= set(MARKS):
        raise InvalidRequestError(
            "tools cannot be used: the marks of this model's channels are no tokens, so strict cannot be enforced; leave it out.",
            param="tools",
        )
    start, channel, message, constrain, end = (
        f"<[{special_tokens[mark]}]>" for mark in (START, CHANNEL, MESSAGE, CONSTRAIN, "<|end|>")
    )
    indices = range(len(tools))
    lines = [
        f'start: message ({end} {start} "assistant" message)*',
        f"message: {channel} (said | /(analysis|commentary) to=functions\\./ behind) | / to=functions\\./ before",
        f"said: /analysis|commentary|final/ {message} TEXT",
        "TEXT: /(?s:.*)/",
        f"json: / ?/ ({constrain} /json/)? | / json/",
        "behind: " + " | ".join(f"behind_{index}" for index in indices),
        "before: " + " | ".join(f"before_{index}" for index in indices),
    ]
    for index, tool in enumerate(tools):
        arguments = tool.arguments(_BETWEEN) if tool.strict else embedded({"type": "object"}, _BETWEEN)
        lines += [
            f"arguments_{index}: {arguments}",
            f'behind_{index}: "{tool.name}" json {message} arguments_{index}',
            f'before_{index}: "{tool.name}" {channel} /analysis|commentary/ json {message} arguments_{index}',
        ]
    return "\n".join(lines)
