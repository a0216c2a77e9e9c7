"""Renders a conversation with the model's Jinja template, in a sandbox.

The template comes with the model, the messages come from a client: neither may reach Python, or work without end
(template_budget.py). Pure; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from engine.core.errors import ConfigError, InvalidRequestError
from engine.text.template_budget import BoundedEnvironment, Budget, BudgetError, spending
from engine.text.types import RESERVED

_CUT = "<<the final message ends here>>"  # plain text, so that no filter of a template changes it
MAX_SOURCE = 128 << 10  # characters of a template; those of models that call tools have up to 30,000
_MAX_WORDS = 1000  # of an error


class _Generation(Extension):
    """`{% generation %}` is for training; in serving its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - declared by jinja2 as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template; `special_tokens` are names like bos_token."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if not isinstance(source, str):  # a model's file may hold any value
            raise ConfigError("The chat template cannot be read: it is no text; give another with --chat-template.")
        if len(source) > MAX_SOURCE:
            raise ConfigError(
                f"The chat template has more than {MAX_SOURCE} characters; give another with --chat-template."
            )
        environment = BoundedEnvironment(
            {"tojson": _to_json},  # jinja's escapes for HTML
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
        )
        environment.globals.update(special_tokens, raise_exception=_refuse, strftime_now=_now)
        self.source = source
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(
                meta.find_undeclared_variables(environment.parse(source))
            )  # that a caller may set
        except Exception as error:  # besides TemplateError, any error of compiling jinja's Python
            reason = "it is nested too deeply" if isinstance(error, RecursionError | MemoryError) else _in_short(error)
            raise ConfigError(
                f"The chat template cannot be read: {reason}; give another with --chat-template."
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """Return the prompt; `continue_final_message` ends it in the last message.

        Raises InvalidRequestError, with the template's own message where it refuses the conversation.
        """
        if template_kwargs:
            _check_names(template_kwargs)
        # Templates ask whether tools and documents are none, which an undefined name is not.
        variables = {"documents": None, **template_kwargs}
        variables.update(messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt)
        if not continue_final_message:
            return self._render(variables)
        variables["messages"] = [*messages[:-1], _marked(messages)]
        prompt = self._render(variables)
        if _CUT not in prompt:
            raise InvalidRequestError(
                "The chat template leaves out the last message, so it cannot be continued.", param="messages"
            )
        return prompt[: prompt.rindex(_CUT)]

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            with spending(Budget(variables)):
                return self._template.render(variables)
        except BudgetError as error:
            raise InvalidRequestError(
                f"The model's chat template cannot write these messages: {error}; send less, or start the server with "
                "another --chat-template.",
                param="messages",
            ) from error
        except Exception as error:  # foreign code over a client's data: any error is this request's fault
            raise InvalidRequestError(
                f"The chat template refuses these messages: {_in_short(error)}", param="messages"
            ) from error


def _check_names(template_kwargs: Mapping[str, Any]) -> None:
    for name in sorted(RESERVED):
        if name in template_kwargs:
            raise InvalidRequestError(f"chat_template_kwargs may not set {name!r}.", param="chat_template_kwargs")


def _marked(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the last message with a mark at its end."""
    final = messages[-1].get("content") if messages else None
    if not isinstance(final, str):
        raise InvalidRequestError(
            "continue_final_message needs a last message whose content is a string.", param="messages"
        )
    return {**messages[-1], "content": final + _CUT}


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _in_short(error: Exception) -> str:
    words = " ".join(str(error)[: 2 * _MAX_WORDS].split())
    return words if len(words) <= _MAX_WORDS else words[:_MAX_WORDS] + "..."


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
