"""Measures what drafts gain: engines with and without them, in this process, in turns over the same requests.

    python -m tools drafts --write FOLDER --shape 0.8b
    python -m tools drafts --num-seqs 1 8 32 --temperatures 0 1 -- FOLDER

`--write` makes a checkpoint of Qwen 3.5 in a real shape whose head is right about four tokens of five. Tokens stand in
rings: a ring's embeddings are one row of signs, shifted by one place from token to token. One MLP shifts the stream by
one, so that the ring's next token is the likeliest; those of other layers add nothing. The head has the same MLP, and
one that shifts by two places after every fifth token. All other matrices are random, and all are multiplied.

`--text edit` asks for a piece of code once more with another name in it, `--text loop` for one more call of a tool like
those of the conversation so far; both need a model that copies. Random ids are followed by a text that repeats nothing.

Tokens a second count from when all have their first token; CPU seconds are of all threads, which matter on a busy machine. Tokens
that differ from those without drafts end the run.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import random
import shutil
import statistics
import time
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.core.types import Request, SamplingParams, StepEvents
from engine.loop import Engine
from engine.sources.model_source import find_model
from engine.text.tokenizer import TextTokenizer
from engine.text.tokenizer_files import load_tokenizer
from loadtest.arguments import positive_int
from loadtest.engines import build
from loadtest.errors import LoadtestError
from loadtest.output import print_table, save_json
from loadtest.peers.hybrids import random_bits, write_checkpoint
from loadtest.peers.models import bfloat16_bits
from loadtest.shapes import HYBRIDS
from server.settings.flags import load_settings

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CALL = """{{"name": "read_status", "arguments": {{"service": "{name}-{number}", "fields": ["state", "uptime", "errors"]}}}}
{{"state": "running", "uptime": {number}41, "errors": []}}"""
_GAIN, _LOGIT = 8.0, 16.0  # of the shifted stream; of the likeliest token, when the others' are near 0


def _rings(hidden: int, vocab: int) -> NDArray[np.float32]:
    """Return embeddings: signs in a ring's places, then 1, then -1 for tokens after which the head is wrong."""
    rng, places = np.random.default_rng(7), hidden - 2
    signs = np.ones((vocab, hidden), np.float32)
    for first in range(0, vocab, places):
        ring = rng.choice(np.array([-1, 1], np.float32), places)
        for step in range(min(places, vocab - first)):
            signs[first + step, :places] = np.roll(ring, step)
    signs[:, -1] = np.where(rng.random(vocab) < 0.2, -1, 1)
    return signs


def _shifting(name: str, size: tuple[int, ...], *, is_head: bool) -> NDArray[np.float32]:
    """Return a matrix of the MLP that shifts the stream."""
    matrix, places = np.zeros(size, np.float32), max(min(size), 2) - 2
    rows = np.arange(places)
    for part, (shift, gain) in enumerate([(1, _GAIN), (2, 4 * _GAIN)][: 1 + is_head]):
        units = rows + part * places
        if "gate" in name:
            matrix[units, -1 if part else -2] = -_GAIN if part else _GAIN  # open for marked tokens, or for all
        elif "up" in name:
            matrix[units, (rows - shift) % places] = 1
        else:
            matrix[rows, units] = gain / _GAIN
    return matrix


def _bits(config: dict[str, Any], name: str, size: tuple[int, ...]) -> NDArray[Any]:
    hidden, layer = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    if name == "model.embed_tokens.weight":
        return bfloat16_bits(_rings(hidden, *size[:1]))
    if name in ("model.norm.weight", "mtp.norm.weight"):
        return np.full(size, _LOGIT / hidden - 1, np.float32)
    if name == "mtp.fc.weight":  # the token alone
        return bfloat16_bits(np.eye(*size, dtype=np.float32))
    if ".mlp." in name and name.startswith((layer, "mtp.")):
        return bfloat16_bits(_shifting(name, size, is_head=name.startswith("mtp.")))
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        return np.zeros(size, np.uint16)
    return random_bits(config["model_type"], name, size)


def write(folder: Path, shape: str, tokenizer: Path | None) -> None:
    """Write a checkpoint, and a tokenizer's files beside it, if given, for llama.cpp's converter."""
    config = HYBRIDS[f"qwen3.5-{shape}"]
    write_checkpoint(config, folder, partial(_bits, config))
    for path in () if tokenizer is None else tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder)


class Figures(NamedTuple):
    """One engine's turn."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    drafted: int
    accepted: int
    tokens: dict[str, list[int]]


@cache
def _tokenizer(settings: tuple[str, ...]) -> TextTokenizer:
    return load_tokenizer(find_model(load_settings(settings).model).path)


def _prompt(options: argparse.Namespace, rng: random.Random, vocab_size: int) -> tuple[int, ...]:
    if options.text == "random":
        return tuple(rng.randrange(vocab_size) for _ in range(options.prompt))
    name = "".join(rng.choices("abcdefghijklmnop", k=6))
    if options.text == "edit":
        code = inspect.getsource(rng.choice((write, run, add_options, _drive, _compare)))
        text = f"{code}\n\n# The same code, where options is renamed {name}:\n\n{code.replace('options', name)[:80]}"
    else:
        calls = [_CALL.format(name=name, number=number) for number in range(rng.randrange(3, 9))]
        text = "\n".join(calls) + '\n{"name": "'
    return tuple(_tokenizer(tuple(options.settings)).encode(text, add_special_tokens=True))


def _drive(engine: Engine, num_seqs: int, temperature: float, seed: int, options: argparse.Namespace) -> Figures:
    """Answer `num_seqs` requests at once."""
    rng, tokens, stats = random.Random(seed), defaultdict[str, list[int]](list), engine.stats

    def take(events: StepEvents) -> None:
        for event in events:
            tokens[event.request_id] += event.token_ids

    engine._deliver = take  # noqa: SLF001 - the loop's own body, without its thread
    drafted, accepted = stats.spec_draft_tokens, stats.spec_accepted_tokens
    prompts = [_prompt(options, rng, engine.facts.vocab_size) for _ in range(num_seqs)]
    for index, prompt in enumerate(prompts):
        name = f"{temperature}-{seed}-{num_seqs}-{index}"
        params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=index)
        engine.submit(Request(request_id=name, prompt=prompt, params=params, arrival_s=engine.clock()))
    while len(tokens) < num_seqs:
        engine._turn()  # noqa: SLF001
    number = num_seqs * options.tokens - sum(map(len, tokens.values()))
    begun, begun_cpu = time.perf_counter(), time.process_time()
    while sum(map(len, tokens.values())) < num_seqs * options.tokens:
        engine._turn()  # noqa: SLF001
    seconds, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    spent = stats.spec_draft_tokens - drafted, stats.spec_accepted_tokens - accepted
    return Figures(number / seconds, number / cpu, *spent, dict(tokens))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `drafts`."""
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write a checkpoint there, and end")
    parser.add_argument(
        "--shape", choices=("0.8b", "2b", "4b"), default="0.8b", help="of the checkpoint; default %(default)s"
    )
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="whose tokenizer's files are copied")
    parser.add_argument("--config", default='{"method": "mtp"}', metavar="JSON", help="default %(default)s")
    parser.add_argument("--text", choices=("random", "edit", "loop"), default="random", help="default %(default)s")
    parser.add_argument("--num-seqs", type=positive_int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    parser.add_argument("--prompt", type=positive_int, default=64, metavar="TOKENS", help="default %(default)s")
    parser.add_argument("--tokens", type=positive_int, default=64, metavar="N", help="to answer; default %(default)s")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="after --, what `quire serve` takes")


def run(options: argparse.Namespace) -> int:
    """Write a checkpoint, or measure and print."""
    if options.write:
        write(options.write, options.shape, options.tokenizer)
        return 0
    plain = build(options.settings)
    drafting = build([*options.settings, "--speculative-config", options.config])
    gc.freeze()
    found: dict[str, Any] = {}
    for num_seqs in options.num_seqs:
        for temperature in options.temperatures:
            found[f"{num_seqs} at temperature {temperature:g}"] = _compare(
                (plain, drafting), num_seqs, temperature, options
            )
    names = ("tok/s", "tok/s with drafts", "ratio", "ratio of CPU time", "drafted", "accepted")
    print_table(("sequences", *names), ((name, *row) for name, row in found.items()))
    save_json(options.json, found)
    return 0


def _compare(
    engines: tuple[Engine, Engine], num_seqs: int, temperature: float, options: argparse.Namespace
) -> tuple[str, ...]:
    """Return a row of medians over rounds, in each of which both engines have a turn."""
    rounds = []
    for seed in range(options.rounds + 1):
        turns = [_drive(engine, num_seqs, temperature, seed, options) for engine in engines]
        if turns[0].tokens != turns[1].tokens:
            raise LoadtestError(f"With {num_seqs} sequences at temperature {temperature:g} drafts changed an answer.")
        rounds.append(turns)
    rounds = rounds[1:]  # the first warms up
    plain, drafting = [statistics.median(turns[at].tokens_per_s for turns in rounds) for at in (0, 1)]
    ratios = [turns[1].tokens_per_s / turns[0].tokens_per_s for turns in rounds]
    cpu = [turns[1].tokens_per_cpu_s / turns[0].tokens_per_cpu_s for turns in rounds]
    drafted, accepted = [sum(getattr(turns[1], name) for turns in rounds) for name in ("drafted", "accepted")]
    shown = f"{statistics.median(ratios):.2f}", f"{statistics.median(cpu):.2f}"
    return f"{plain:.1f}", f"{drafting:.1f}", *shown, str(drafted), f"{accepted / max(drafted, 1):.2f}"
