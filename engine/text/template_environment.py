"""The sandbox in which chat templates run: jinja's, with the functions that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_WORDS = 1000  # of an error


class _Generation(Extension):
    """`{% generation %}` is for training; in serving its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - declared by jinja2 as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_environment(special_tokens: Mapping[str, str]) -> ImmutableSandboxedEnvironment:
    """Return a sandbox that computes nothing while it compiles; `special_tokens` are names like bos_token."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,
        finalize=_as_it_is,
    )
    environment.filters["tojson"] = _to_json  # jinja's escapes for HTML
    environment.globals.update(special_tokens, raise_exception=_refuse, strftime_now=_now)
    return environment


def reason(error: Exception) -> str:
    """Return why a template cannot be compiled, or refuses a conversation."""
    if isinstance(error, RecursionError | MemoryError):
        return "it is nested too deeply"
    words = " ".join(str(error)[: 2 * _MAX_WORDS].split()) or type(error).__name__
    return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "..."


@pass_context  # so that jinja2 cannot call it for a constant when it compiles
def _as_it_is(_: Context, value: Any) -> Any:
    return value


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
