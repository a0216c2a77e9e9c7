"""A tool-call format: `<call name>{...}</call>`. Its signs, parser and grammar in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.text.tools.json_arguments import JsonScanner
from engine.text.tools.tool_format import CallParser, OfferedTool, ToolFormat, Tools, any_of


class CallTags(ToolFormat):
    """Calls in tags that name the tool."""

    def parser(self, tools: Tools) -> CallParser:
        """Return a parser of one answer."""
        return CallTagsParser(frozenset(tools))

    def grammar(self, tools: Sequence[OfferedTool], special_tokens: Mapping[str, int], *, parallel: bool) -> str:
        """Return Lark for free text with calls in it."""
        lines = [f"start: tag{'*' if parallel else '?'} TEXT", "TEXT: /(?s:.*)/", 'begin[lazy]: TEXT "<call "']
        lines.append(f'tag: begin ({any_of("call", len(tools))}) "</call>"')
        for index, tool in enumerate(tools):
            lines.append(f'call_{index}: "{tool.name}>" arguments_{index}')
            lines.append(f"arguments_{index}: {tool.free_arguments()}")
        return "\n".join(lines)


class CallTagsParser(CallParser):
    """The base finds the marks; a step reads some of the buffer, or returns False to wait for more."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(("<call ",))
        self._closing = "</call>"
        self._names = names
        self._scanner = JsonScanner()

    def _opened(self, mark: str) -> None:
        self._step = self._name

    def _name(self) -> bool:
        name, end, rest = self._buffer.partition(">")
        if not end and any(known.startswith(name) for known in self._names):
            return False
        if name not in self._names:
            return self._no_call()
        self._begin(name)
        self._buffer, self._scanner, self._step = rest, JsonScanner(), self._body
        return True

    def _body(self) -> bool:
        text, self._buffer = self._scanner.read(self._buffer)
        self._arguments(text)
        if self._scanner.is_done or self._scanner.is_faulty:
            self._step = self._after
        return True


CALL_TAGS = CallTags(name="call_tags", signs=("<call ", "</call>"))
