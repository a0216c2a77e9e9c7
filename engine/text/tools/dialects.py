"""The ways of writing calls that are known here, and which of them a chat template teaches its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.text.channels import speaks_in_channels
from engine.text.tools.parser import Dialect, ToolParser
from engine.text.tools.xml_parser import CLOSING, FUNCTION, OPENING, XmlToolParser

HERMES = Dialect(name="hermes", marks=(("<tool_call>", "</tool_call>"),))
LLAMA3 = Dialect(name="llama3_json", marks=(("<|python_tag|>", ""),), is_bare=True, only_known=True)
MISTRAL = Dialect(
    name="mistral", marks=(("[TOOL_CALLS]", ""),), leads_with_name=True, name_end="[ARGS]", id_length=9
)  # its templates refuse ids of another length
JSON = Dialect(
    name="json", marks=(("```json", "```"), ("<|tool_call|>", "<|/tool_call|>")), is_bare=True, only_known=True
)
QWEN3_XML = Dialect(name="qwen3_xml", marks=((OPENING, CLOSING),), is_xml=True)
HARMONY = Dialect(name="harmony")  # calls have channels of their own: engine/text/channels.py
FORCED = Dialect(name="forced", is_bare=True, only_known=True)  # what engine/text/tools/forced.py lets a model write

DIALECTS = {dialect.name: dialect for dialect in (HERMES, LLAMA3, MISTRAL, JSON, QWEN3_XML, HARMONY)}


def detect_dialect(template: str) -> Dialect | None:
    """The dialect that a chat template with tools teaches; None for one that is not known here."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return QWEN3_XML if FUNCTION in template else HERMES  # the same mark around another language
    if speaks_in_channels(template):
        return HARMONY
    if "<|tool_call|>" in template:
        return JSON
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA3
    return None


def parser_of(dialect: Dialect, tools: Mapping[str, Mapping[str, Any]]) -> ToolParser | XmlToolParser:
    """What finds calls of these tools, each with the schema of its parameters, in an answer."""
    return XmlToolParser(tools) if dialect.is_xml else ToolParser(dialect, frozenset(tools))
