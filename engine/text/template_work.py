"""Bounds the work of a chat template from its syntax tree, before it runs.

A template is simple if every value it makes, and all work between two turns of its loops, is bounded whatever the
conversation is; the bound assumes an input of at most MAX_INPUT characters of JSON. Only nodes, filters, methods and tests
named below are simple, each with its cost and the growth of its result. Macros, products, format strings, sorting and
values that grow from turn to turn are not. Pure.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from jinja2 import nodes

MAX_INPUT = 32_768
_MAX_WORK = 50e6  # characters copied, about: 10 to 50 ms
_MAX_PASSES = 5  # after which the attributes of namespaces must have stopped growing
_MAX_TOKENS_SIZE = 1_000  # of all special tokens
_MAX_INDENT = 8
_MAX_NAMES = 200  # that a template sets
_NODE_COST = 50.0
_NEEDLE = 100.0  # the longest text whose search takes a time that grows with its length
_AS_TEXT = 16.0  # a list's text is at most so many times as long as its items: '\U000e0001',
_AS_JSON = 12.0
_WIDE_DATE = re.compile(r"%[^a-zA-Z%]")
_NUMBER, _TEXT, _NAMESPACE, _LOOP, _OTHER = "number", "text", "namespace", "loop", ""

_LOOP_NUMBERS = ("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0")
_TESTS = (
    "boolean", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number", "sequence", "string", "true",
    "undefined",
)  # fmt: skip
_ITEM_TESTS = (*_TESTS, "equalto", "eq", "==", "ne", "!=")


class _Rule(NamedTuple):
    """What a filter or method may do, for each character of its value."""

    cost: float
    growth: float  # 0 for a number
    args: tuple[type, ...] = ()  # at most these, all of them constants
    kind: str = _TEXT  # of the result; a filter makes a text of a text, and writes out what is none


_TEXT_RULES = {**dict.fromkeys(("lower", "upper", "capitalize"), _Rule(3, 3)), "replace": _Rule(20, 1, (str, str, int))}
_METHODS = {
    **_TEXT_RULES,
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _Rule(1, 1, (str,))),
    **dict.fromkeys(("split", "rsplit"), _Rule(20, 1, (str, int), _OTHER)),
    **dict.fromkeys(("startswith", "endswith"), _Rule(0, 0, (str,), _NUMBER)),
    **dict.fromkeys(("items", "keys", "values"), _Rule(1, 1, (), _OTHER)),
}
_FILTERS = {
    **_TEXT_RULES,
    **dict.fromkeys(("length", "count", "int", "float"), _Rule(1, 0, (), _NUMBER)),
    **dict.fromkeys(("first", "last", "items"), _Rule(1, 1, (), _OTHER)),
    **dict.fromkeys(("list", "reverse"), _Rule(20, 1, (), _OTHER)),
    "trim": _Rule(1, 1, (str,)),
    "string": _Rule(1, 1),
    "join": _Rule(20, 1, (str,)),
}


class _Value(NamedTuple):
    """The most characters and items of a value, and its kind where that is certain."""

    size: float
    kind: str = _OTHER

    @property
    def written(self) -> float:
        """The most characters of the value as text."""
        return self.size if self.kind in (_NUMBER, _TEXT) else _AS_TEXT * self.size


class _NotSimpleError(Exception):
    """The work of a template has no known bound."""


_A_NUMBER = _Value(20, _NUMBER)
_INPUT = _Value(MAX_INPUT)
Names = dict[str, _Value]


def is_simple(tree: nodes.Template, special_tokens: dict[str, str]) -> bool:
    """Return whether the work between two turns of the template's loops is small."""
    if sum(map(len, special_tokens.values())) > _MAX_TOKENS_SIZE:
        return False
    attributes: Names = {}
    for _ in range(_MAX_PASSES):
        bound = _Bound(attributes)
        try:
            bound.block(tree.body, {})
        except (_NotSimpleError, RecursionError):
            return False
        if bound.work > _MAX_WORK:
            return False
        if bound.assigned == attributes:
            return True
        attributes = bound.assigned
    return False


class _Bound:
    """Adds up the work of a template, each loop's body once."""

    def __init__(self, attributes: Names) -> None:
        """`attributes` are those of all namespaces, by name, as the last pass left them."""
        self.work = 0.0
        self.assigned = dict(attributes)
        self._attributes = attributes

    # -- statements; `names` holds the variables that the template has set ---------------------------------------------------

    def block(self, body: list[Any], names: Names) -> None:
        """Add statements, which may set names."""
        for node in body:
            self._statement(node, names)

    def _statement(self, node: nodes.Node, names: Names) -> None:
        match node:
            case nodes.Output():
                for child in node.nodes:
                    self._add(2 * self._plain(child, names).size)
            case nodes.For(recursive=False):
                items = self._plain(node.iter, names)
                inner = {**names, "loop": _Value(items.size, _LOOP)}
                self._bind(node.target, _Value(items.size), inner)
                if node.test is not None:
                    self._plain(node.test, inner)
                self.block(node.body, inner)
                self.block(node.else_, dict(names))
            case nodes.If():
                self._plain(node.test, names)
                branches = [dict(names) for _ in range(2 + len(node.elif_))]
                for body, branch in zip((node.body, node.else_), branches, strict=False):
                    self.block(body, branch)
                for each, branch in zip(node.elif_, branches[2:], strict=True):
                    self._statement(each, branch)
                for name in set().union(*branches):
                    names[name] = _joined(*(branch.get(name, _INPUT) for branch in branches))
            case nodes.Assign():
                self._bind(node.target, self._value(node.node, names), names)
            case nodes.Continue() | nodes.Break():
                pass
            case _:
                raise _NotSimpleError

    def _bind(self, target: nodes.Node, value: _Value, names: Names) -> None:
        match target:
            case nodes.Name() if len(names) < _MAX_NAMES:
                names[target.name] = value
            case nodes.Tuple():
                for item in target.items:
                    self._bind(item, _Value(value.size), names)
            case nodes.NSRef() if names.get(target.name, _INPUT).kind == _NAMESPACE:
                self._set_attribute(target.attr, value)
            case _:
                raise _NotSimpleError

    def _set_attribute(self, name: str, value: _Value) -> None:
        if value.kind in (_NAMESPACE, _LOOP):
            raise _NotSimpleError
        self.assigned[name] = _joined(value, self.assigned.get(name, value))

    # -- expressions ---------------------------------------------------------------------------------------------------------

    def _plain(self, node: nodes.Node, names: Names) -> _Value:
        """Return the bound of a value that is neither a namespace nor a loop."""
        value = self._value(node, names)
        if value.kind in (_NAMESPACE, _LOOP):
            raise _NotSimpleError
        return value

    def _sum(self, parts: list[Any], names: Names) -> _Value:
        """Return the bound of a value made of others."""
        size = sum(self._plain(part, names).size + _NODE_COST for part in parts)
        self._add(size)
        return _Value(size)

    def _add(self, cost: float) -> None:
        self.work += cost + _NODE_COST

    def _value(self, node: nodes.Node, names: Names) -> _Value:
        self._add(0)
        match node:
            case nodes.TemplateData():
                return _Value(len(node.data), _TEXT)
            case nodes.Const():
                return _constant(node.value)
            case nodes.Name():
                return names.get(node.name, _INPUT)
            case nodes.Getattr():
                return self._attribute(self._value(node.node, names), node.attr)
            case nodes.Getitem():
                base, index = self._plain(node.node, names), self._plain(node.arg, names)
                self._add(base.size + index.size if isinstance(node.arg, nodes.Slice) else index.size)
                return _Value(base.size + _NODE_COST)
            case nodes.Test(name=name) if name in _TESTS and not (node.args or node.kwargs):
                if not (isinstance(node.node, nodes.Name) and name in ("defined", "undefined")):
                    self._plain(node.node, names)
                return _A_NUMBER
            case nodes.Filter(node=nodes.Node(), dyn_args=None, dyn_kwargs=None):
                return self._filter(node, names)
            case nodes.Call(dyn_args=None, dyn_kwargs=None):
                return self._call(node, names)
            case nodes.BinExpr() | nodes.UnaryExpr() | nodes.Compare() | nodes.CondExpr():
                return self._operation(node, names)
            case nodes.Concat():
                size = sum(self._plain(part, names).written for part in node.nodes)
                self._add(size)
                return _Value(size, _TEXT)
            case _:
                return self._sum(_parts(node), names)

    def _attribute(self, base: _Value, name: str) -> _Value:
        if base.kind == _NAMESPACE:
            return self._attributes.get(name, _A_NUMBER)
        if base.kind == _LOOP:
            if name in _LOOP_NUMBERS:
                return _A_NUMBER
            if name not in ("previtem", "nextitem"):
                raise _NotSimpleError
        return _Value(base.size + _NODE_COST)

    def _operation(self, node: nodes.Expr, names: Names) -> _Value:
        match node:
            case nodes.And() | nodes.Or():
                return _joined(self._plain(node.left, names), self._plain(node.right, names))
            case nodes.BinExpr():
                return self._sum_of(node, self._plain(node.left, names), self._plain(node.right, names))
            case nodes.UnaryExpr():
                self._plain(node.node, names)
                return _A_NUMBER
            case nodes.Compare():
                return self._comparison(node, names)
            case nodes.CondExpr():
                self._plain(node.test, names)
                return _joined(*(self._plain(each, names) for each in (node.expr1, node.expr2) if each is not None))
            case _:
                raise _NotSimpleError

    def _sum_of(self, node: nodes.BinExpr, left: _Value, right: _Value) -> _Value:
        """Return the bound of `a + b` and the like; `%` of a text would be a format string."""
        match node:
            case nodes.Add() | nodes.Sub() if _NUMBER in (left.kind, right.kind):
                return _A_NUMBER  # the other one is a number too, or the operator fails
            case nodes.Add():
                self._add(left.size + right.size)
                return _Value(left.size + right.size, _TEXT if _TEXT in (left.kind, right.kind) else _OTHER)
            case nodes.Mod() | nodes.FloorDiv() | nodes.Div() if left.kind == _NUMBER:
                return _A_NUMBER
            case _:
                raise _NotSimpleError

    def _comparison(self, node: nodes.Compare, names: Names) -> _Value:
        left = self._plain(node.expr, names)
        for operand in node.ops:
            right = self._plain(operand.expr, names)
            if operand.op in ("in", "notin"):
                self._add(right.size * min(left.size, _NEEDLE))
            else:
                self._add(10 * min(left.size, right.size))
            left = right
        return _A_NUMBER

    def _call(self, node: nodes.Call, names: Names) -> _Value:
        match node.node:
            case nodes.Name(name="namespace") if "namespace" not in names and not node.args:
                for keyword in node.kwargs:
                    self._set_attribute(keyword.key, self._value(keyword.value, names))
                return _Value(0, _NAMESPACE)
            case nodes.Name(name="raise_exception") if "raise_exception" not in names and len(node.args) == 1:
                return self._sum(node.args, names)
            case nodes.Name(name="strftime_now") if "strftime_now" not in names:
                layout = _constants(node.args, (str,))
                if node.kwargs or not layout or _WIDE_DATE.search(layout[0]):
                    raise _NotSimpleError
                return _Value(_AS_TEXT * len(layout[0]), _TEXT)
            case nodes.Getattr(attr="get") if not node.kwargs and 1 <= len(node.args) <= 2:
                base = self._plain(node.node.node, names)
                return _joined(base, *(self._plain(each, names) for each in node.args))
            case nodes.Getattr(attr=name) if name in _METHODS and not node.kwargs:
                base = self._plain(node.node.node, names)
                return self._applied(_METHODS[name], base, _constants(node.args, _METHODS[name].args))
            case _:
                raise _NotSimpleError

    def _filter(self, node: nodes.Filter, names: Names) -> _Value:
        assert node.node is not None  # as in the block {% filter %}
        base = self._plain(node.node, names)
        if node.name in ("default", "d") and not node.kwargs:
            return _joined(base, *(self._plain(each, names) for each in node.args))
        if node.name == "tojson" and not node.args:
            return self._applied(_Rule(20, _json_growth(node)), base, [])
        if node.name == "map" and not node.args and [each.key for each in node.kwargs] == ["attribute"]:
            _constants([node.kwargs[0].value], (str,))
            return self._applied(_Rule(100, 1, (), _OTHER), base, [])
        if node.name in ("select", "reject", "selectattr", "rejectattr") and not node.kwargs:
            test = 1 if node.name.endswith("attr") else 0  # the index of its name
            given = _constants(node.args, (str, str, object) if test else (str, object))
            if len(given) < test or (len(given) > test and given[test] not in _ITEM_TESTS):
                raise _NotSimpleError
            return self._applied(_Rule(100, 1, (), _OTHER), base, [])
        if node.name not in _FILTERS or node.kwargs:
            raise _NotSimpleError
        base = base._replace(size=base.written) if _FILTERS[node.name].kind == _TEXT else base
        return self._applied(_FILTERS[node.name], base, _constants(node.args, _FILTERS[node.name].args))

    def _applied(self, rule: _Rule, base: _Value, args: list[Any]) -> _Value:
        """Return the bound of a result; a longer argument takes longer to find, or makes it larger."""
        texts = [arg for arg in args if isinstance(arg, str)]
        longest = max(map(len, texts), default=0)
        growth = rule.growth * (1 + len(texts[-1]) if len(texts) == 2 or rule is _FILTERS["join"] else 1)
        self._add(base.size * max(rule.cost and rule.cost + min(longest, _NEEDLE), growth) + longest)
        return _Value(base.size * growth + _NODE_COST, rule.kind) if growth else _A_NUMBER


def _parts(node: nodes.Node) -> list[Any]:
    """Return the values that a value is made of."""
    match node:
        case nodes.List() | nodes.Tuple():
            return node.items
        case nodes.Slice():
            return [part for part in (node.start, node.stop, node.step) if part is not None]
        case nodes.Dict():
            return [part for pair in node.items for part in (pair.key, pair.value)]
        case _:
            raise _NotSimpleError


def _constant(value: Any) -> _Value:
    if isinstance(value, str):
        return _Value(len(value), _TEXT)
    if isinstance(value, int) and value.bit_length() > 64:
        raise _NotSimpleError
    return _Value(20) if value is None else _A_NUMBER


def _json_growth(node: nodes.Filter) -> float:
    """Return how much longer `tojson` makes a value: an indentation is written once for each level and item."""
    options: dict[str, Any] = {str(each.key): getattr(each.value, "value", ...) for each in node.kwargs}
    indent = options.pop("indent", 0)
    if ... in options.values() or options.keys() - {"ensure_ascii", "sort_keys"}:
        raise _NotSimpleError
    if type(indent) is not int or not 0 <= indent <= _MAX_INDENT:
        raise _NotSimpleError
    return 64 if indent else _AS_JSON


def _constants(args: list[Any], kinds: tuple[type, ...]) -> list[Any]:
    """Return the values of constant arguments of these kinds, or fewer."""
    values = [arg.value if isinstance(arg, nodes.Const) else ... for arg in args]
    if len(values) > len(kinds) or ... in values:
        raise _NotSimpleError
    if not all(value is None or isinstance(value, kind) for value, kind in zip(values, kinds, strict=False)):
        raise _NotSimpleError
    return values


def _joined(*values: _Value) -> _Value:
    """Return the bound of one value or another."""
    kinds = {value.kind for value in values}
    if kinds & {_NAMESPACE, _LOOP} and len(kinds) > 1:
        raise _NotSimpleError
    return _Value(max(value.size for value in values), kinds.pop() if len(kinds) == 1 else _OTHER)
