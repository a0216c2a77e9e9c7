"""The formats of tool calls, and the one that a chat template teaches. Pure."""

from __future__ import annotations

import uuid

from engine.text.tools.gemma_calls import GEMMA4
from engine.text.tools.glm_calls import GLM45
from engine.text.tools.harmony import HARMONY
from engine.text.tools.json_calls import GRANITE, GRANITE_FC, HERMES, JSON, LLAMA3, LLAMA4, MISTRAL, NEMOTRON
from engine.text.tools.python_calls import LFM2, LLAMA4_PYTHONIC, OLMO3, PYTHONIC
from engine.text.tools.section_calls import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from engine.text.tools.tool_format import ToolFormat
from engine.text.tools.xml_calls import QWEN3_CODER

# In the order of detection: several formats have the mark of Hermes, or of Phi-4-mini, around another language.
_FORMATS = (
    KIMI_K2,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM45,
    GEMMA4,
    MISTRAL,
    QWEN3_CODER,
    GRANITE,
    GRANITE_FC,
    NEMOTRON,
    HERMES,
    LLAMA4_PYTHONIC,
    PYTHONIC,
    OLMO3,
    LFM2,
    HARMONY,
    JSON,
    LLAMA4,
    LLAMA3,
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    name: tool_format for tool_format in _FORMATS for name in (tool_format.name, *tool_format.aliases)
}


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the format that a template teaches, or None for an unknown one."""
    return next((each for each in TOOL_FORMATS.values() if each.is_taught_by(template)), None)


def new_call_id(prefix: str, length: int) -> str:
    """Return a new id of `length` characters, or, for 0, with the prefix."""
    unique = uuid.uuid4().hex
    return unique[:length] if length else prefix + unique[:24]
