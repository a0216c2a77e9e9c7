"""The grammar of calls whose parameters are plain text between marks, or stand in order. Pure.

A string is the text before its end mark, so a keyword that restricts a string, other than to a list of values, cannot be
enforced and is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from engine.core.errors import InvalidRequestError
from engine.text.grammars.spec import close_schema
from engine.text.tools.text_values import resolved, type_name, types_at, types_of, values_at
from engine.text.tools.tool_format import OPEN_ENDED, OfferedTool, embedded, literal

_UNENFORCED = (
    "pattern", "format", "minLength", "maxLength", "contentEncoding", "contentMediaType", "allOf", "not", "if",
)  # fmt: skip
_RESTRICTING = ("type", "enum", "const", "$ref", "anyOf", "oneOf", *_UNENFORCED)  # others do not restrict a string
_DEFINITIONS = ("$defs", "definitions")
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')
_MAX_PARTS = 1024  # of a string's alternatives: a few references can make billions


class ValueGrammar(NamedTuple):
    """Lark for values between two marks."""

    before: str  # text between the opening mark and a value
    after: str  # text between a value and the closing mark
    closing: str
    stops: tuple[str, ...]  # further texts that end a value, written as in a regex
    special_tokens: Mapping[str, int]

    def lines(self) -> list[str]:
        """Return the rule `string` for any text and its closing mark."""
        closing = _regex(self.after + self.closing), _regex(self.closing)
        stops = "|".join(dict.fromkeys((*closing, *self.stops)))
        is_token = self.closing in self.special_tokens
        end = self._end() if is_token else json.dumps(self.after + self.closing)
        return [
            f"STRING: /(?s:.*)/ & ~/(?s:.*)({stops})(?s:.*)/",
            f"string{'' if is_token else '[lazy]'}: STRING {end}",
        ]

    def value(self, name: str, schema: Any, tool: OfferedTool) -> str:
        """Return Lark for a value and the texts around it.

        Raises InvalidRequestError if the schema cannot be enforced.
        """
        value = self._value(name, schema, tool)
        before = [json.dumps(self.before)] if self.before else []
        return " ".join([*before, "string" if value is None else f"{value} {self._end()}"])

    def _end(self) -> str:
        """Return Lark for the closing mark."""
        if self.closing not in self.special_tokens:
            return json.dumps(self.after + self.closing)
        after = [json.dumps(self.after)] if self.after else []
        return " ".join([*after, literal(self.closing, self.special_tokens)])

    def _value(self, name: str, schema: Any, tool: OfferedTool) -> str | None:
        """Return Lark for a value, or None for any text."""
        parameters = tool.parameters
        types = types_of(parameters, name)
        if "string" not in types:
            return embedded(self_contained(name, schema, parameters), lenient=not tool.strict)
        if types - {"string", "null"}:
            why = f"the string {name!r} cannot be told from {' or '.join(sorted(types - {'string'}))}"
            raise refusal(why, "give it one type")
        texts = _texts(name, schema, parameters)
        if texts is None:
            return None
        if not texts:
            raise refusal(
                f"the string {name!r} must have a value, and its schema leaves none", "mend its enum or const"
            )
        return f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))})"


class Parameter(NamedTuple):
    """A parameter of a tool; `rule` is the ending of its rules' names."""

    name: str
    schema: Any
    is_required: bool
    rule: str


def parameters_of(tool: OfferedTool, index: int, named: re.Pattern[str]) -> tuple[list[Parameter], OfferedTool]:
    """Return the parameters to enforce, in the schema's order, and the tool with the schema to enforce.

    Raises InvalidRequestError unless the schema lists them, with names that match `named`.
    """
    if not tool.strict and any(tool.parameters.get(key, False) is not False for key in OPEN_ENDED):
        raise refusal(f"{tool.name} needs a list of its parameters", "list them")
    parameters = close_schema(tool.parameters) if tool.strict else tool.parameters
    properties, required = parameters.get("properties"), parameters.get("required")
    properties = properties if isinstance(properties, Mapping) else {}
    required = required if isinstance(required, list) else ()
    for name in properties:
        if not named.fullmatch(name):
            raise refusal(f"a parameter cannot be named {name!r}", "rename it")
    found = [
        Parameter(name, schema, name in required, f"{index}_{place}")
        for place, (name, schema) in enumerate(properties.items())
    ]
    return found, tool._replace(parameters=parameters)


def arguments_in_order(
    tool: OfferedTool,
    index: int,
    named: re.Pattern[str],
    written: Callable[[Parameter, OfferedTool], str],
    *,
    between: str,
    end: str,
    is_forced: bool,
) -> list[str]:
    """Return Lark for a tool's arguments, with the texts between them and behind them.

    They come in the schema's order, but are free where the tool is not strict and the call not forced. Each rule is the rest
    of the arguments from one on: `first` if there was none before it, else `more`.
    """
    if not (tool.strict or is_forced):
        return [f"arguments_{index}: free"]
    parameters, enforced = parameters_of(tool, index, named)
    lines = [f"arguments_{index}: first_{index}_0"]
    for place, each in enumerate(parameters):
        one, then = f"argument_{each.rule}", f"{index}_{place + 1}"
        lines.append(f"{one}: {written(each, enforced)}")
        for rule, before in (("first", ""), ("more", json.dumps(between))):
            rest = "" if each.is_required else f" | {rule}_{then}"
            lines.append(f"{rule}_{each.rule}: {before} {one} more_{then}{rest}")
    return [*lines, *(f"{rule}_{index}_{len(parameters)}: {json.dumps(end)}" for rule in ("first", "more"))]


def calls_in_order(
    tools: Iterable[OfferedTool],
    named: re.Pattern[str],
    values: ValueGrammar,
    begun: tuple[Callable[[str], str], Callable[[str], str]],
    *,
    before: str = "",
    end: str = "",
    is_forced: bool,
) -> list[str]:
    """Return Lark whose rules `call_0`, `call_1`, ... are the tools' calls, with parameters in the schema's order.

    `begun` return how a call and a parameter begin, by their names. Parameters of a tool that is not strict are free, unless
    the call is forced.
    """
    lines = list[str]()
    for index, tool in enumerate(tools):
        head = f"call_{index}: {begun[0](tool.name)}"
        if not (tool.strict or is_forced):
            lines.append(f"{head} free")
            continue
        parameters, enforced = parameters_of(tool, index, named)
        for each in parameters:
            value = values.value(each.name, each.schema, enforced)
            lines.append(f"parameter_{each.rule}: {begun[1](each.name)} {value}")
        members = [f"({before} parameter_{each.rule})" + ("" if each.is_required else "?") for each in parameters]
        lines.append(f"{head} {' '.join(members)} {end}")
    return lines


def self_contained(name: str, schema: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's schema with the definitions that it refers to."""
    if not isinstance(schema, Mapping):
        return {}
    written = json.dumps(schema)
    if '"$ref"' not in written:
        return dict(schema)
    shared = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
    for reference in _REFERENCE.findall(written + json.dumps(shared)):
        if not reference.startswith(tuple(f"#/{key}/" for key in _DEFINITIONS)):
            raise refusal(f"{name!r} cannot refer to {reference}", "move that into $defs")
    return {**shared, **schema}


def refusal(why: str, instead: str) -> InvalidRequestError:
    """Return the error for a tool that cannot be strict in this format."""
    message = f"tools cannot be used: this model writes calls in a way in which {why}; {instead}, or leave out strict."
    return InvalidRequestError(message, param="tools")


def _regex(text: str) -> str:
    return text.replace("/", "\\/").replace("\n", "\\n").replace("|", "\\|")


def _texts(name: str, schema: Any, parameters: Mapping[str, Any]) -> list[str] | None:
    """Return the texts that a string may be, null as a word; None for any text."""
    texts: list[str] = []
    is_any = False
    parts = [schema]
    for part in parts:  # alternatives are appended meanwhile
        if len(parts) > _MAX_PARTS:
            raise refusal(f"the string {name!r} may have at most {_MAX_PARTS} alternatives", "name fewer")
        part = part if isinstance(part, Mapping) else {}
        key, alternatives = next(_alternatives(part, parameters), ("", []))
        beside = [each for each in _RESTRICTING if each in part and each != key]
        if key and beside:
            why = f"{beside[0]} of the string {name!r} cannot stand beside {key}"
            raise refusal(why, "move it into the alternatives")
        wrong = next((each for each in beside if each in _UNENFORCED), None)
        if wrong is not None:
            raise refusal(f"{wrong} of the string {name!r} cannot be enforced", "leave it out")
        parts += alternatives
        types, values = types_at(part), values_at(part)
        if values is None:
            is_any = is_any or not (key or types == {"null"})
            values = [None] if types == {"null"} else []
        fitting = [value for value in values if not types or type_name(value) in types]
        texts += ["null" if value is None else value for value in fitting if value is None or isinstance(value, str)]
    return None if is_any else texts


def _alternatives(schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each keyword of a schema that names alternatives, with them."""
    if isinstance(schema.get("$ref"), str):
        yield "$ref", [resolved(schema["$ref"], parameters)]
    for key in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(key)
        if isinstance(inner, list) and (key != "allOf" or len(inner) == 1):
            yield key, inner
