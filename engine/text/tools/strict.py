"""The grammar of an answer that may call tools, some of which are `strict`: free text, but for the calls in it.

Text is free until a mark of the dialect; what follows the mark is a call, and where its tool is strict its arguments are
valid against the tool's schema. A call without a mark, where the dialect has such, is told from other JSON by its tool's
name: an answer that begins as JSON cannot name a tool but to call it. In llguidance's Lark. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from engine.text.tools import strict_channels, strict_xml
from engine.text.tools.dialects import HARMONY
from engine.text.tools.offered import MAX_CALLS, OfferedTool, embedded
from engine.text.tools.parser import Dialect

_SPACE = r"[ \t\r\n]{0,20}"
_BETWEEN = {"whitespace_pattern": r"[\x20\x09\x0A\x0D]{0,40}"}
_FENCE = "```"  # stands before other things than calls as well


def free_text_grammar(
    tools: Sequence[OfferedTool], dialect: Dialect, special_tokens: Mapping[str, int], *, parallel: bool
) -> str:
    """Lark for any text in which calls of `tools` may come, in the dialect's way.

    Raises InvalidRequestError for what cannot be enforced in it.
    """
    if dialect is HARMONY:
        return strict_channels.free_text_grammar(tools, special_tokens)
    if dialect.is_xml:
        return strict_xml.free_text_grammar(tools, special_tokens, parallel=parallel)
    marks = [mark for mark in dialect.marks if not mark[0].startswith(_FENCE)]
    tags = " | ".join(f"tag_{index}" for index in range(len(marks)))
    lines = [f"start: ({tags}){'*' if parallel else '?'} TEXT" + (" | bare" if dialect.is_bare else "")]
    lines.append("TEXT: /(?s:.*)/" + (f" & ~{_bare_head(tools)}" if dialect.is_bare else ""))
    for index, mark in enumerate(marks):
        lines += _tag(index, mark, special_tokens)
    more = f"(/{_SPACE}[,;]{_SPACE}/ call){{0,{MAX_CALLS - 1}}}" if dialect.is_bare and parallel else ""
    in_list = (f"(/{_SPACE},{_SPACE}/ call){{0,{MAX_CALLS - 1}}} " if parallel else "") + f"/{_SPACE}\\]/"
    lines.append(f'calls: call {more} | "[" /{_SPACE}/ call {in_list}')
    for rule in ("call", *(("single", "listed") if dialect.is_bare else ())):
        lines.append(f"{rule}: " + " | ".join(f"{rule}_{index}" for index in range(len(tools))))
    if dialect.is_bare:
        lines.append(f"bare: single {more} | listed {in_list}")
    for index, tool in enumerate(tools):
        rest = f"arguments_{index} /{_SPACE}\\}}/"
        arguments = tool.arguments(_BETWEEN) if tool.strict else embedded({"type": "object"}, _BETWEEN)
        lines.append(f"arguments_{index}: {arguments}")
        lines.append(f"call_{index}: /{_head(tool.name)}/ {rest}")
        if dialect.leads_with_name:
            between = f"({_literal(dialect.name_end, special_tokens)})?" if dialect.name_end else ""
            lines[-1] += f' | "{tool.name}" {between} /{_SPACE}/ arguments_{index}'
        if dialect.is_bare:  # all that could still be text must be one lexeme
            lines.append(f"single_{index}: /{_SPACE}{_head(tool.name)}/ {rest}")
            lines.append(f"listed_{index}: /{_SPACE}\\[{_SPACE}{_head(tool.name)}/ {rest}")
    return "\n".join(lines)


def _tag(index: int, mark: tuple[str, str], special_tokens: Mapping[str, int]) -> list[str]:
    """Rules for text that ends with a mark, and for the calls behind it."""
    opening, closing = mark
    end = f"/{_SPACE}/ {_literal(closing, special_tokens)}" if closing else ""
    if opening in special_tokens:
        return [f"tag_{index}: TEXT {_literal(opening, special_tokens)} /{_SPACE}/ calls {end}"]
    return [f"begin_{index}[lazy]: TEXT {json.dumps(opening)}", f"tag_{index}: begin_{index} /{_SPACE}/ calls {end}"]


def _literal(mark: str, special_tokens: Mapping[str, int]) -> str:
    """A mark, which may be a token that no text spells."""
    return f"<[{special_tokens[mark]}]>" if mark in special_tokens else json.dumps(mark)


def _head(name: str) -> str:
    """What stands before a call's arguments."""
    kind = rf'("type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?'
    named = rf'"name"{_SPACE}:{_SPACE}"{name}"{_SPACE},{_SPACE}'
    return rf'\{{{_SPACE}{kind}{named}"(arguments|parameters)"{_SPACE}:{_SPACE}'


def _bare_head(tools: Sequence[OfferedTool]) -> str:
    """Text that begins as JSON and names a tool."""
    names = "|".join(tool.name for tool in tools)
    return rf'/\s*\[?\s*\{{(?s:.*)"name"\s*:\s*"({names})"(?s:.*)/'
