"""The formats of tool calls, and the one that a chat template teaches. Pure.

engine/text/chat_format.py makes the parser of a format, and call_grammars.py its grammar.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from engine.text.channels import speaks_in_channels
from engine.text.tools.xml_parser import CLOSING, FUNCTION, OPENING


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls; by default, as JSON objects."""

    name: str
    marks: tuple[tuple[str, str], ...] = ()  # the texts before and after calls; the latter may be empty
    is_bare: bool = False  # an answer may also begin with a call without any mark
    only_known: bool = False  # JSON that names none of the request's tools is content, not a call
    leads_with_name: bool = False  # a mark may be followed by name{...} as well
    name_end: str = ""  # the text that may stand between such a name and its arguments
    is_xml: bool = False  # names and parameters are tags: engine/text/tools/xml_parser.py
    id_length: int = 0  # of a call's id, where templates insist on one


HERMES = ToolFormat(name="hermes", marks=(("<tool_call>", "</tool_call>"),))
LLAMA3 = ToolFormat(name="llama3_json", marks=(("<|python_tag|>", ""),), is_bare=True, only_known=True)
MISTRAL = ToolFormat(  # its templates refuse ids of another length
    name="mistral", marks=(("[TOOL_CALLS]", ""),), leads_with_name=True, name_end="[ARGS]", id_length=9
)
JSON = ToolFormat(
    name="json", marks=(("```json", "```"), ("<|tool_call|>", "<|/tool_call|>")), is_bare=True, only_known=True
)
QWEN3_XML = ToolFormat(name="qwen3_xml", marks=((OPENING, CLOSING),), is_xml=True)
HARMONY = ToolFormat(name="harmony")  # calls are in channels of their own: engine/text/channels.py
FORCED = ToolFormat(name="forced", is_bare=True, only_known=True)  # what a grammar of forced calls lets a model write

TOOL_FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL, JSON, QWEN3_XML, HARMONY)}


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the format that a template teaches, or None for an unknown one."""
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


def forced_format(tool_format: ToolFormat | None, *, marks_are_text: bool) -> ToolFormat:
    """Return how forced calls are written: Hermes' marks, or a JSON list."""
    return HERMES if tool_format is HERMES and marks_are_text else FORCED


def new_call_id(prefix: str, length: int) -> str:
    """Return a new id of `length` characters, or, for 0, with the prefix."""
    unique = uuid.uuid4().hex
    return unique[:length] if length else prefix + unique[:24]
