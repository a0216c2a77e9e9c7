"""Bounds the work of a chat template, which may loop or write without end.

Each rendering gets a budget that depends on the size of its input. Steps are charged for every turn of a loop, call,
filter and operator. Sizes are charged for every text or list that is made, beforehand where it can be larger than its
parts. The work between two charges is bounded by the sizes, so checking the clock at charges bounds the time. Any thread;
a rendering stays on one.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
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
# Filters that pass on a container, or parts of it, without processing its contents; `join` is charged apart.
_LOOKS_ON = frozenset(
    (
        "attr", "batch", "count", "d", "default", "first", "items", "join", "last", "length", "list", "map", "random",
        "reject", "rejectattr", "reverse", "select", "selectattr", "slice",
    )
)  # fmt: skip
# Filters and methods that are costly, and useless for prompts.
_NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_NO_METHODS = ("expandtabs", "translate")


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

    def item(self, value: Any) -> Any:
        """Charge an item that a filter yields, and return it."""
        self.step()
        self.check_whole(value)
        return value


_budget: ContextVar[Budget] = ContextVar("budget")  # of the rendering


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Charge the rendering within the block to a budget."""
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


@pass_context  # so that it is not called when a template is compiled
def _written(_: Context, value: Any) -> Any:
    _budget.get().take_whole(value)
    return value


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that charges its templates. Render within `spending`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """`filters` are added to jinja's."""
        # Nothing is computed when a template is compiled, as there is no budget yet.
        super().__init__(**options, optimized=False, finalize=_written)
        known = {**self.filters, **filters}
        self.filters = {name: _bounded(name, known[name]) for name in known if name not in _NO_FILTERS}
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute."""
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    # -- called by compiled templates -----------------------------------------------------------------------------------

    def turn(self, num_chars: int) -> bool:
        """Charge a turn of a loop or a call of a macro; return True, for a condition."""
        _budget.get().take(num_chars)
        return True

    def whole(self, value: Any) -> Any:
        """Check and return a list, tuple or dict that the template writes."""
        _budget.get().check_whole(value)
        return value

    def concatenated(self, *values: Any) -> str:
        """Return `a ~ b`."""
        for value in values:
            _budget.get().take_whole(value)
        return "".join(map(str, values))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something, after checking that its result fits the budget."""
        budget = _budget.get()
        budget.step()
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(owner, str | bytes | int | float):
            if obj.__name__ == "join" and args:
                args = (_checked(budget, "join", args[0], [owner]), *args[1:])
            else:
                _checked(budget, obj.__name__, owner, [*args, *kwargs.values()])
        result = super().call(context, obj, *args, **kwargs)
        if obj is dict:
            budget.check_whole(result)
        budget.take(_size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator that can make large values of small ones."""
        budget = _budget.get()
        budget.step()
        if operator == "%" and isinstance(left, str):
            _checked(budget, "format", left, [right])
        elif operator == "*":
            _check_product(budget, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        elif operator == "+":
            budget.take(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Charging().visit(tree)
        return tree


class _Charging(NodeTransformer):
    """Inserts calls of the environment's methods above into a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - named by jinja2
        """Charge turns, also those that a condition skips."""
        self._body(node)
        if node.test is not None:
            node.test = nodes.And(_call("turn", [nodes.Const(0)], node.lineno), node.test, lineno=node.lineno)
        return node

    def _body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_call("turn", [nodes.Const(num_chars)], node.lineno), lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = visit_Block = _body  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("concatenated", node.nodes, node.lineno)

    def _literal(self, node: nodes.Literal) -> nodes.Node:
        self.generic_visit(node)
        is_value = getattr(node, "ctx", "load") == "load"  # not the names that a loop sets
        return _call("whole", [node], node.lineno) if is_value else node

    visit_List = visit_Dict = visit_Tuple = _literal  # noqa: N815


def _call(method: str, args: list[Any], lineno: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=lineno)
    return nodes.Call(function, args, [], None, None, lineno=lineno)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that charges, and that returns lists instead of generators."""
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0  # a context, passed before the value

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        passed, (value, *rest) = args[:num_passed], args[num_passed:]
        value = _checked(budget, name, value, [*rest, *kwargs.values()])
        result = function(*passed, value, *rest, **kwargs)
        if isinstance(result, GeneratorType):
            return [budget.item(item) for item in result]
        budget.take(_size(result))
        return result

    return bounded


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def _width(option: Any) -> int:
    return option if isinstance(option, int) else _size(option) if isinstance(option, str) else 0


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise BudgetError("it computes numbers that are too large")


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for text, times in ((left, right), (right, left)):
        if isinstance(times, int):
            budget.take(_size(text) * max(times, 0))
            if isinstance(text, list | tuple) and times > 1:
                budget.check_whole([text] * min(times, 2))


def _checked(budget: Budget, name: str, value: Any, options: list[Any]) -> Any:
    """Charge a filter of a value, or a method of a text or number; return the value."""
    if name not in _LOOKS_ON and isinstance(value, _CONTAINERS):
        budget.take_whole(value)
    if name in ("format", "format_map"):
        layout = str(value)
        if _HUGE_FIELD.search(layout):
            raise BudgetError("it writes fields that are too wide")
        num_fields = layout.count("%") + layout.count("{")
        budget.take(len(layout) + num_fields * sum(count(options, budget.steps_left, budget.chars_left)))
        return value
    if any(isinstance(option, int) and abs(option) > _MAX_NUMBER for option in options):
        raise BudgetError("it gives a filter or a method a number that is too large")
    if name == "join":
        value = value if isinstance(value, str) else list(value)
        budget.take(len(value) * _size(options[0] if options else ""))
        budget.take_whole(value)
    elif name == "replace" and len(options) > 1:
        text, old, new = value if isinstance(value, str | bytes) else str(value), *options[:2]
        if isinstance(old, type(text)) and isinstance(new, type(text)):
            budget.take(len(text) + text.count(old) * len(new))  # type: ignore[arg-type]  # both texts, or both bytes
    elif name == "indent":
        budget.take((str(value).count("\n") + 1) * max(map(_width, options), default=4))
    elif name == "tojson" and any(_width(option) > _MAX_INDENT for option in options):
        raise BudgetError(f"it indents JSON by more than {_MAX_INDENT}")
    elif name == "sum" and any(isinstance(option, list | tuple) for option in options):
        raise BudgetError("it adds up what are no numbers")
    return value
