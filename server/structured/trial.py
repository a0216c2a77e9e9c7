"""A process of its own that compiles grammars for a trial, so that one which hangs, explodes or crashes harms nobody.

Run as a script by server/structured/trials.py; reads a JSON document a line, answers with one: {"grammar": ...} for
llguidance, or {"error": ...} in words for who wrote the grammar. Knows nothing of Quire, so that it starts in 0.1 s.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

MAX_MEMORY = 2 << 30
STACK_BYTES = 16 << 20  # less than what the server compiles with: what passes here passes there
NUM_BYTES = 256


class ByteVocabulary:
    """A tokenizer of one token a byte: what is wrong with a grammar is wrong whatever the vocabulary.

    The model's special tokens are in it too, for a grammar may call for them by name or by id; bytes have other ids.
    """

    bos_token_id = None

    def __init__(self, special_tokens: dict[str, int]) -> None:
        names = {token_id: name.encode() for name, token_id in special_tokens.items()}
        free = (token_id for token_id in itertools.count() if token_id not in names)
        self._ids = [next(free) for _ in range(NUM_BYTES)]
        self.eos_token_id = next(free)
        tokens = names | {self.eos_token_id: b"<end>"}
        self.special_token_ids = sorted(tokens)
        tokens |= {token_id: bytes([byte]) for byte, token_id in enumerate(self._ids)}
        self.tokens = [tokens.get(token_id, b"") for token_id in range(max(tokens) + 1)]

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text]


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


def attempt(task: dict[str, Any], tokenizer: LLTokenizer) -> dict[str, Any]:
    """Compile one grammar."""
    try:
        grammar = to_guidance(task)
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # the library raises Exception itself, and whatever its parser of GBNF stumbles over
        return {"error": str(error) or type(error).__name__}
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        return {"error": matcher.get_error()}
    return {"grammar": grammar, "warnings": matcher.get_grammar_warnings()}


def serve() -> None:
    """Answer until the other end is gone. The first line has the ids of the model's special tokens."""
    vocabulary = ByteVocabulary(json.loads(sys.stdin.readline()))
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=[vocabulary.eos_token_id])
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(attempt(json.loads(line), tokenizer)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    server = threading.Thread(target=serve)
    server.start()
    server.join()
