"""The process in which a chat template is rendered that takes long, or gets a long conversation.

The first question is the template, each other one the variables of a rendering. The kernel ends the process at its limits
of CPU time and memory, whatever the template does. Run by chat_template.py.
"""

from __future__ import annotations

import json
import signal

from jinja2 import Template

from engine.system.calls import foreign_code
from engine.system.child_process import Parts, serve
from engine.text.template_environment import make_environment, reason

_CPU_S, _CPU_S_PER_BYTE = 1.0, 1e-6  # a long conversation takes 0.1 us for each byte
_BYTES, _BYTES_PER_BYTE = 128 << 20, 24
_TEXT_CHARS, _TEXT_CHARS_PER_BYTE = 4 << 20, 16  # of a prompt


def memory(num_bytes: int) -> int:
    """Return the memory for a question of so many bytes."""
    return _BYTES + _BYTES_PER_BYTE * num_bytes


class _TemplateError(Exception):
    """The template failed; the message says why."""


class Renderer:
    """Compiles the template it is sent, then renders it."""

    def __init__(self) -> None:
        self._template: Template | None = None

    def answer(self, parts: Parts) -> list[bytes]:
        """Return an empty error and the prompt, or an error."""
        question = parts.pop()
        num_bytes = len(question)
        document = json.loads(question.decode("utf-8", "surrogatepass"))
        signal.setitimer(signal.ITIMER_PROF, _CPU_S + _CPU_S_PER_BYTE * num_bytes)  # SIGPROF ends the process
        try:
            with foreign_code(lambda error: _TemplateError(reason(error)), (MemoryError,)):
                text = self._work(document)
        except _TemplateError as error:
            return [str(error).encode("utf-8", "surrogatepass")]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if len(text) > _TEXT_CHARS + _TEXT_CHARS_PER_BYTE * num_bytes:
            return [f"it makes a prompt of {len(text)} characters".encode()]
        return [b"", text.encode("utf-8", "surrogatepass")]

    def _work(self, document: dict[str, object]) -> str:
        if self._template is not None:
            return self._template.render(document)
        self._template = make_environment(document["special_tokens"]).from_string(document["source"])  # type: ignore[arg-type]
        return ""


if __name__ == "__main__":
    serve(Renderer().answer, memory=memory)
