"""The formats of tool calls, and the one that a chat template teaches. Pure."""

from __future__ import annotations

import uuid

from engine.text.tools.base import ToolFormat
from engine.text.tools.harmony import HARMONY
from engine.text.tools.json_calls import HERMES, JSON, LLAMA3, MISTRAL
from engine.text.tools.xml_calls import QWEN3_XML

# In the order of detection: XML has the mark of Hermes around another language.
TOOL_FORMATS: dict[str, ToolFormat] = {each.name: each for each in (MISTRAL, QWEN3_XML, HERMES, HARMONY, JSON, LLAMA3)}


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the format that a template teaches, or None for an unknown one."""
    return next((each for each in TOOL_FORMATS.values() if each.is_taught_by(template)), None)


def new_call_id(prefix: str, length: int) -> str:
    """Return a new id of `length` characters, or, for 0, with the prefix."""
    unique = uuid.uuid4().hex
    return unique[:length] if length else prefix + unique[:24]
