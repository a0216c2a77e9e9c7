"""The process in which a chat template is rendered that takes long, or gets a long conversation.

The first question is the template, each other one the variables of a rendering. The kernel ends the process at its limits
of CPU time and memory, whatever the template does. Run by chat_template.py.
"""

from __future__ import annotations

import json

from jinja2 import Template

from engine.system.child_process import Limits, Parts, serve
from engine.text.template_environment import make_environment, reason

# A long conversation takes 0.1 us of CPU time for each byte.
_LIMITS = Limits(memory=128 << 20, memory_per_byte=24, cpu_s=1.0, cpu_s_per_byte=1e-6)
_TEXT_CHARS, _TEXT_CHARS_PER_BYTE = 4 << 20, 16  # of a prompt


class Renderer:
    """Compiles the template it is sent, then renders it."""

    def __init__(self) -> None:
        self._template: Template | None = None

    def answer(self, parts: Parts) -> list[bytes]:
        """Return an empty error and the prompt."""
        question = parts.pop()
        document = json.loads(question.decode("utf-8", "surrogatepass"))
        if self._template is None:
            self._template = make_environment(document["special_tokens"]).from_string(document["source"])
            return [b"", b""]
        text = self._template.render(document)
        if len(text) > _TEXT_CHARS + _TEXT_CHARS_PER_BYTE * len(question):
            raise ValueError(f"it makes a prompt of {len(text)} characters")
        return [b"", text.encode("utf-8", "surrogatepass")]


def refuse(error: Exception) -> list[bytes]:
    """Return why the template failed."""
    return [reason(error).encode("utf-8", "surrogatepass")]


if __name__ == "__main__":
    serve(Renderer().answer, _LIMITS, refuse)
