"""Tries grammars in a process, where one that hangs or crashes does no harm."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.core.errors import InvalidRequestError, OverloadedError
from engine.system.child_process import Ask, ChildError, ChildProcess, Parts
from engine.text.grammars.spec import GrammarKind, GrammarSpec, VocabularySource

_MAX_ANSWER_S = 60.0  # the process enforces far lower limits itself
_RETRY_S = 5.0
_KEYWORD = re.compile(r'(?:Unimplemented keys: \["|Invalid type: |Unknown format: )([^"\n]+)')
# A regex and a choice are wrapped in a line of Lark, whose positions mean nothing to the client.
_WRAPPED = re.compile(r"^at \d+\(\d+\): (invalid regex .* \(in regex\): )?")
# The library's messages for a grammar that no text can match.
_PLAIN_WORDS = dict.fromkeys(("", "NoExtension", "NoExtensionBias"), "no text can match it")
_LIMIT = re.compile(r"too many|too big|fuel|row has \d+ items|too complex", re.IGNORECASE)
# The library reads text that a grammar forces and that spells a special token as that token.
_FORCED = re.compile(r"\[(\d+)\]\" doesn't satisfy the grammar; forced bytes")


class GrammarError(InvalidRequestError):
    """A grammar that cannot be used; the message does not name the field yet."""


class SlowError(GrammarError):
    """A grammar that takes more CPU time than it was given."""


class Tried(NamedTuple):
    """A grammar that passed."""

    grammar: str  # in llguidance's form
    num_bytes: int  # of memory


class GrammarTrial:
    """Tries one grammar at a time, in a process that starts with the first one."""

    def __init__(self, source: Callable[[], VocabularySource], *, idle_s: float = math.inf) -> None:
        """`source` is called for each process; it ends when idle for `idle_s`."""
        self._source = source
        module = "engine.text.grammars.trial_process"
        self._process = ChildProcess(module, limit_s=_MAX_ANSWER_S, idle_s=idle_s, set_up=self._set_up)

    def run(self, spec: GrammarSpec, *, cpu_s: float) -> Tried:
        """Return a grammar that builds. Raises GrammarError, or OverloadedError untried."""
        task = {**spec._asdict(), "kind": spec.kind.value, "cpu_s": cpu_s, "marks": self._source().marks}
        try:
            answer = _read(self._process.ask([_json(task)]))
        except ChildError as error:
            raise _unavailable() from error
        if "signal" in answer:
            raise _reason(answer["signal"], cpu_s)
        if "error" in answer:
            message = clean(answer["error"], is_in_lark=spec.kind is GrammarKind.LARK)
            if _LIMIT.search(message):
                message = f"it is too large, or too ambiguous, to be followed ({message}); make it smaller"
            raise GrammarError(message + _where(spec, answer["error"]))
        return Tried(answer["grammar"], answer["bytes"])

    def close(self) -> None:
        """End the process for good, even while it is starting. Idempotent."""
        self._process.close()

    def _set_up(self, ask: Ask) -> None:
        source = self._source()
        document = {"vocab_size": source.vocab_size, "end_ids": sorted(source.end_ids)}
        answer = _read(ask([_json(document), bytearray(source.tokenizer_json.encode())]))
        if "error" in answer:
            reason = clean(str(answer["error"]))
            raise GrammarError(f"this model's tokenizer cannot be used for structured outputs: {reason}")


def _json(document: Any) -> bytearray:
    return bytearray(json.dumps(document).encode())


def _read(answer: Parts) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(answer[0])
    return document


def _unavailable() -> OverloadedError:
    return OverloadedError("Grammars cannot be tried now; try again later.", retry_after_s=_RETRY_S)


def _reason(number: int, cpu_s: float) -> Exception:
    """Return the error that a signal of the kernel stands for."""
    if number == signal.SIGPROF:
        return SlowError(f"it takes more than {cpu_s:g} s of CPU time to compile; make it smaller")
    if number in (signal.SIGALRM, signal.SIGKILL):
        return _unavailable()  # not the grammar's fault: the child got no CPU time, or was killed
    if number == signal.SIGABRT:
        return GrammarError("it takes too much memory to compile; make it smaller")
    return GrammarError("it is too large, or nested too deeply, to compile; make it smaller")


def _where(spec: GrammarSpec, message: str) -> str:
    """Return " at PATH" for the keyword that the library's message names."""
    found = _KEYWORD.search(message) if spec.kind is GrammarKind.JSON_SCHEMA else None
    path = _path_of(json.loads(spec.text), found[1]) if found else None
    return f" at {path}" if path else ""


def _path_of(schema: Any, keyword: str, path: str = "$") -> str | None:
    """Return the path of the first place where a schema has the keyword."""
    items = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for name, value in items:
        inner = f"{path}.{name}" if isinstance(name, str) else f"{path}[{name}]"
        found = inner if name == keyword or value == keyword else _path_of(value, keyword, inner)
        if found:
            return found
    return None


def clean(message: str, *, is_in_lark: bool = True) -> str:
    """Return llguidance's message in one line, without its drawing of the source."""
    if forced := _FORCED.search(message):
        return (
            "it forces text that spells a special token of this model, which a constrained answer cannot spell; "
            f"a Lark grammar can call for the token itself: <[{forced[1]}]>, without quotation marks"
        )
    lines = []
    for line in message.splitlines():
        if line.lstrip()[:1].isdigit() and " | " in line:
            break  # a drawing of the source follows, which the client has
        if set(line.strip()) <= {"^"} or line.startswith("<"):
            continue
        lines.append(line.strip())
    text = " ".join(" ".join(lines).split()).rstrip(".")
    text = text if is_in_lark else _WRAPPED.sub("", text)
    return _PLAIN_WORDS.get(text, text)
