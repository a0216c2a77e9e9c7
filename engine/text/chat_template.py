"""Renders a conversation with the model's Jinja template, in a sandbox.

The template comes with the model, which the operator chose; the messages come from a client, and may not make it work without
end. A short conversation is rendered here, where each turn of a loop checks the clock and the prompt has a bound. What takes
longer, and a long conversation, is rendered in a process with limits of time and memory (template_process.py). Any thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jinja2 import Template, meta, nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.runtime import Context

from engine.core.errors import ConfigError, InvalidRequestError, OverloadedError
from engine.system.calls import foreign_code
from engine.system.child_process import Ask, ChildError, ChildLostError, ChildProcess, Parts
from engine.system.regular_file import read_setting
from engine.text.template_environment import make_environment, reason
from engine.text.types import RESERVED

_CUT = "<<the final message ends here>>"  # plain text, so that no filter of a template changes it
MAX_INPUT = 32_768  # characters of JSON of a conversation that is rendered on the caller's thread
MAX_SOURCE = 128 << 10  # characters of a template; those of models that call tools have up to 30,000
_HERE_S = 0.01  # CPU time of a rendering on the caller's thread; a chat takes 0.1 ms
_HERE_CHARS = 4 << 20  # of a prompt made there
_LIMIT_S = 60.0  # the process enforces far lower limits of CPU time itself
_RETRY_S = 1.0
_PROBE = "quire-text"
_QUESTION = ({"role": "user", "content": "a"},)
_MAX_OPENINGS = 256  # variables whose answers' openings are remembered; and characters of them

_to_json = json.JSONEncoder(ensure_ascii=False).encode
_end_s: ContextVar[float] = ContextVar("end_s")  # CPU time of this thread at which a rendering is given up


class _GivenUpError(Exception):
    """A rendering takes too long for the caller's thread."""


def read_template(given: str | Path) -> str:
    """Return a chat template that a setting gives: a file's, or the text itself. Raises ConfigError."""
    text = str(given)
    if "{%" not in text and "{{" not in text:
        text = read_setting("--chat-template", given, ConfigError)
    ChatTemplate(text, {})
    return text


class ChatTemplate:
    """A compiled template; `special_tokens` are names like bos_token."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if not isinstance(source, str):  # a model's file may hold any value
            raise ConfigError("The chat template cannot be read: it is no text; give another with --chat-template.")
        if len(source) > MAX_SOURCE:
            raise ConfigError(
                f"The chat template has more than {MAX_SOURCE} characters; give another with --chat-template."
            )
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._openings: dict[str, str] = {}
        self._child = ChildProcess("engine.text.template_process", limit_s=_LIMIT_S, set_up=self._set_up)
        with foreign_code(lambda error: _unreadable(reason(error))):  # errors of compiling jinja's Python among them
            environment = make_environment(special_tokens)
            tree = environment.parse(source)
            self.variables = _variables(tree)
            self._template = _compiled(tree, special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """Return the prompt, waiting for the process if that has to render it; takes and raises what `begin` does."""
        begun = self.begin(messages, **how)
        return begun if isinstance(begun, str) else begun()

    def begin(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str | Callable[[], str]:
        """Return the prompt, or a function that returns it and may wait for the process.

        `continue_final_message` ends the prompt in the last message. Both raise InvalidRequestError, with the template's
        message where it refuses the conversation.
        """
        if template_kwargs:
            _check_names(template_kwargs)
        # Templates ask whether tools and documents are none, which an undefined name is not.
        variables = {"documents": None, **template_kwargs}
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages)]
        if self._wants_parts:
            messages = [{**each, "content": in_parts(each.get("content") or "")} for each in messages]
        variables.update(messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt)
        if not continue_final_message:
            return self._render(variables)
        prompt = self._render(variables)
        return _cut(prompt) if isinstance(prompt, str) else lambda: _cut(prompt())

    def opening(self, template_kwargs: Mapping[str, Any]) -> str:
        """Return what the template writes for an answer to open with; "" if it refuses a short conversation."""
        name = _to_json(template_kwargs)
        if name not in self._openings:
            if len(self._openings) == _MAX_OPENINGS or len(name) > _MAX_OPENINGS:
                return ""
            how = {"continue_final_message": False, "template_kwargs": template_kwargs}
            try:
                without, whole = (self.render(_QUESTION, add_generation_prompt=add, **how) for add in (False, True))
            except InvalidRequestError:
                without = whole = ""
            except OverloadedError:
                return ""
            self._openings[name] = whole.removeprefix(without) if whole.startswith(without) else ""
        return self._openings[name]

    def close(self) -> None:
        """End the process for good. Idempotent."""
        self._child.close()

    @cached_property
    def _wants_parts(self) -> bool:
        """Return whether the template shows a list of parts, and no text as it is."""
        return not self._shows(_PROBE) and self._shows(in_parts(_PROBE))

    def _shows(self, content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            text = self._render({"documents": None, "messages": messages, "tools": None, "add_generation_prompt": True})
            return _PROBE in (text if isinstance(text, str) else text())
        except (InvalidRequestError, OverloadedError):
            return False

    def _render(self, variables: dict[str, Any]) -> str | Callable[[], str]:
        try:
            question = _to_json(variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"The chat template takes values of JSON only: {reason(error)}.", param="messages"
            ) from error
        if len(question) <= MAX_INPUT:
            _end_s.set(time.thread_time() + _HERE_S)
            try:
                return self._template.render(variables)
            except _GivenUpError:
                pass
            except Exception as error:  # a foreign program over a client's data: any error is this request's fault
                raise _refusal(reason(error)) from error
        return partial(self._ask_child, question)

    def _ask_child(self, question: str) -> str:
        try:
            answer = self._child.ask([bytearray(question.encode("utf-8", "surrogatepass"))])
        except ChildLostError as error:
            raise OverloadedError(
                "Chat templates cannot be rendered now; try again.", retry_after_s=_RETRY_S
            ) from error
        except ChildError as error:
            raise InvalidRequestError(
                "The model's chat template cannot write these messages: it takes too much time or memory; send less, or "
                "start the server with another --chat-template.",
                param="messages",
            ) from error
        if why := answer[0].decode("utf-8", "surrogatepass"):
            raise _refusal(why)
        return answer[1].decode("utf-8", "surrogatepass")

    def _set_up(self, ask: Ask) -> None:
        """Send a new process the template."""
        document = {"source": self.source, "special_tokens": self._special_tokens}
        answer: Parts = ask([bytearray(_to_json(document).encode("utf-8", "surrogatepass"))])
        if why := answer[0].decode("utf-8", "surrogatepass"):
            raise _unreadable(why)


def _variables(tree: nodes.Template) -> frozenset[str]:
    """Return the variables that a caller may set."""
    generator = meta.TrackingCodeGenerator(tree.environment)  # type: ignore[arg-type]  # never None in a parsed tree
    generator.optimizer = None  # which would compute the template's constants, however large
    generator.visit(tree)
    return frozenset(generator.undeclared_identifiers)


class _Generator(CodeGenerator):
    """Leaves constants to the rendering, however large; jinja computes those that are output when it compiles."""

    def _output_child_to_const(self, node: nodes.Expr, *more: Any) -> str:
        if isinstance(node, nodes.TemplateData):
            return super()._output_child_to_const(node, *more)
        raise nodes.Impossible


def _compiled(tree: nodes.Template, special_tokens: Mapping[str, str]) -> Template:
    """Return a template that checks the clock at each turn of a loop, and bounds its prompt."""
    environment = make_environment(special_tokens)
    environment.finalize, environment.code_generator_class = None, _Generator
    environment.concat = _concatenated  # type: ignore[method-assign]  # "".join
    environment.filters["turn"] = _turn
    for loop in tree.find_all(nodes.For):
        turn = nodes.Filter(nodes.Const(None), "turn", [], [], None, None, lineno=loop.lineno)
        loop.body.insert(0, nodes.ExprStmt(turn, lineno=loop.lineno))
        if loop.test is not None:
            loop.test = nodes.And(turn, loop.test, lineno=loop.lineno)
    return environment.from_string(tree)


@pass_context  # so that jinja2 cannot call it when it compiles
def _turn(_: Context, __: None) -> bool:
    if time.thread_time() > _end_s.get():
        raise _GivenUpError
    return True


def _concatenated(pieces: Iterable[str]) -> str:
    text, num_left = [], _HERE_CHARS
    for piece in pieces:
        num_left -= len(piece)
        if num_left < 0:
            raise _GivenUpError
        text.append(piece)
    return "".join(text)


def in_parts(content: Any) -> list[Any]:
    """Return a message's content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


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


def _cut(prompt: str) -> str:
    """Return the prompt up to the mark."""
    if _CUT not in prompt:
        raise InvalidRequestError(
            "The chat template leaves out the last message, so it cannot be continued.", param="messages"
        )
    return prompt[: prompt.rindex(_CUT)]


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The chat template refuses these messages: {why}",
        param="messages",
        log_message="The chat template refuses these messages.",  # its own words may quote them
    )


def _unreadable(why: str) -> ConfigError:
    return ConfigError(f"The chat template cannot be read: {why.rstrip('.')}; give another with --chat-template.")
