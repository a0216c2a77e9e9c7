"""Keeps the trial process: starts it when it is first needed, asks it, ends it when it takes too long.

One object a worker thread of the compiler, used by that thread alone. POSIX only, as all of the daemon.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.core.errors import InvalidRequestError
from server.structured.spec import GrammarSpec, Kind

MAX_TRIAL_S = 5.0
_MAX_START_S = 60.0  # an interpreter on a machine that is busy with everything else
_SCRIPT = Path(__file__).with_name("trial.py")
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")  # no keys, no settings
_KEYWORD = re.compile(r'(?:Unimplemented keys: \["|Invalid type: |Unknown format: )([^"\n]+)')
# A regex and a choice are wrapped in a line of Lark, whose places mean nothing to whoever wrote them.
_WRAPPED = re.compile(r"^at \d+\(\d+\): (invalid regex .* \(in regex\): )?")
# What the library says of a grammar that no text can match.
_PLAIN_WORDS = dict.fromkeys(("", "NoExtension", "NoExtensionBias"), "no text can match it")


class GrammarError(InvalidRequestError):
    """A grammar that cannot be used; the message says why, and does not yet say which field it came in."""


class TrialError(GrammarError):
    """The trial came to no end. The grammar's fault most likely, but perhaps the machine's, so it is not final."""


class Trials:
    """A process that grammars are tried in."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        """`special_tokens` are the model's, which a grammar may call for by name or id."""
        self._special_tokens = dict(special_tokens)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, spec: GrammarSpec) -> str:
        """The grammar in llguidance's form, known to compile. Raises GrammarError."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        task = {**spec._asdict(), "kind": spec.kind.value}
        answer = self._ask(task, MAX_TRIAL_S)
        if "error" in answer:
            raise GrammarError(
                clean(answer["error"], is_in_lark=spec.kind is Kind.GRAMMAR) + _where(spec, answer["error"])
            )
        return str(answer["grammar"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        self.close()
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._process = subprocess.Popen(  # noqa: S603 - ourselves, and a file of ours
            [sys.executable, str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a Ctrl-C is for the daemon, which may still be draining
        )
        self._ask(self._special_tokens, _MAX_START_S)

    def _ask(self, document: Any, limit_s: float) -> dict[str, Any]:
        """One line there and one back. A process that does not answer in time is ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        answer, give_up_s = b"", time.monotonic() + limit_s
        poll = select.poll()  # select itself knows no file beyond the 1024th
        poll.register(process.stdout, select.POLLIN)
        try:
            process.stdin.write(json.dumps(document).encode() + b"\n")
            process.stdin.flush()
            while not answer.endswith(b"\n"):
                rest_s = max(give_up_s - time.monotonic(), 0)
                if not poll.poll(1000 * rest_s):
                    raise TrialError(f"it takes longer than {limit_s:.0f} s to compile; make it smaller")
                piece = os.read(process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise TrialError("it takes too much memory, or is nested too deeply, to compile; make it smaller")
                answer += piece
        except BrokenPipeError as error:
            raise TrialError("it cannot be compiled; make it smaller") from error
        finally:
            if not answer.endswith(b"\n"):
                self.close()
        told: dict[str, Any] = json.loads(answer)
        return told


def _where(spec: GrammarSpec, message: str) -> str:
    """The path of a keyword that the message complains of; the library tells only its name."""
    found = _KEYWORD.search(message) if spec.kind is Kind.JSON_SCHEMA else None
    path = _path_of(json.loads(spec.text), found[1]) if found else None
    return f" at {path}" if path else ""


def _path_of(schema: Any, keyword: str, path: str = "$") -> str | None:
    """Where a schema has the keyword first."""
    items = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    for name, value in items:
        inner = f"{path}.{name}" if isinstance(name, str) else f"{path}[{name}]"
        found = inner if name == keyword or value == keyword else _path_of(value, keyword, inner)
        if found:
            return found
    return None


def clean(message: str, *, is_in_lark: bool = True) -> str:
    """llguidance's message in one line: what and where, without its drawing of the place and its own names."""
    lines = []
    for line in message.splitlines():
        if line.lstrip()[:1].isdigit() and " | " in line:
            break  # the place in the source follows, which the client has
        if set(line.strip()) <= {"^"} or line.startswith("<"):
            continue
        lines.append(line.strip())
    text = " ".join(" ".join(lines).split()).rstrip(".")
    text = text if is_in_lark else _WRAPPED.sub("", text)
    return _PLAIN_WORDS.get(text, text)
