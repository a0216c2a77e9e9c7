"""As strict.py, for calls in XML: text is free up to a function, whose parameters then follow its schema if it is strict.

They come in the schema's order. A string is what stands before its end mark; what JSON Schema may ask of a string besides
being one of some has no place there, so it is refused. In llguidance's Lark. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.errors import InvalidRequestError
from server.structured.closing import close
from server.tools.offered import OfferedTool, embedded
from server.tools.xml_parser import CLOSING, END_FUNCTION, END_PARAMETER, FUNCTION, OPENING, PARAMETER, PARAMETER_NAME
from server.tools.xml_values import kinds_of, resolved

_SPACE = r"/[ \t\r\n]{0,20}/"
_BETWEEN = {"whitespace_pattern": r"[\x20\x09\x0A\x0D]{0,40}", "lenient": False}
_MARKS = (END_PARAMETER, "\\n" + PARAMETER, "\\n" + END_FUNCTION)  # what a string cannot have, for it would end there
_SLASH = "\\/"
_BEYOND = ("pattern", "format", "minLength", "maxLength", "contentEncoding", "contentMediaType", "allOf", "not", "if")
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$defs", "definitions"})


def free_text_grammar(tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
    """Lark for any text in which calls of `tools` may come. Raises InvalidRequestError for what cannot be enforced."""
    is_token = OPENING in special_tokens
    lines = [
        f"start: (tagged | bare){'*' if parallel else '?'} TEXT",
        "TEXT: /(?s:.*)/",
        f"opened: TEXT <[{special_tokens[OPENING]}]>" if is_token else f"opened[lazy]: TEXT {json.dumps(OPENING)}",
        f"function[lazy]: TEXT {json.dumps(FUNCTION)}",
        f"end: {_SPACE} " + (f"<[{special_tokens[CLOSING]}]>" if CLOSING in special_tokens else json.dumps(CLOSING)),
        f"tagged: opened {_SPACE} {json.dumps(FUNCTION)} call end",
        "bare: function call end",
        f'free: ({_SPACE} "{PARAMETER}" /[^\\n<>]{{1,256}}/ ">\\n" string)* {_SPACE} "{END_FUNCTION}"',
        f"STRING: /(?s:.*)/ & ~/(?s:.*)({'|'.join(mark.replace('/', _SLASH) for mark in _MARKS)})(?s:.*)/",
        f'string[lazy]: STRING "\\n{END_PARAMETER}"',
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
    ]
    for index, tool in enumerate(tools):
        if not tool.strict:
            lines.append(f'call_{index}: "{tool.name}>" free')
            continue
        parameters = close(tool.parameters)
        required = parameters.get("required", [])
        members = []
        for place, (name, schema) in enumerate(parameters.get("properties", {}).items()):
            rule = f"parameter_{index}_{place}"
            members.append(f"({_SPACE} {rule})" + ("" if name in required else "?"))
            lines.append(f"{rule}: {json.dumps(f'{PARAMETER}{name}>')} {_value(name, schema, parameters)}")
        lines.append(f'call_{index}: "{tool.name}>" {" ".join(members)} {_SPACE} "{END_FUNCTION}"')
    return "\n".join(lines)


def _value(name: str, schema: Any, parameters: Mapping[str, Any]) -> str:
    """A value between two line breaks, and the end mark."""
    if not PARAMETER_NAME.fullmatch(name):
        raise _refusal(f"a parameter cannot be named {name!r}", "rename it")
    kinds, end = kinds_of(parameters, name), json.dumps("\n" + END_PARAMETER)
    if "string" not in kinds:
        shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
        whole = {**shared, **schema} if isinstance(schema, Mapping) else shared
        return f'"\\n" {embedded(whole, _BETWEEN)} {end}'
    if kinds - {"string", "null"}:
        why = f"the string {name!r} cannot be told from {' or '.join(sorted(kinds - {'string'}))}"
        raise _refusal(why, "give it one type")
    parts = _parts(name, schema, parameters, 16)
    beyond = next((key for part in parts for key in _BEYOND if key in part), None)
    if beyond is not None:
        raise _refusal(f"{beyond} of the string {name!r} cannot be enforced", "leave it out")
    choices = [_choices(part) for part in parts]
    if all(choices):
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for some in choices for text in some)
        return f'"\\n" ({texts}) {end}'
    return '"\\n" string'


def _refusal(why: str, instead: str) -> InvalidRequestError:
    message = f"tools cannot be used: this model writes calls in a way in which {why}; {instead}, or leave out strict."
    return InvalidRequestError(message, param="tools")


def _parts(name: str, schema: Any, parameters: Mapping[str, Any], num_left: int) -> list[Mapping[str, Any]]:
    """The schemas of which a value has to meet one, without references: what stands beside them is asked in each."""
    if not isinstance(schema, Mapping) or not num_left:
        return [{}]
    for key in ("$ref", "anyOf", "oneOf", "allOf"):
        inner = schema.get(key)
        if key == "$ref" and isinstance(inner, str):
            inner = [resolved(inner, parameters)]
        if isinstance(inner, list) and (key != "allOf" or len(inner) == 1):
            beside = {other: value for other, value in schema.items() if other != key and other not in _NOTES}
            whole = [_both(name, key, beside, one) for one in inner]
            return [part for one in whole for part in _parts(name, one, parameters, num_left - 1)]
    return [schema]


def _both(name: str, key: str, beside: Mapping[str, Any], within: Any) -> Mapping[str, Any]:
    """A schema that asks what two ask; refuses what they ask differently."""
    if not isinstance(within, Mapping):
        return beside
    differing = next((one for one in beside if one in within and within[one] != beside[one]), None)
    if differing is not None:
        raise _refusal(f"{differing} of the string {name!r} cannot stand both beside {key} and in it", "leave one out")
    return {**beside, **within}


def _choices(schema: Mapping[str, Any]) -> list[str]:
    """The texts of a schema that names its values; empty for another one."""
    values = schema.get(
        "enum", [schema["const"]] if "const" in schema else [None] if schema.get("type") == "null" else []
    )
    return [value if isinstance(value, str) else json.dumps(value) for value in values]
