"""Plans the tool calls of an answer: the grammar that they have, and the format they are read in. Pure, any thread."""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.errors import InvalidRequestError, UnsupportedError
from engine.text.chat.chat_format import ChatFormat
from engine.text.fields.chat import ChatFields
from engine.text.fields.sampling import Constraint
from engine.text.grammars.spec import GrammarKind, GrammarSpec
from engine.text.tools.json_calls import forced_grammar
from engine.text.tools.tool_format import ToolFormat


def plan_calls(
    chat: ChatFields, chat_format: ChatFormat, constraint: Constraint | None, special_tokens: Mapping[str, int]
) -> tuple[Constraint | None, ToolFormat | None]:
    """Return the grammar of an answer that may call tools, and the format of the calls in it.

    Calls that must be made have a grammar, and so have calls that may be made instead of an answer that has one:
    its grammar alone would rule them out. Other calls are free text, unless their tool is strict.
    """
    tool_format = chat_format.tool_format
    if chat.choice.mode != "auto" or (constraint is not None and not chat_format.calls_stay_text):
        return _forced_calls(chat, tool_format, constraint, special_tokens)
    if chat_format.calls_stay_text:
        return constraint, None
    if tool_format is None:
        raise UnsupportedError(
            "tools",
            "how this model writes calls is not known here; start the server with --tool-call-parser, or send "
            'tool_choice: "none".',
        )
    return _strict_calls(chat, tool_format, special_tokens), tool_format


def _forced_calls(
    chat: ChatFields, tool_format: ToolFormat | None, constraint: Constraint | None, special_tokens: Mapping[str, int]
) -> tuple[Constraint, ToolFormat]:
    """Return a grammar of calls, perhaps with a JSON answer instead of them, and their format."""
    choice, answer = chat.choice, None
    if constraint is not None:
        answer, param = constraint
        if answer.kind is not GrammarKind.JSON_SCHEMA or answer.text == "false":
            raise InvalidRequestError(
                f'{param} leaves no room for calls of tools; send tool_choice: "none", or leave one of them out.',
                param=param,
            )
    tools = [tool.function for tool in chat.tools or [] if choice.name in (None, tool.function.name)]
    grammar, tool_format = forced_grammar(
        [tool.offered() for tool in tools],
        tool_format,
        special_tokens,
        max_calls=1 if choice.name or not chat.parallel_tool_calls else None,
        answer=answer if choice.mode == "auto" else None,
    )
    return Constraint(GrammarSpec.of_lark(grammar), "tools"), tool_format


def _strict_calls(chat: ChatFields, tool_format: ToolFormat, special_tokens: Mapping[str, int]) -> Constraint | None:
    """Return the grammar of an answer with strict calls, or None without any."""
    tools = [tool.function.offered() for tool in chat.shown_tools]
    if not any(tool.strict for tool in tools):
        return None
    grammar = tool_format.grammar(tools, special_tokens, parallel=chat.parallel_tool_calls)
    return Constraint(GrammarSpec.of_lark(grammar), "tools")
