"""Bounds the work of a chat template, which may loop or write without end.

Each rendering gets a budget that depends on the size of its input. Steps are charged for every turn of a loop, call,
filter and operator. Sizes are charged for every text or list that is made, beforehand where it can be larger than its
parts. The work between two charges is bounded by the sizes, so checking the clock at charges bounds the time. Any thread;
a rendering stays on one.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from types import GeneratorType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# For an empty conversation, and more for each value and character of its input. A long tool list takes 1,000 steps.
_STEPS, _STEPS_PER_VALUE = 20_000, 100
_SIZE, _SIZE_PER_CHAR = 32 << 20, 32
_SECONDS, _SECONDS_PER_VALUE, _SECONDS_PER_CHAR = 0.5, 20e-6, 0.2e-6
_STEPS_PER_LOOK = 16  # charges between two looks at the clock
_MAX_NUMBER = 100_000  # as an argument of a filter or method: a width, a count, an indent
_MAX_BITS = 100_000  # of a whole number
_MAX_INDENT = 16
_HUGE_FIELD = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})|\{[^{}]*(?:\{|\d{5})")  # of a format string
_CONTAINERS = (list, tuple, dict, set, frozenset, Namespace)
# Filters that pass on a container, or parts of it, without processing its contents.
_LOOKS_ON = frozenset(
    (
        "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject",
        "rejectattr", "reverse", "select", "selectattr", "slice",
    )
)  # fmt: skip
_LEFT_OUT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")  # costly, and useless for prompts


class BudgetError(Exception):
    """A template exceeded its budget."""


def count(value: Any, max_values: float, max_chars: float) -> tuple[int, int]:
    """Return the values and characters in a value. Raises BudgetError beyond limits."""
    num_values = num_chars = 0
    rest = [value]
    while rest:
        each = rest.pop()
        num_values += 1
        if isinstance(each, str | bytes):
            num_chars += len(each)
        elif isinstance(each, Mapping):
            rest += each.keys()
            rest += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            rest += each
        elif isinstance(each, Namespace):
            rest.append(object.__getattribute__(each, "_Namespace__attrs"))
        else:
            num_chars += 16
        if num_values > max_values or num_chars > max_chars:
            raise BudgetError("it makes texts or lists that are too large")
    return num_values, num_chars


class Budget:
    """The remaining budget of one rendering."""

    __slots__ = ("_end_s", "_until_look", "chars_left", "steps_left")

    def __init__(self, shown: Any) -> None:
        """`shown` is the template's whole input."""
        num_values, num_chars = count(shown, inf, inf)
        self.steps_left = _STEPS + _STEPS_PER_VALUE * num_values
        self.chars_left = _SIZE + _SIZE_PER_CHAR * num_chars
        self._end_s = time.thread_time() + _SECONDS + _SECONDS_PER_VALUE * num_values + _SECONDS_PER_CHAR * num_chars
        self._until_look = _STEPS_PER_LOOK

    def step(self, num_steps: int = 1) -> None:
        """Charge steps of work."""
        self.steps_left -= num_steps
        if self.steps_left < 0:
            raise BudgetError("it takes too many steps")
        self._until_look -= 1
        if self._until_look < 0:
            self._until_look = _STEPS_PER_LOOK
            if time.thread_time() > self._end_s:
                raise BudgetError("it takes too long")

    def take(self, size: int) -> None:
        """Charge characters, or items of a list."""
        self.chars_left -= size
        if self.chars_left < 0:
            raise BudgetError("it makes texts or lists that are too large")

    def take_whole(self, value: Any) -> None:
        """Charge a value with everything in it, at its size when written out."""
        if type(value) is str:
            self.take(len(value))
        else:
            self.take(sum(count(value, self.steps_left, self.chars_left)))

    def check_whole(self, value: Any) -> None:
        """Raise BudgetError for a value that is too large to be written out."""
        if isinstance(value, _CONTAINERS):
            self.step(1 + count(value, self.steps_left, self.chars_left)[0] // 16)


class _Current(threading.local):
    budget: Budget | None = None


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that charges its templates. Render within `spending`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        # Nothing is computed when a template is compiled, as there is no budget yet.
        super().__init__(**options, optimized=False, finalize=self._finalize())
        self._current = _Current()
        for name in _LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]

    def bound_filters(self) -> None:
        """Make all filters charge. Call it once all filters are registered."""
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}

    @contextmanager
    def spending(self, budget: Budget) -> Iterator[None]:
        """Charge this thread's rendering within the block to a budget."""
        self._current.budget = budget
        try:
            yield
        finally:
            self._current.budget = None

    # -- called by compiled templates -----------------------------------------------------------------------------------

    @property
    def budget(self) -> Budget:
        """The budget of this thread's rendering. Raises BudgetError outside one."""
        budget = self._current.budget
        if budget is None:
            raise BudgetError("it works before it is rendered")
        return budget

    def turn(self, num_chars: int) -> bool:
        """Charge a turn of a loop or a call of a macro; return True, for a condition."""
        self.budget.take(num_chars)
        return True

    def whole(self, value: Any) -> Any:
        """Check and return a list, tuple or dict that the template writes."""
        self.budget.check_whole(value)
        return value

    def concatenated(self, *values: Any) -> str:
        """Return `a ~ b`."""
        for value in values:
            self.budget.take_whole(value)
        return "".join(map(str, values))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something, after checking that its result fits the budget."""
        budget = self.budget
        budget.step()
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(owner, str | bytes | int | float):
            args = _check_method(budget, obj.__name__, owner, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        if obj is dict:
            budget.check_whole(result)
        budget.take(_size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator that can make large values of small ones."""
        budget = self.budget
        budget.step()
        if operator == "%" and isinstance(left, str):
            _check_format(budget, left, right)
        elif operator == "*":
            _check_product(budget, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _MAX_BITS:
                raise BudgetError("it computes numbers that are too large")
        elif operator == "+":
            budget.take(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def _finalize(self) -> Callable[[Context, Any], Any]:
        @pass_context
        def finalize(_: Context, value: Any) -> Any:
            self.budget.take_whole(value)
            return value

        return finalize

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context, passed before the value

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            budget.step()
            values = _check_filter(budget, name, args[num_passed:], kwargs)
            result = function(*args[:num_passed], *values, **kwargs)
            if isinstance(result, GeneratorType):
                return _metered(budget, result)
            budget.take(_size(result))
            return result

        return bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Charging().visit(tree)
        return tree


class _Charging(NodeTransformer):
    """Inserts calls of the environment's methods above into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - named by jinja2
        """Charge turns, also those that a condition skips."""
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_call("turn", [nodes.Const(0)], node.lineno), node.test, lineno=node.lineno)
        return _charged(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return _charged(self.generic_visit(node))

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return _charged(self.generic_visit(node))

    def visit_Block(self, node: nodes.Block) -> nodes.Node:  # noqa: N802
        return _charged(self.generic_visit(node))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("concatenated", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._literal(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._literal(node, [pair.value for pair in node.items])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self.generic_visit(node) if node.ctx != "load" else self._literal(node, node.items)

    def _literal(self, node: nodes.Literal, items: Iterable[nodes.Node]) -> nodes.Node:
        is_plain = all(isinstance(item, nodes.Const) for item in items)
        self.generic_visit(node)
        return node if is_plain else _call("whole", [node], node.lineno)


def _call(method: str, args: list[Any], lineno: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=lineno)
    return nodes.Call(function, args, [], None, None, lineno=lineno)


def _charged(node: Any) -> nodes.Node:
    num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    turn = nodes.ExprStmt(_call("turn", [nodes.Const(num_chars)], node.lineno), lineno=node.lineno)
    node.body.insert(0, turn)
    assert isinstance(node, nodes.Node)
    return node


def _metered(budget: Budget, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a filter, charging each."""
    for item in items:
        budget.step()
        budget.check_whole(item)
        yield item


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise BudgetError("it computes numbers that are too large")
        return
    for text, times in ((left, right), (right, left)):
        if isinstance(times, int):
            budget.take(_size(text) * max(times, 0))
            if isinstance(text, list | tuple) and times > 1:
                budget.check_whole([text] * min(times, 2))


def _check_format(budget: Budget, layout: str, values: Any) -> None:
    if _HUGE_FIELD.search(layout):
        raise BudgetError("it writes fields that are too wide")
    num_fields = layout.count("%") + layout.count("{")
    budget.take(len(layout) + num_fields * sum(count(values, budget.steps_left, budget.chars_left)))


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            raise BudgetError("it gives a filter or a method a number that is too large")


def _check_method(
    budget: Budget, name: str, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Charge a method of a text or number; return its arguments as lists."""
    if name in ("format", "format_map"):
        _check_format(budget, owner, [args, dict(kwargs)])
        return args
    _check_numbers([*args, *kwargs.values()])
    if name == "join" and args:
        args = (_join(budget, args[0], owner), *args[1:])
    elif name == "replace" and len(args) > 1:
        _replace(budget, owner, *args[:2])
    elif name == "expandtabs":
        budget.take(len(owner) * max([*args, *kwargs.values(), 8]))
    elif name == "translate" and args and isinstance(args[0], Mapping):
        budget.take(len(owner) * max((_size(value) for value in args[0].values()), default=0))
    else:
        budget.take(_MAX_NUMBER if name in ("center", "ljust", "rjust", "zfill", "to_bytes") else 0)
    return args


def _check_filter(budget: Budget, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charge a filter; return its arguments, with iterators made into lists."""
    _check_numbers([*args[1:], *kwargs.values()])
    value = args[0] if args else None
    options = [*args[1:], *kwargs.values()]
    if name == "join":
        separator = options[0] if options else ""
        return (_join(budget, value, separator), *args[1:])
    if name not in _LOOKS_ON:
        if isinstance(value, GeneratorType):
            value = list(value)
            args = (value, *args[1:])
        if isinstance(value, _CONTAINERS):
            budget.take_whole(value)
    if name == "replace" and len(options) > 1:
        _replace(budget, str(value), *options[:2])
    elif name == "format":
        _check_format(budget, str(value), [args[1:], dict(kwargs)])
    elif name == "indent":
        budget.take((str(value).count("\n") + 1) * max(map(_width, options), default=4))
    elif name == "tojson":
        if any(_width(option) > _MAX_INDENT for option in options):
            raise BudgetError(f"it indents JSON by more than {_MAX_INDENT}")
    elif name == "sum" and any(
        isinstance(option, str | bytes | list | tuple) for option in [kwargs.get("start"), *args[2:]]
    ):
        raise BudgetError("it adds up what are no numbers")
    return args


def _width(option: Any) -> int:
    return option if isinstance(option, int) else _size(option) if isinstance(option, str) else 0


def _join(budget: Budget, items: Any, separator: Any) -> Any:
    """Charge a join; return its items as a list."""
    items = items if isinstance(items, str) else list(items)
    budget.take(len(items) * _size(separator))
    budget.take_whole(items)
    return items


def _replace(budget: Budget, text: Any, old: Any, new: Any) -> None:
    if isinstance(old, type(text)) and isinstance(new, type(text)):
        budget.take(len(text) + text.count(old) * len(new))
