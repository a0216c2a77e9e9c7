"""The processes in which grammars are tried: what hangs, explodes or crashes there harms nothing else.

    main: loads the model's vocabulary once -> forks a lane for each worker -> each lane forks a child for each grammar

A child does with a grammar what the daemon would do with it (`build`, then masks along random answers), under limits of
CPU time, wall time and memory that the kernel enforces, and reports the memory that this took. Forked from a process that
has the vocabulary, it starts in milliseconds, measures nothing but its grammar, and is replaced before it is missed.

Run as a script by engine/text/grammars/trials.py, with one socket a lane. Knows nothing else of Quire, so that it starts
fast; guidance.py shares `limits`, `build` and `private_bytes`.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import any_to_lark

MAX_BUILT_BYTES = 64 << 20  # of one grammar, with its first masks; a schema of 300 properties takes 42 MiB
MAX_WALL_S = 20.0  # on a machine so busy that the CPU time does not come together
_SPARE_BYTES = 48 << 20  # address space for the stacks of the two threads, and what malloc sets aside
_BUILD_STACK = 16 << 20  # less than what the server builds with: what passes here passes there
_WALK_STACK = 1 << 20  # less than the threads have on which masks are computed there
_NUM_WALKS = 3
_WALK_TOKENS = 24
_PAGE = resource.getpagesize()
_STATM = Path("/proc/self/statm")


def limits() -> LLParserLimits:
    """What one grammar may cost to build, and at each token: about 50 ms of CPU time at the most."""
    return LLParserLimits(
        initial_lexer_fuel=400_000,  # a schema of 64 KiB with 300 properties takes 200,000
        step_lexer_fuel=100_000,  # an enum of 4,000 words takes 60,000
        step_max_items=20_000,
        max_lexer_states=50_000,  # of all answers together, at 0.4 to 2 KiB
        verbose_errors=False,  # else a message contains the whole grammar
    )


def build(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher before its first token. Raises ValueError with the library's words.

    The first mask fills tables that all matchers of this grammar share; here no request waits for it.
    """
    first = LLMatcher(tokens, grammar, log_level=0, limits=limits())
    trial = first.deep_copy()
    if not trial.is_error():
        trial.compute_bitmask()
    if trial.is_error():
        raise ValueError(trial.get_error())
    return first


def private_bytes(statm: bytes) -> int:
    """The resident memory of a process that is no file's, of its /proc/PID/statm."""
    fields = statm.split()
    return (int(fields[1]) - int(fields[2])) * _PAGE


def to_guidance(task: dict[str, Any]) -> str:
    """The task in llguidance's own form. Raises Exception, of any kind, where that cannot be."""
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
        return StructTag.to_grammar([StructTag(**tag) for tag in json.loads(text)], assume_special=False)
    return LLMatcher.grammar_from_lark(any_to_lark(text) if "::=" in text else text)


def attempt(task: dict[str, Any], tokens: LLTokenizer) -> dict[str, Any]:
    """Build one grammar and follow it: {"grammar": for llguidance, "bytes": what it takes}, or {"error": why not}."""
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
    """Compute masks along a few random answers. Raises ValueError where the grammar cannot be followed."""
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
    """A token that a mask allows."""
    at = chance.randrange(len(mask))
    rest = mask[at:].lstrip(b"\0")
    at = len(mask) - len(rest)
    if not rest:
        at = len(mask) - len(mask.lstrip(b"\0"))
    if at == len(mask):  # it allows nothing, which the library says at the next step
        return 0
    return 8 * at + chance.choice([bit for bit in range(8) if mask[at] >> bit & 1])


def _on_thread(stack_bytes: int, work: Callable[[], None]) -> str | None:
    """Do it with that much stack; what went wrong, in words."""
    errors: list[str] = []

    def guarded() -> None:
        try:
            work()
        except RecursionError:
            errors.append("it is nested too deeply")
        except MemoryError:
            os.abort()
        except Exception as error:  # the library raises Exception itself, and whatever its parser of GBNF stumbles over
            errors.append(str(error) or type(error).__name__)

    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def _statm() -> bytes:
    """Of this process; zeros where the system has no such file."""
    return _STATM.read_bytes() if _STATM.exists() else b"0 0 0"


def _limit(cpu_s: float) -> None:
    """From now on the kernel ends this process when it takes too much; which limit it was shows in the signal."""
    num_pages = int(_statm().split()[0])
    if num_pages:
        size = num_pages * _PAGE + MAX_BUILT_BYTES + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))  # the library aborts: SIGABRT
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)  # SIGALRM


def _child(task: dict[str, Any], tokens: LLTokenizer, lane: Connection) -> None:
    """Answer for one grammar, and end."""
    try:
        _limit(task["cpu_s"])
        answer = json.dumps(attempt(task, tokens)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        lane.send_bytes(answer)
    except BaseException:
        os._exit(1)
    os._exit(0)


def serve(lane: Connection, tokens: LLTokenizer) -> None:
    """Answer one task after the other until the daemon is gone."""
    while True:
        try:
            task = json.loads(lane.recv_bytes())
        except EOFError:
            return
        pid = os.fork()
        if not pid:
            _child(task, tokens, lane)
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return  # perhaps within its answer, so that this lane is of no use any more
        if status:
            lane.send_bytes(json.dumps({"signal": os.WTERMSIG(status)}).encode())


def main() -> None:
    """Load the vocabulary that comes over the first lane, then serve all of them."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lanes = [Connection(int(argument)) for argument in sys.argv[1:]]
    setup = json.loads(lanes[0].recv_bytes())
    try:
        tokens = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["end_ids"] or None)
        build(tokens, 'start: "a"')
    except Exception as error:  # the library raises ValueError, and a bare one of its own
        lanes[0].send_bytes(json.dumps({"error": str(error)}).encode())
        return
    lanes[0].send_bytes(b"{}")
    for lane in lanes[1:]:
        if not os.fork():
            serve(lane, tokens)
            os._exit(0)
    serve(lanes[0], tokens)


if __name__ == "__main__":
    main()
