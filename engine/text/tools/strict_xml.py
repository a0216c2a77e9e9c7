"""As strict.py, for calls in XML: text is free up to a function, whose parameters then follow its schema if it is strict.

They come in the schema's order. A string is what stands before its end mark; what JSON Schema may ask of a string besides
being one of some has no place there, so it is refused. In llguidance's Lark. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.text.grammars.spec import close_schema
from engine.text.tools.offered import OfferedTool, embedded
from engine.text.tools.xml_parser import (
    CLOSING,
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    OPENING,
    PARAMETER,
    PARAMETER_NAME,
)
from engine.text.tools.xml_values import kind_of, kinds_of, resolved, types_of

_SPACE = r"/[ \t\r\n]{0,20}/"
_BETWEEN = {"whitespace_pattern": r"[\x20\x09\x0A\x0D]{0,40}", "lenient": False}
_MARKS = (END_PARAMETER, "\\n" + PARAMETER, "\\n" + END_FUNCTION)  # what a string cannot have, for it would end there
_SLASH = "\\/"
_BEYOND = ("pattern", "format", "minLength", "maxLength", "contentEncoding", "contentMediaType", "allOf", "not", "if")
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf")
_TELLING = frozenset({"type", "enum", "const", *_ALTERNATIVES, *_BEYOND})  # the rest says nothing of a string
_MAX_DEPTH = 16  # of alternatives in alternatives ...
_MAX_PARTS = 1024  # ... which multiply: a few references can make billions


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
        parameters = close_schema(tool.parameters)
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
    parts = list(islice(_parts(name, schema, parameters, _MAX_DEPTH), _MAX_PARTS + 1))
    if len(parts) > _MAX_PARTS:
        raise _refusal(f"the string {name!r} may have at most {_MAX_PARTS} alternatives", "name fewer")
    beyond = next((key for part in parts for key in _BEYOND if key in part), None)
    if beyond is not None:
        raise _refusal(f"{beyond} of the string {name!r} cannot be enforced", "leave it out")
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
    """The schemas of which a value has to meet one, without references: what stands beside them is asked in each.

    One after another, and every alternative leads to one or is refused: who stops taking them stops the work.
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
            beside = {other: schema[other] for other in schema.keys() & _TELLING if other != key}
            for one in inner:
                yield from _parts(name, _both(name, key, beside, one), parameters, num_left - 1)
            return
    yield schema


def _both(name: str, key: str, beside: Mapping[str, Any], within: Any) -> Mapping[str, Any]:
    """A schema that asks what two ask, of the values that both name; refuses what else they ask differently."""
    if not isinstance(within, Mapping):
        return beside
    within = {one: within[one] for one in within.keys() & _TELLING}
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
    """The strings, and null, that a schema names and its type allows; None of one that names no values."""
    named, types = schema.get("enum"), types_of(schema)
    if not isinstance(named, list):
        named = [schema["const"]] if "const" in schema else [None] if types == {"null"} else None
    elif "const" in schema:
        named = [value for value in named if value == schema["const"]]
    if named is None:
        return None
    texts = [value for value in named if value is None or isinstance(value, str)]
    return [value for value in texts if not types or kind_of(value) in types]
