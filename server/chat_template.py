"""Renders a conversation into a prompt with the model's own Jinja template, in a sandbox.

The template comes with the model, the messages from a client: neither may reach Python. Pure; used by the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.core.errors import ConfigError, InvalidRequestError

_CUT = "<<the final message ends here>>"  # plain text, so that no filter of a template changes it
_OURS = ("messages", "tools", "add_generation_prompt")


class _Generation(Extension):
    """`{% generation %}` marks what training learns from; for serving its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - declared by jinja2 as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. `special_tokens` are names such as bos_token that templates refer to."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json  # jinja's own escapes for HTML
        environment.globals.update(special_tokens, raise_exception=_refuse, strftime_now=_now)
        self.source = source
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))  # it may be told
        except (TemplateError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"The chat template cannot be read: {error}; give another with --chat-template."
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
        """The prompt. With `continue_final_message` it ends where the last message's text does.

        Raises InvalidRequestError, with the template's own words where it refuses the conversation.
        """
        for name in _OURS:
            if name in template_kwargs:
                raise InvalidRequestError(f"chat_template_kwargs may not set {name!r}.", param="chat_template_kwargs")
        shown: list[Mapping[str, Any]] = list(messages)
        if continue_final_message:
            final = shown[-1].get("content") if shown else None
            if not isinstance(final, str):
                raise InvalidRequestError(
                    "continue_final_message needs a last message whose content is a string.", param="messages"
                )
            shown[-1] = {**shown[-1], "content": final + _CUT}
        # Templates ask whether tools and documents are none, which an undefined name is not.
        variables = {"documents": None, **template_kwargs}
        variables.update(messages=shown, tools=tools or None, add_generation_prompt=add_generation_prompt)
        try:
            prompt = self._template.render(variables)
        except Exception as error:  # foreign code over a client's data: whatever it trips on is this request's fault
            raise InvalidRequestError(f"The chat template refuses these messages: {error}", param="messages") from error
        if not continue_final_message:
            return prompt
        if _CUT not in prompt:
            raise InvalidRequestError(
                "The chat template leaves out the last message, so it cannot be continued.", param="messages"
            )
        return prompt[: prompt.rindex(_CUT)]


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
