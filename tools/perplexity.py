"""Measures the perplexity of a text under settings of the daemon.

    python -m tools perplexity "--dtype bfloat16" "--dtype bfloat16 --kv-cache-dtype int8"

Each group of settings runs the same windows of the same text through the real engine. The default text is the language
reference in Python's pydoc.
"""

from __future__ import annotations

import argparse
import importlib
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.errors import LoadtestError
from loadtest.output import print_table, save_json

if TYPE_CHECKING:
    from engine.llm.job import RequestOutput


class PerplexityError(LoadtestError):
    """The text cannot be scored; one sentence."""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one group of settings."""

    settings: str
    perplexity: float
    num_tokens: int  # that were predicted
    seconds: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `perplexity`."""
    parser.add_argument(
        "settings",
        nargs="*",
        default=[""],
        metavar="'--FLAG VALUE ...'",
        help="what `quire serve` takes, one quoted argument for each group; the first is what others are compared to",
    )
    parser.add_argument("--model", metavar="MODEL", help="for all groups; default: the embedded model")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8; default: pydoc's topics, which Python brings")
    parser.add_argument("--tokens", type=int, default=50_000, metavar="N", help="of the text; default %(default)s")
    parser.add_argument("--window", type=int, default=1024, metavar="N", help="tokens of a window; default %(default)s")
    parser.add_argument(
        "--skip",
        type=int,
        default=1,
        metavar="N",
        help="tokens of a window that are not scored; half + 1 is llama.cpp's",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Score the text under each group of settings, one after another."""
    if options.window < 2 or options.tokens < 2:
        raise PerplexityError("A token is predicted from one before it: --tokens and --window must be at least 2.")
    text = read_text(options.text)
    scores = [measure(settings, options, text) for settings in options.settings]
    _print(scores)
    about = {"python": sys.version.split()[0], "text": str(options.text or "pydoc_data.topics")}
    save_json(options.json, about | {"scores": scores})
    return 0


def read_text(path: Path | None) -> str:
    """Return the file's text, or pydoc's 465,000 characters."""
    if path is None:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PerplexityError(f"--text is {str(path)!r}, which is not UTF-8: {error}.") from None


def cut_windows(tokens: Sequence[int], prefix: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yield windows of `size` tokens, each after `prefix`; no rest of one token."""
    step = size - len(prefix)
    for begin in range(0, len(tokens), step):
        window = (*prefix, *tokens[begin : begin + step])
        if len(window) > 1:
            yield window


def measure(settings: str, options: argparse.Namespace, text: str) -> Score:
    """Return the perplexity under settings, which may begin with a model."""
    from engine.settings.engine_config import (
        EngineConfig,  # here, because other commands need neither torch nor pydantic
    )
    from engine.settings.setting import declared
    from engine.sources.model_source import fetch, find_model
    from engine.text.tokenizer_files import load_tokenizer
    from quire import LLM, SamplingParams
    from server.settings.flags import load_settings

    given = load_settings([*([options.model] if options.model else []), *shlex.split(settings)])
    source, revision = (given.tokenizer, None) if given.tokenizer else (find_model(given.model).path, given.revision)
    tokenizer = load_tokenizer(str(fetch(source, revision, given.download_dir, weights=False)))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) < options.tokens:
        raise PerplexityError(f"The text has {len(tokens)} tokens, fewer than --tokens {options.tokens}.")
    prefix = tokenizer.encode("", add_special_tokens=True)  # models trained with one need it
    if options.window <= len(prefix):
        raise PerplexityError(
            f"--window is {options.window}; each prompt begins with {len(prefix)} special tokens; raise it."
        )
    windows = list(cut_windows(tokens[: options.tokens], prefix, options.window))
    names = {each.name for each in declared(EngineConfig)} & given.given - {"model"}
    with LLM(given.model, **{name: getattr(given, name) for name in names}) as llm:
        started_s = time.monotonic()
        outputs = llm.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0))
        seconds = time.monotonic() - started_s
    negative, num_tokens = sum_up(outputs, max(options.skip, len(prefix)))
    return Score(settings, math.exp(negative / num_tokens), num_tokens, seconds)


def sum_up(outputs: Sequence[RequestOutput], skipped: int) -> tuple[float, int]:
    """Return the negative log likelihood after `skipped` tokens, and their number."""
    logprobs = []
    for output in outputs:
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
        logprobs += [entry[token].logprob for token, entry in list(pairs)[skipped:] if entry is not None]
    return -sum(logprobs), len(logprobs)


def _print(scores: Sequence[Score]) -> None:
    rows = []
    for score in scores:
        settings = f"`{score.settings}`" if score.settings else "default"
        ratio = score.perplexity / scores[0].perplexity
        rows.append((settings, f"{score.perplexity:.4f}", f"{ratio:.5f}", score.num_tokens, f"{score.seconds:.0f}"))
    print_table(("settings", "perplexity", "to the first", "tokens", "seconds"), rows)
