"""The process in which grammars are tried.

It loads the model's vocabulary once and then forks a child for each grammar, which starts in milliseconds and measures
nothing else. A child does with the grammar what the daemon would do (`build`, then masks along random answers), under
limits of CPU time, wall time and memory that the kernel enforces, and reports the memory this took. Run by trial.py;
imports hardly anything of Quire, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from engine.system.calls import on_thread
from engine.system.child_process import Parts, limit_memory, serve

MAX_BUILT_BYTES = 64 << 20  # of one grammar, with its first masks; a schema of 300 properties takes 42 MiB
MAX_WALL_S = 20.0  # for a machine so busy that the process gets no CPU time
_SPARE_BYTES = 48 << 20  # address space for the two threads' stacks, and what malloc reserves
_BUILD_STACK = 16 << 20  # less than the daemon builds with: what passes here passes there
_WALK_STACK = 1 << 20  # less than the threads that compute masks have there
_NUM_WALKS = 3
_WALK_TOKENS = 24
_PAGE = resource.getpagesize()
_STATM = Path("/proc/self/statm")


def limits() -> LLParserLimits:
    """Return the limits of one grammar: at most about 50 ms of CPU time a step."""
    return LLParserLimits(
        initial_lexer_fuel=400_000,  # a schema of 64 KiB with 300 properties takes 200,000
        step_lexer_fuel=100_000,  # an enum of 4,000 words takes 60,000
        step_max_items=20_000,
        max_lexer_states=50_000,  # of all answers together, at 0.4 to 2 KiB
        verbose_errors=False,  # else a message contains the whole grammar
    )


def build(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher before its first token. Raises ValueError.

    The first mask fills tables that all matchers of this grammar share; no request waits for it here.
    """
    first = LLMatcher(tokens, grammar, log_level=0, limits=limits())
    trial = first.deep_copy()
    if not trial.is_error():
        trial.compute_bitmask()
    if trial.is_error():
        raise ValueError(trial.get_error())
    return first


def private_bytes(statm: bytes) -> int:
    """Return the resident memory that is no file's, from /proc/PID/statm."""
    fields = statm.split()
    return (int(fields[1]) - int(fields[2])) * _PAGE


def to_guidance(task: dict[str, Any]) -> str:
    """Return the task in llguidance's own form. Raises Exception of any kind."""
    kind, text = task["kind"], task["text"]
    if kind == "json_schema":
        options: dict[str, Any] = {"whitespace_pattern": task["whitespace"], "lenient": task["is_lenient"]}
        if not task["whitespace"]:
            options = {"whitespace_flexible": False, "lenient": task["is_lenient"]}
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]  # a TypedDict
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
    if kind == "structural_tag":
        return _tagged(json.loads(text), task["marks"])
    return LLMatcher.grammar_from_lark(any_to_lark(text) if "::=" in text else text)


def _tagged(tags: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> str:
    """Return Lark for free text with tags in it; a mark of the model's, which is a token, is called for as that token."""
    split = re.compile(f"({'|'.join(map(re.escape, marks))})" if marks else "(?!)").split

    def spell(text: str) -> str:
        return " ".join(part if place % 2 else json.dumps(part) for place, part in enumerate(split(text)) if part)

    rules = [
        f"start: ({' | '.join(f'tag_{index}' for index in range(len(tags)))})* end",
        "end: TEXT",
        "TEXT: /(.|\\n)*/",
    ]
    for index, tag in enumerate(tags):
        begin, head = tag["begin"], tag["trigger"]
        mark = next((each for each in marks if begin.startswith(each) and (head in each or each in head)), "")
        rules += [] if mark else [f"head_{index}[lazy]: TEXT {json.dumps(head)}"]
        rest, schema = begin[len(mark or head) :], json.dumps(tag["grammar"])
        rules.append(
            f"tag_{index}: {f'TEXT {mark}' if mark else f'head_{index}'} {spell(rest)} %json {schema} {spell(tag['end'])}"
        )
    return "\n".join(rules)


def attempt(task: dict[str, Any], tokens: LLTokenizer) -> dict[str, Any]:
    """Build and follow one grammar; return {"grammar", "bytes"} or {"error"}."""
    before = _statm()
    built: list[tuple[str, LLMatcher]] = []

    def make() -> None:
        grammar = to_guidance(task)
        built.append((grammar, build(tokens, grammar)))

    error = _on_thread(_BUILD_STACK, make) or _on_thread(_WALK_STACK, lambda: _walk(built[0][1]))
    if error is not None:
        return {"error": error}
    num_bytes = max(private_bytes(_statm()) - private_bytes(before), 0)
    if num_bytes > MAX_BUILT_BYTES:
        return {
            "error": f"it takes {num_bytes >> 20} MiB of memory, more than {MAX_BUILT_BYTES >> 20}; make it smaller"
        }
    return {"grammar": built[0][0], "bytes": num_bytes}


def _walk(first: LLMatcher) -> None:
    """Compute masks along a few random answers. Raises ValueError if they fail."""
    chance = random.Random(0)
    for _ in range(_NUM_WALKS):
        matcher = first.deep_copy()
        for _ in range(_WALK_TOKENS):
            mask = matcher.compute_bitmask()
            if matcher.is_stopped():
                break
            matcher.consume_token(_draw(mask, chance))
        if matcher.is_error():
            raise ValueError(matcher.get_error())


def _draw(mask: bytes, chance: random.Random) -> int:
    """Return a random token that a mask allows."""
    at = chance.randrange(len(mask))
    rest = mask[at:].lstrip(b"\0")
    at = len(mask) - len(rest)
    if not rest:
        at = len(mask) - len(mask.lstrip(b"\0"))
    if at == len(mask):  # it allows nothing; the library reports that at the next step
        return 0
    return 8 * at + chance.choice([bit for bit in range(8) if mask[at] >> bit & 1])


def _on_thread(stack_bytes: int, work: Callable[[], None]) -> str | None:
    """Run `work` with that much stack; return its error message, or None."""
    threading.stack_size(stack_bytes)
    error = on_thread("grammar", work).exception()
    if isinstance(error, MemoryError):
        os.abort()
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return None if error is None else str(error) or type(error).__name__


def _statm() -> bytes:
    """Return this process's statm; zeros where the system has no such file."""
    return _STATM.read_bytes() if _STATM.exists() else b"0 0 0"


def _limit(cpu_s: float) -> None:
    """Have the kernel end this process at its limits, each by its own signal."""
    limit_memory(MAX_BUILT_BYTES + _SPARE_BYTES)  # the library aborts: SIGABRT
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)  # SIGALRM


class GrammarTrials:
    """Answers a first question with the vocabulary, then one for each grammar."""

    def __init__(self) -> None:
        self._tokens: LLTokenizer | None = None

    def answer(self, parts: Parts) -> list[bytes]:
        """Return the answer to a question, as JSON."""
        document = json.loads(parts[0])
        if self._tokens is not None:
            return [_fork(document, self._tokens)]
        try:
            self._tokens = LLTokenizer(
                parts[1].decode(), n_vocab=document["vocab_size"], eos_token=document["end_ids"] or None
            )
            build(self._tokens, 'start: "a"')
        except Exception as error:  # the library raises ValueError, and a private class
            return [json.dumps({"error": str(error)}).encode()]
        return [b"{}"]


def _fork(task: dict[str, Any], tokens: LLTokenizer) -> bytes:
    """Return what a forked child says of one grammar, or the signal that ended it."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        _child(task, tokens, theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        answer = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return json.dumps({"signal": os.WTERMSIG(status)}).encode() if status else answer


def _child(task: dict[str, Any], tokens: LLTokenizer, pipe: int) -> None:
    """Answer for one grammar, and end; with status 1 after any error."""
    status = 1
    try:
        _limit(task["cpu_s"])
        answer = json.dumps(attempt(task, tokens)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        with os.fdopen(pipe, "wb") as file:
            file.write(answer)
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve(GrammarTrials().answer)
