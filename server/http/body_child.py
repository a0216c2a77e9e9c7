"""The child process that counts, parses and checks large bodies.

Run by server/http/bodies.py through engine/system/child_process.py. A question is a header, {"model": ..., "most": ..., "member": ...},
and the body; the answer is {} and the document as marshal writes it, or {"error": ..., "traceback": ...}; the client sees the error.
"""

from __future__ import annotations

import json
import marshal
import sys
import traceback
from dataclasses import asdict
from importlib import import_module
from pkgutil import resolve_name

from pydantic_core import to_json

from engine.system.child_process import Limits, Parts, serve
from server.http.bodies import check_count, parse
from server.protocol.errors import to_api_error

# Modules of bodies, which are imported before the first question, as it should not wait for them.
_BODIES = ("server.anthropic.messages", "server.openai.responses.routes")
_LIMITS = Limits(memory=56 << 20, memory_per_byte=2.5)  # with the daemon's, 64 MiB + 4 times the body


def answer(parts: Parts) -> list[bytes]:
    """Read one body, which is freed as soon as it is parsed."""
    raw, header = parts.pop(), json.loads(parts.pop())
    return [b"{}", *_read(raw, **header)]


def refuse(error: Exception) -> list[bytes]:
    """Return an error, and of a bug its traceback, which the daemon logs."""
    error_answer = to_api_error(error)
    trace = traceback.format_exc() if error_answer.status >= 500 else ""
    return [json.dumps({"error": asdict(error_answer), "traceback": trace}).encode()]


def _read(raw: bytearray, *, model: str, most: int, member: str | None) -> list[bytes]:
    """Return the document, or the JSON of `member`."""
    check_count(raw, most)
    tree = parse(raw)
    raw.clear()
    resolve_name(model).model_validate(tree)
    if member is not None:
        return [to_json(tree[member], inf_nan_mode="constants")]
    return [marshal.dumps(tree)]


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    for name in _BODIES:
        import_module(name)
    serve(answer, _LIMITS, refuse)
