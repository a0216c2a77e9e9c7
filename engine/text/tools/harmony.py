"""Tool calls in the channels of engine/text/channels.py. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from engine.core.errors import InvalidRequestError
from engine.text.channels import CHANNEL, CONSTRAIN, FUNCTIONS, MARKS, MESSAGE, START, ChannelParser
from engine.text.tools.tool_format import Message, OfferedTool, ToolFormat, Tools, any_of, literal


class HarmonyFormat(ToolFormat):
    """Calls as messages to a function, beside messages of thoughts and content."""

    def parser(self, tools: Tools) -> ChannelParser:
        return ChannelParser(reads_calls=True, tools=tools)

    def grammar(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:  # noqa: ARG002
        """Return Lark for messages in channels. Raises InvalidRequestError."""
        if not special_tokens.keys() >= self.markup:
            raise InvalidRequestError(
                "tools cannot be used: the marks of this model's channels are no tokens, so strict cannot be enforced; leave it out.",
                param="tools",
            )
        start, channel, message, constrain, end = (
            literal(mark, special_tokens) for mark in (START, CHANNEL, MESSAGE, CONSTRAIN, "<|end|>")
        )
        lines = [
            f'start: message ({end} {start} "assistant" message)*',
            f"message: {channel} (said | /(analysis|commentary) to=functions\\./ behind) | / to=functions\\./ before",
            f"said: /analysis|commentary|final/ {message} TEXT",
            "TEXT: /(?s:.*)/",
            f"json: / ?/ ({constrain} /json/)? | / json/",
            f"behind: {any_of('behind', len(tools))}",
            f"before: {any_of('before', len(tools))}",
        ]
        for index, tool in enumerate(tools):
            lines += [
                f"arguments_{index}: {tool.free_arguments()}",
                f'behind_{index}: "{tool.name}" json {message} arguments_{index}',
                f'before_{index}: "{tool.name}" {channel} /analysis|commentary/ json {message} arguments_{index}',
            ]
        return "\n".join(lines)

    def forced(
        self,
        tools: Sequence[OfferedTool],
        special_tokens: Mapping[str, int],
        *,
        max_calls: int,  # noqa: ARG002
    ) -> list[str] | None:
        """Return Lark for thoughts and one call, which ends the turn; None if the marks are no tokens."""
        if not special_tokens.keys() >= self.markup:
            return None
        start, channel, message, constrain, end = (
            literal(mark, special_tokens) for mark in (START, CHANNEL, MESSAGE, CONSTRAIN, "<|end|>")
        )
        lines = [
            f'calls: ({channel} "analysis" {message} TEXT {end} {start} "assistant")* {channel} call',
            "TEXT: /(?s:.*)/",
            f"call: {any_of('call', len(tools))}",
        ]
        for index, tool in enumerate(tools):
            head = json.dumps(f"commentary to={FUNCTIONS}{tool.name} ")
            lines += [f'call_{index}: {head} {constrain} "json" {message} arguments_{index}']
            lines += [f"arguments_{index}: {tool.arguments({})}"]
        return lines

    def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with thoughts where the template looks for them."""
        fitted: list[Message] = []
        for message in messages:
            thoughts = message.get("reasoning_content")
            # The template takes content or thoughts beside a call.
            has_place = not (message.get("tool_calls") and message["content"])
            fitted.append({"thinking": thoughts, **message} if thoughts and has_place else message)
        return fitted


HARMONY = HarmonyFormat(
    name="harmony",
    aliases=("openai",),
    signs=(CHANNEL, MESSAGE),
    inner=MARKS,
    may_answer_instead=False,  # an answer always begins with a channel
)
