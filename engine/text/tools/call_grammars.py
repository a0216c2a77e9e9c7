"""Grammars of answers that call tools, in llguidance's Lark. Pure.

    forced_grammar      nothing but calls, or a JSON answer instead: for calls that must be made, and for calls beside an
                        answer that has a schema, which alone would rule them out
    free_text_grammar   free text with calls in it, valid ones where their tool is `strict`

Free text ends at a mark of the format; a call follows the mark. Where a format has calls without a mark, the tool's name
distinguishes them from other JSON: an answer that begins as JSON cannot name a tool except to call it. Each tool's schema
is a separate grammar, so its references mean that schema's definitions.

llguidance's structural tags do not suffice: a tag begins with one literal text, without the space and the spellings that
models vary, its number is not bounded, and a call needs a mark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from engine.core.errors import InvalidRequestError
from engine.text.channels import CHANNEL, CONSTRAIN, MARKS, MESSAGE, START
from engine.text.grammars.spec import GrammarSpec, close_schema
from engine.text.tools.formats import FORCED, HARMONY, ToolFormat
from engine.text.tools.xml_parser import (
    CLOSING,
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    OPENING,
    PARAMETER,
    PARAMETER_NAME,
    resolved,
    type_name,
    types_at,
    types_of,
)

MAX_CALLS = 16  # of one answer that a grammar makes
_OPEN_ENDED = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf")
# As models are shown their JSON: one space after a comma and a colon.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SPACE = r"[ \t\r\n]{0,20}"
_BETWEEN = {"whitespace_pattern": r"[\x20\x09\x0A\x0D]{0,40}"}  # between the JSON tokens of a call in free text
_FENCE = "```"  # stands before other things than calls as well


class OfferedTool(NamedTuple):
    """A tool that an answer may call."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def arguments(self, options: Mapping[str, Any]) -> str:
        """Return Lark for arguments that are valid against the schema.

        Keywords that cannot be enforced are refused if the tool is strict, and left out otherwise. A schema that does
        not mention further properties has none, because a small model would write them without end; so a tool without
        a schema has no arguments.
        """
        schema: dict[str, Any] = {"type": "object", **self.parameters}
        if not any(key in schema for key in _OPEN_ENDED):
            schema["additionalProperties"] = False
        return _embedded(close_schema(schema) if self.strict else schema, {**options, "lenient": not self.strict})

    def free_arguments(self) -> str:
        """Return Lark for arguments in free text: any object, or the strict schema's."""
        return self.arguments(_BETWEEN) if self.strict else _embedded({"type": "object"}, _BETWEEN)


def _embedded(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return Lark that embeds a schema, with text that looks like GBNF escaped."""
    return "%json " + json.dumps({**schema, "x-guidance": options}).replace("::=", ":\\u003a=")


def _literal(mark: str, special_tokens: Mapping[str, int]) -> str:
    """Return Lark for a mark, which may be a token that no text spells."""
    return f"<[{special_tokens[mark]}]>" if mark in special_tokens else json.dumps(mark)


def _any_of(rule: str, num: int) -> str:
    return " | ".join(f"{rule}_{index}" for index in range(num))


# -- forced calls ------------------------------------------------------------------------------------------------------


def forced_grammar(
    tools: Sequence[OfferedTool],
    tool_format: ToolFormat,
    *,
    max_calls: int | None,
    answer: GrammarSpec | None = None,
) -> str:
    """Return Lark for calls in forced_format's format, or a JSON `answer` instead."""
    more = (max_calls or MAX_CALLS) - 1
    lines = [
        "start: calls" + (" | answer" if answer else ""),
        f"calls: {_forced_calls(tool_format, more)}",
        f"call: {_any_of('call', len(tools))}",
    ]
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "arguments": ')
        lines += [f'call_{index}: {head} arguments_{index} "}}"', f"arguments_{index}: {tool.arguments(_SPACING)}"]
    if answer is not None:
        schema = json.loads(answer.text)
        spacing = {"whitespace_pattern": answer.whitespace} if answer.whitespace else {"whitespace_flexible": False}
        lines.append(
            f"answer: {_embedded({} if schema is True else schema, {**spacing, 'lenient': answer.is_lenient})}"
        )
    return "\n".join(lines)


def _forced_calls(tool_format: ToolFormat, more: int) -> str:
    if tool_format is FORCED:
        return f'"[" call (", " call){{0,{more}}} "]"' if more else '"[" call "]"'
    [(opening, closing)] = tool_format.marks
    one = f"{json.dumps(opening + chr(10))} call {json.dumps(chr(10) + closing)}"
    return f'{one} ("\\n" {one}){{0,{more}}}' if more else one


# -- calls in free text ------------------------------------------------------------------------------------------------


def free_text_grammar(
    tools: Sequence[OfferedTool], tool_format: ToolFormat, special_tokens: Mapping[str, int], *, parallel: bool
) -> str:
    """Return Lark for free text with calls in it. Raises InvalidRequestError."""
    if tool_format is HARMONY:
        return _channel_grammar(tools, special_tokens)
    if tool_format.is_xml:
        return _xml_grammar(tools, special_tokens, parallel=parallel)
    return _json_grammar(tools, tool_format, special_tokens, parallel=parallel)


def _json_grammar(
    tools: Sequence[OfferedTool], tool_format: ToolFormat, special_tokens: Mapping[str, int], *, parallel: bool
) -> str:
    marks = [mark for mark in tool_format.marks if not mark[0].startswith(_FENCE)]
    is_bare = tool_format.is_bare
    lines = [f"start: ({_any_of('tag', len(marks))}){'*' if parallel else '?'} TEXT" + (" | bare" if is_bare else "")]
    lines.append("TEXT: /(?s:.*)/" + (f" & ~{_bare_head(tools)}" if is_bare else ""))
    for index, mark in enumerate(marks):
        lines += _tag(index, mark, special_tokens)
    more = f"(/{_SPACE}[,;]{_SPACE}/ call){{0,{MAX_CALLS - 1}}}" if is_bare and parallel else ""
    in_list = (f"(/{_SPACE},{_SPACE}/ call){{0,{MAX_CALLS - 1}}} " if parallel else "") + f"/{_SPACE}\\]/"
    lines.append(f'calls: call {more} | "[" /{_SPACE}/ call {in_list}')
    lines += [f"{rule}: {_any_of(rule, len(tools))}" for rule in ("call", *(("single", "listed") if is_bare else ()))]
    if is_bare:
        lines.append(f"bare: single {more} | listed {in_list}")
    for index, tool in enumerate(tools):
        rest = f"arguments_{index} /{_SPACE}\\}}/"
        lines.append(f"arguments_{index}: {tool.free_arguments()}")
        lines.append(f"call_{index}: /{_head(tool.name)}/ {rest}")
        if tool_format.leads_with_name:
            between = f"({_literal(tool_format.name_end, special_tokens)})?" if tool_format.name_end else ""
            lines[-1] += f' | "{tool.name}" {between} /{_SPACE}/ arguments_{index}'
        if is_bare:  # everything that could still be text must be one lexeme
            lines.append(f"single_{index}: /{_SPACE}{_head(tool.name)}/ {rest}")
            lines.append(f"listed_{index}: /{_SPACE}\\[{_SPACE}{_head(tool.name)}/ {rest}")
    return "\n".join(lines)


def _tag(index: int, mark: tuple[str, str], special_tokens: Mapping[str, int]) -> list[str]:
    """Return the rules for text that ends with a mark, and for the calls after it."""
    opening, closing = mark
    end = f"/{_SPACE}/ {_literal(closing, special_tokens)}" if closing else ""
    if opening in special_tokens:
        return [f"tag_{index}: TEXT {_literal(opening, special_tokens)} /{_SPACE}/ calls {end}"]
    return [f"begin_{index}[lazy]: TEXT {json.dumps(opening)}", f"tag_{index}: begin_{index} /{_SPACE}/ calls {end}"]


def _head(name: str) -> str:
    """Return a regex of the text before a call's arguments."""
    kind = rf'("type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?'
    named = rf'"name"{_SPACE}:{_SPACE}"{name}"{_SPACE},{_SPACE}'
    return rf'\{{{_SPACE}{kind}{named}"(arguments|parameters)"{_SPACE}:{_SPACE}'


def _bare_head(tools: Sequence[OfferedTool]) -> str:
    """Return a regex of text that begins as JSON and names a tool."""
    names = "|".join(tool.name for tool in tools)
    return rf'/\s*\[?\s*\{{(?s:.*)"name"\s*:\s*"({names})"(?s:.*)/'


# -- calls in channels -------------------------------------------------------------------------------------------------


def _channel_grammar(tools: Sequence[OfferedTool], special_tokens: Mapping[str, int]) -> str:
    """Return Lark for messages in channels. Raises InvalidRequestError."""
    if not special_tokens.keys() >= set(MARKS):
        raise InvalidRequestError(
            "tools cannot be used: the marks of this model's channels are no tokens, so strict cannot be enforced; leave it out.",
            param="tools",
        )
    start, channel, message, constrain, end = (
        _literal(mark, special_tokens) for mark in (START, CHANNEL, MESSAGE, CONSTRAIN, "<|end|>")
    )
    lines = [
        f'start: message ({end} {start} "assistant" message)*',
        f"message: {channel} (said | /(analysis|commentary) to=functions\\./ behind) | / to=functions\\./ before",
        f"said: /analysis|commentary|final/ {message} TEXT",
        "TEXT: /(?s:.*)/",
        f"json: / ?/ ({constrain} /json/)? | / json/",
        f"behind: {_any_of('behind', len(tools))}",
        f"before: {_any_of('before', len(tools))}",
    ]
    for index, tool in enumerate(tools):
        lines += [
            f"arguments_{index}: {tool.free_arguments()}",
            f'behind_{index}: "{tool.name}" json {message} arguments_{index}',
            f'before_{index}: "{tool.name}" {channel} /analysis|commentary/ json {message} arguments_{index}',
        ]
    return "\n".join(lines)


# -- calls in XML ------------------------------------------------------------------------------------------------------
# Parameters come in the schema's order. A string is the text before its end mark, so a keyword that restricts a string,
# other than to a list of values, cannot be enforced and is refused.

_XML_BETWEEN = {**_BETWEEN, "lenient": False}
_XML_ENDS = (END_PARAMETER, "\\n" + PARAMETER, "\\n" + END_FUNCTION)  # texts that end a string, so it cannot have them
_SLASH = "\\/"
_UNENFORCED = (
    "pattern", "format", "minLength", "maxLength", "contentEncoding", "contentMediaType", "allOf", "not", "if",
)  # fmt: skip
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf")
_RESTRICTING = frozenset({"type", "enum", "const", *_ALTERNATIVES, *_UNENFORCED})  # others do not restrict a string
_MAX_DEPTH = 16  # of alternatives in alternatives ...
_MAX_PARTS = 1024  # ... which multiply: a few references can make billions


def _xml_grammar(tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
    """Return Lark for text with XML calls in it. Raises InvalidRequestError."""
    is_token, space = OPENING in special_tokens, f"/{_SPACE}/"
    opening = _literal(OPENING, special_tokens)
    lines = [
        f"start: (tagged | bare){'*' if parallel else '?'} TEXT",
        "TEXT: /(?s:.*)/",
        f"opened{'' if is_token else '[lazy]'}: TEXT {opening}",
        f"function[lazy]: TEXT {json.dumps(FUNCTION)}",
        f"end: {space} {_literal(CLOSING, special_tokens)}",
        f"tagged: opened {space} {json.dumps(FUNCTION)} call end",
        "bare: function call end",
        f'free: ({space} "{PARAMETER}" /[^\\n<>]{{1,256}}/ ">\\n" string)* {space} "{END_FUNCTION}"',
        f"STRING: /(?s:.*)/ & ~/(?s:.*)({'|'.join(mark.replace('/', _SLASH) for mark in _XML_ENDS)})(?s:.*)/",
        f'string[lazy]: STRING "\\n{END_PARAMETER}"',
        f"call: {_any_of('call', len(tools))}",
    ]
    for index, tool in enumerate(tools):
        if not tool.strict:
            lines.append(f'call_{index}: "{tool.name}>" free')
            continue
        parameters = close_schema(tool.parameters)
        required = parameters.get("required", [])
        members = []
        for place, (name, schema) in enumerate(parameters.get("properties", {}).items()):
            rule = f"parameter_{index}_{place}"
            members.append(f"({space} {rule})" + ("" if name in required else "?"))
            lines.append(f"{rule}: {json.dumps(f'{PARAMETER}{name}>')} {_xml_value(name, schema, parameters)}")
        lines.append(f'call_{index}: "{tool.name}>" {" ".join(members)} {space} "{END_FUNCTION}"')
    return "\n".join(lines)


def _xml_value(name: str, schema: Any, parameters: Mapping[str, Any]) -> str:
    """Return Lark for a value between two line breaks, and its end mark."""
    if not PARAMETER_NAME.fullmatch(name):
        raise _refusal(f"a parameter cannot be named {name!r}", "rename it")
    types, end = types_of(parameters, name), json.dumps("\n" + END_PARAMETER)
    if "string" not in types:
        shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
        whole = {**shared, **schema} if isinstance(schema, Mapping) else shared
        return f'"\\n" {_embedded(whole, _XML_BETWEEN)} {end}'
    if types - {"string", "null"}:
        why = f"the string {name!r} cannot be told from {' or '.join(sorted(types - {'string'}))}"
        raise _refusal(why, "give it one type")
    parts = list(islice(_parts(name, schema, parameters, _MAX_DEPTH), _MAX_PARTS + 1))
    if len(parts) > _MAX_PARTS:
        raise _refusal(f"the string {name!r} may have at most {_MAX_PARTS} alternatives", "name fewer")
    keyword = next((key for part in parts for key in _UNENFORCED if key in part), None)
    if keyword is not None:
        raise _refusal(f"{keyword} of the string {name!r} cannot be enforced", "leave it out")
    choices = [_values(part) for part in parts]
    if None in choices:
        return '"\\n" string'
    named = dict.fromkeys(value for some in choices for value in some or ())
    if not named:
        raise _refusal(f"the string {name!r} must have a value, and its schema leaves none", "mend its enum or const")
    texts = " | ".join(json.dumps("null" if value is None else value, ensure_ascii=False) for value in named)
    return f'"\\n" ({texts}) {end}'


def _refusal(why: str, instead: str) -> InvalidRequestError:
    message = f"tools cannot be used: this model writes calls in a way in which {why}; {instead}, or leave out strict."
    return InvalidRequestError(message, param="tools")


def _parts(name: str, schema: Any, parameters: Mapping[str, Any], num_left: int) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas of which a value must meet one, without alternatives.

    Keywords beside an alternative apply in each part. Each alternative yields a part or is refused, so a caller that
    stops taking parts stops the work.
    """
    if not isinstance(schema, Mapping):
        yield {}
        return
    for key in _ALTERNATIVES:
        inner = schema.get(key)
        if key == "$ref" and isinstance(inner, str):
            inner = [resolved(inner, parameters)]
        if isinstance(inner, list) and (key != "allOf" or len(inner) == 1):
            if not inner:
                raise _refusal(f"the string {name!r} must have a value, and its {key} is empty", f"mend {key}")
            if not num_left:
                raise _refusal(
                    f"alternatives of the string {name!r} may stand {_MAX_DEPTH} deep, and those here go on",
                    "name them",
                )
            beside = {other: schema[other] for other in schema.keys() & _RESTRICTING if other != key}
            for one in inner:
                yield from _parts(name, _both(name, key, beside, one), parameters, num_left - 1)
            return
    yield schema


def _both(name: str, key: str, beside: Mapping[str, Any], within: Any) -> Mapping[str, Any]:
    """Return the schema of both; refuse keywords on which they differ."""
    if not isinstance(within, Mapping):
        return beside
    within = {one: within[one] for one in within.keys() & _RESTRICTING}
    differing = next(
        (one for one in beside.keys() & within.keys() - {"enum", "const"} if within[one] != beside[one]), None
    )
    if differing is not None:
        raise _refusal(f"{differing} of the string {name!r} cannot stand both beside {key} and in it", "leave one out")
    merged = {**beside, **within}
    some, others = _values(beside), _values(within)
    if some is not None and others is not None:
        merged.pop("const", None)
        merged["enum"] = list(filter(set(others).__contains__, some))
    return merged


def _values(schema: Mapping[str, Any]) -> list[str | None] | None:
    """Return the strings and null that a schema allows, or None without a list."""
    named, types = schema.get("enum"), types_at(schema)
    if not isinstance(named, list):
        named = [schema["const"]] if "const" in schema else [None] if types == {"null"} else None
    elif "const" in schema:
        named = [value for value in named if value == schema["const"]]
    if named is None:
        return None
    texts = [value for value in named if value is None or isinstance(value, str)]
    return [value for value in texts if not types or type_name(value) in types]
