"""Tells from its syntax tree, before it runs, whether all work of a chat template between two turns of its loops is small.

That holds for a simple template: its variables are parts of the conversation, or texts that were joined or converted once
from such parts, so that nothing grows by being used again. A conversation is assumed to have at most MAX_INPUT characters of
JSON. Only nodes, filters, methods and tests named below are simple. Macros, products, format strings, sorting and values
that grow from turn to turn are not. Pure.
"""

from __future__ import annotations

import re
from typing import Any

from jinja2 import nodes

MAX_INPUT = 32_768
_MAX_WORK = 3_000  # passes over the input, some 10 us each
_MAX_TOKENS_SIZE = 1_000  # of all special tokens
_MAX_ARGUMENT = 32  # characters of a text to find, or to put in the place of another
_MAX_INDENT = 8
_WIDE_DATE = re.compile(r"%[^a-zA-Z%]")
# A value is a part of the conversation, or made of parts and up to _LONGER times as long, or made of what was made.
_PART, _MADE, _MADE_AGAIN = range(3)
_LONGER = 50
_SEARCH = 20  # passes of looking for something

_TESTS = frozenset(
    ("boolean", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number", "sequence", "string", "true",
     "undefined")
)  # fmt: skip
_FUNCTIONS = frozenset(("namespace", "raise_exception", "strftime_now"))
_SELECTING = frozenset(("count", "first", "float", "int", "items", "last", "length", "list", "reverse", "trim"))
_CHOOSING = frozenset(("reject", "rejectattr", "select", "selectattr"))
_CONVERTING = frozenset(("capitalize", "join", "lower", "replace", "string", "upper"))
_METHODS = {
    **dict.fromkeys(("endswith", "items", "keys", "lstrip", "rstrip", "split", "rsplit", "startswith", "strip", "values"), _PART),
    **dict.fromkeys(("capitalize", "lower", "replace", "upper"), _MADE),
}  # fmt: skip


class _NotSimpleError(Exception):
    """The work of a template has no known bound."""


def is_simple(tree: nodes.Template, special_tokens: dict[str, str]) -> bool:
    """Return whether the work between two turns of the template's loops is small."""
    if sum(map(len, special_tokens.values())) > _MAX_TOKENS_SIZE:
        return False
    work = _Work(tree)
    try:
        work.block(tree.body)
    except (_NotSimpleError, RecursionError):
        return False
    return True


class _Work:
    """Adds up the work of a template, each loop's body once."""

    def __init__(self, tree: nodes.Template) -> None:
        self.num_passes, self._depth = 0, 0
        calls = (each for each in tree.find_all(nodes.Assign) if _is_namespace(each.node))
        self._namespaces = frozenset(each.target.name for each in calls if isinstance(each.target, nodes.Name))
        self._made: set[str] = set()  # variables that may hold a text that was made

    # -- statements ----------------------------------------------------------------------------------------------------

    def block(self, body: list[Any]) -> None:
        """Add statements. What a turn of a loop sets, the next one does not see."""
        for node in body:
            match node:
                case nodes.Output():
                    self._all(node.nodes)
                case nodes.For(recursive=False):
                    self._part(node.iter)
                    self._bind(node.target, _PART)
                    self._all([] if node.test is None else [node.test])
                    self._depth += 1
                    self.block(node.body)
                    self._depth -= 1
                    self.block(node.else_)
                case nodes.If():
                    self._value(node.test)
                    self.block([*node.body, *node.elif_, *node.else_])
                case nodes.Assign(target=nodes.Tuple() as names, node=nodes.Tuple() as values):
                    for target, value in zip(names.items, values.items, strict=False):
                        self._bind(target, self._value(value))
                case nodes.Assign(
                    target=nodes.Name(), node=nodes.Call(args=[], dyn_args=None, dyn_kwargs=None) as call
                ) if _is_namespace(call):
                    for keyword in call.kwargs:
                        self._part(keyword.value)
                case nodes.Assign():
                    self._bind(node.target, self._value(node.node))
                case nodes.Continue() | nodes.Break():
                    pass
                case _:
                    raise _NotSimpleError

    def _bind(self, target: nodes.Node, kind: int) -> None:
        match target:
            case nodes.Name() if kind < _MADE_AGAIN and target.name not in _FUNCTIONS | self._namespaces | {"loop"}:
                if kind:
                    self._made.add(target.name)
            case nodes.Tuple() if kind == _PART:
                for item in target.items:
                    self._bind(item, kind)
            case nodes.NSRef() if kind == _PART and target.name in self._namespaces:
                pass
            case _:
                raise _NotSimpleError

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _all(self, parts: list[Any]) -> int:
        return max(map(self._value, parts), default=_PART)

    def _part(self, node: nodes.Node) -> None:
        """Add a value that must be a part of the conversation."""
        if self._value(node) != _PART:
            raise _NotSimpleError

    def _value(self, node: nodes.Node) -> int:
        """Add an expression; return the kind of its value. Numbers are parts."""
        self._add(1)
        match node:
            case nodes.TemplateData():
                return _PART
            case nodes.Const():
                if isinstance(node.value, int) and node.value.bit_length() > 64:
                    raise _NotSimpleError
                return _PART
            case nodes.Name() | nodes.Getattr() | nodes.Getitem():
                return self._named(node)
            case nodes.Test(name=name) if name in _TESTS and not (node.args or node.kwargs):
                if not (isinstance(node.node, nodes.Name) and name in ("defined", "undefined")):
                    self._value(node.node)
                return _PART
            case nodes.Filter(node=nodes.Node(), dyn_args=None, dyn_kwargs=None):
                return self._filter(node)
            case nodes.Call(dyn_args=None, dyn_kwargs=None):
                return self._call(node)
            case _:
                return self._operation(node)

    def _add(self, num_passes: int) -> None:
        self.num_passes += num_passes
        if self.num_passes > _MAX_WORK:
            raise _NotSimpleError

    def _named(self, node: nodes.Node) -> int:
        match node:
            case nodes.Name(name=name) if name not in self._namespaces | _FUNCTIONS | {"loop"}:
                if name not in self._made:
                    return _PART
                self._add(_LONGER)
                return _MADE_AGAIN
            case nodes.Getattr(node=nodes.Name(name="loop")) if self._depth:
                return _PART
            case nodes.Getattr(node=nodes.Name(name=name)) if name in self._namespaces:
                return _PART
            case nodes.Getattr() | nodes.Getitem():
                self._part(node.node)
                self._all([node.arg] if isinstance(node, nodes.Getitem) else [])
                return _PART
            case _:
                raise _NotSimpleError

    def _operation(self, node: nodes.Node) -> int:
        parts: list[Any] = list(node.iter_child_nodes())
        match node:
            case nodes.And() | nodes.Or() | nodes.CondExpr() | nodes.Slice():
                return self._all(parts)
            case nodes.Add() if any(map(_is_number, parts)):
                pass  # the other one is a number too, or the operator fails
            case nodes.Mod() if _is_number(node.left):  # of a text it would be a format string
                pass
            case nodes.Sub() | nodes.Div() | nodes.FloorDiv() | nodes.UnaryExpr():  # of numbers, or they fail
                pass
            case nodes.List() | nodes.Tuple() if all(isinstance(each, nodes.Const) for each in parts):
                pass
            case nodes.Add() | nodes.Concat():  # what the inner sums make is copied again
                self._add(sum(1 for _ in node.find_all((nodes.Add, nodes.Concat))))
                return max(_MADE, self._all(parts))
            case nodes.Compare():
                parts = [node.expr, *(each.expr for each in node.ops)]
                if any(each.op in ("in", "notin") for each in node.ops):
                    self._add(_SEARCH if _is_short(node.expr) else 5 * _SEARCH)
                    for each in parts:
                        self._part(each)
            case _:
                raise _NotSimpleError
        self._all(parts)
        return _PART

    def _call(self, node: nodes.Call) -> int:
        match node.node:
            case nodes.Name(name="raise_exception") if len(node.args) == 1 and not node.kwargs:
                self._all(node.args)
            case nodes.Name(name="strftime_now") if not node.kwargs:
                _check_constants(node.args)
                if any(_WIDE_DATE.search(str(each.value)) for each in node.args if isinstance(each, nodes.Const)):
                    raise _NotSimpleError
            case nodes.Getattr(attr="get") if not node.kwargs and 1 <= len(node.args) <= 2:
                self._part(node.node.node)
                return self._all(node.args)
            case nodes.Getattr(attr=name) if name in _METHODS and not node.kwargs:
                _check_constants(node.args)
                self._part(node.node.node)
                self._add(_LONGER if _METHODS[name] else _SEARCH)
                return _METHODS[name]
            case _:
                raise _NotSimpleError
        return _PART

    def _filter(self, node: nodes.Filter) -> int:
        assert node.node is not None  # as in the block {% filter %}
        options = {str(each.key): getattr(each.value, "value", ...) for each in node.kwargs}
        if node.name in ("default", "d") and not options:
            return self._all([node.node, *node.args])
        self._part(node.node)
        self._add(_LONGER)
        _check_constants(node.args)
        if node.name == "tojson" and not node.args and options.keys() <= {"ensure_ascii", "sort_keys", "indent"}:
            indent = options.pop("indent", 0)
            if ... not in options.values() and type(indent) is int and 0 <= indent <= _MAX_INDENT:
                return _MADE
        elif node.name == "map" and not node.args and options.keys() == {"attribute"} and ... not in options.values():
            return _PART
        elif not options and node.name in _CONVERTING:
            return _MADE
        elif not options and (node.name in _SELECTING or (node.name in _CHOOSING and _has_plain_test(node))):
            return _PART
        raise _NotSimpleError


def _is_short(node: nodes.Node) -> bool:
    """Return whether a value is a constant that is soon found."""
    return isinstance(node, nodes.Const) and (not isinstance(node.value, str) or len(node.value) <= _MAX_ARGUMENT)


def _check_constants(args: list[nodes.Expr]) -> None:
    """Raise for arguments of a filter or method that are not short constants."""
    if not all(map(_is_short, args)):
        raise _NotSimpleError


def _has_plain_test(node: nodes.Filter) -> bool:
    """Return whether a filter's items are tested for a type, or compared."""
    place = int(node.name.endswith("attr"))  # of the name of the test
    names = [each.value for each in node.args[place : place + 1] if isinstance(each, nodes.Const)]
    return all(name in _TESTS or name in ("equalto", "eq", "==", "ne", "!=") for name in names)


def _is_namespace(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace"


def _is_number(node: nodes.Node) -> bool:
    """Return whether a value is certainly a number."""
    match node:
        case nodes.Const():
            return isinstance(node.value, int | float)
        case nodes.Filter(name="length" | "count"):
            return True
        case nodes.Sub():  # or it fails
            return True
        case nodes.Getattr(node=nodes.Name(name="loop")):
            return node.attr.rstrip("0") in ("index", "revindex", "length", "depth")
        case _:
            return False
