"""Calls whose parameters are plain text between marks: base of the parsers, and the grammar of values. Pure.

Parameters become the members of a JSON object, of the types in the tool's schema; strings are passed on piece by piece.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from engine.core.errors import InvalidRequestError
from engine.text.grammars.spec import close_schema
from engine.text.tools.python_literals import WORDS, json_of_literal
from engine.text.tools.tool_format import OPEN_ENDED, CallParser, OfferedTool, Tools, embedded, literal
from engine.text.types import Piece, first_of, held_back

STRING = frozenset({"string"})
_INTEGER = re.compile(r"[-+]?[0-9]{1,400}")


def types_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have; empty if unknown."""
    properties = parameters.get("properties")
    found: set[str] = set()
    seen: set[str] = set()
    left = [properties.get(name) if isinstance(properties, Mapping) else None]
    while left:
        schema = left.pop()
        if not isinstance(schema, Mapping):
            continue
        found |= types_at(schema) or {type_name(value) for value in values_at(schema) or ()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            left.append(resolved(reference, parameters))
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            left += parts if isinstance(parts, list) else ()
    return frozenset(found)


def types_at(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names at `type`."""
    found = schema.get("type")
    return {one for one in (found if isinstance(found, list) else [found]) if isinstance(one, str)}


def values_at(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, or None without a list."""
    named = schema.get("enum")
    if not isinstance(named, list):
        return [schema["const"]] if "const" in schema else None
    return [value for value in named if value == schema.get("const", value)]


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference names."""
    place: Any = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place


_TYPES = (
    (type(None), "null"), (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"),
)  # fmt: skip  # a bool is an int, too


def type_name(value: Any) -> str:
    """Return the JSON type of a value."""
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "object")


def json_of(text: str, types: frozenset[str]) -> str:
    """Return a text as JSON: of the first type that allows it, else any JSON, else a string.

    Types other than string are tried first. If string is the only type, the text is a string. If it is one of them, a
    text that means another number than it spells stays a string: 007, or 1 for true.
    """
    stripped = text.strip()
    if types != STRING:
        readers = {kind: reader for kind, reader in _READERS.items() if kind in types}
        if "string" not in types:
            readers["any"] = _any
        for kind, reader in readers.items():
            found = reader(stripped)
            if found is not None and (
                "string" not in types or kind not in _SPELLED or found.lower() == stripped.lower()
            ):
                return found
    return json.dumps(text, ensure_ascii=False)


def _integer(text: str) -> str | None:
    found = _loaded(text)
    if type_name(found) == "integer":
        return text
    return str(int(text)) if _INTEGER.fullmatch(text) else None


def _number(text: str) -> str | None:
    if type_name(_loaded(text)) in ("integer", "number"):
        return text
    try:
        value = float(text)
    except ValueError:
        return None
    return repr(value) if math.isfinite(value) else None


_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}


def _container(bracket: str, text: str) -> str | None:
    """Return an object or array as JSON; models write Python's as well."""
    if text.startswith(bracket) and _loaded(text) is not None:
        return text
    found = json_of_literal(text) if text[:1] in ("{", "[", "(") else None
    return found if found and found.startswith(bracket) else None


def _any(text: str) -> str | None:
    """Return a text that is JSON or a word of Python as JSON."""
    return WORDS.get(text) or (text if _loaded(text) is not None else None)


# In the order in which they are tried.
_READERS: Mapping[str, Callable[[str], str | None]] = {
    "null": lambda text: "null" if text.lower() in ("null", "none") else None,
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: _BOOLEANS.get(text.lower()),
    "object": partial(_container, "{"),
    "array": partial(_container, "["),
}
_SPELLED = frozenset({"integer", "number", "boolean"})


def _loaded(text: str) -> Any:
    """Return the value of JSON, or None for another text or null."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class TextValuesParser(CallParser):
    """`push` text, `finish` at its end. `tools` has the schemas of parameters."""

    def __init__(self, openings: tuple[str, ...], tools: Tools, ends: Mapping[str, int]) -> None:
        """`ends` are the texts that end a value, and how much of each is read with the value."""
        super().__init__(openings)
        self._tools = tools
        self._ends = ends
        self._parameters: Mapping[str, Any] = {}  # the schema of the call at hand
        self._given: set[str] = set()  # the names of its parameters so far
        self._types: frozenset[str] | None = None  # of the parameter at hand; None for a repeated one, which is skipped
        self._whole = ""  # the value so far, where its JSON is not known before its end

    def finish(self) -> list[Piece]:
        rest = self._buffer
        if self._step == self._value and self._types is not None:
            self._arguments(_escaped(rest) if self._types == STRING else self._whole + rest)
            rest = ""
        elif self._step in (self._members, self._value):
            if self._is_part_of_tag(rest.lstrip()) or self._step == self._value:
                rest = ""
            self._end_call()
        self._buffer = rest
        return super().finish()

    def _members(self) -> bool:
        """Read the next parameter, or the end of the call."""
        raise NotImplementedError

    def _is_part_of_tag(self, text: str) -> bool:
        """Return True if more text may complete a tag within or after a call."""
        raise NotImplementedError

    def _reads_parameter(self, begun: re.Pattern[str]) -> bool:
        """Begin the next parameter, if the text goes on with one; space before it is skipped."""
        self._buffer = self._buffer.lstrip()
        match = begun.match(self._buffer)
        if match is not None:
            self._buffer = self._buffer[match.end() :]
            self._begin_parameter(match[1])
        return match is not None

    def _begin_call(self, name: str) -> None:
        self._begin(name)
        self._parameters, self._given = self._tools.get(name, {}), set()
        self._step = self._members

    def _begin_parameter(self, name: str) -> None:
        """Begin a value; a repeated one is skipped, because the first may have been sent."""
        self._step, self._types, self._whole = self._value, None, ""
        if name not in self._given:
            self._types = types_of(self._parameters, name)
            quote = '"' if self._types == STRING else ""
            begin = "{" if not self._given else ", "
            self._arguments(f"{begin}{json.dumps(name, ensure_ascii=False)}: {quote}")
            self._given.add(name)

    def _value(self) -> bool:
        """Read more of a value, or its end."""
        buffer = self._buffer
        at, end = first_of(buffer, self._ends) or (len(buffer) - held_back(buffer, tuple(self._ends)), "")
        text, self._buffer = buffer[:at], buffer[at + self._ends.get(end, 0) :]
        if end:
            self._step = self._members
        if self._types == STRING:
            self._arguments(_escaped(text) + ('"' if end else ""))
        elif self._types is not None:
            self._whole += text
            self._arguments(json_of(self._whole, self._types) if end else "")
        return bool(end)

    def _end_call(self) -> None:
        self._arguments("}" if self._given else "{}")
        self._step = self._after


def _escaped(text: str) -> str:
    """Return a text as it is written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


# -- grammar -----------------------------------------------------------------------------------------------------------
# A string is the text before its end mark, so a keyword that restricts a string, other than to a list of values, cannot be
# enforced and is refused.

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
