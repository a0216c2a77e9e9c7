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
import json
import random
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
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
from loadtest.peers.safetensors_file import Entry, write_safetensors
from server.settings.flags import load_settings

if TYPE_CHECKING:
    from numpy.typing import NDArray

_VOCAB, _HEAD_DIM, _STATE_DIM = 248320, 256, 128
_CALL = """{{"name": "read_status", "arguments": {{"service": "{name}-{number}", "fields": ["state", "uptime", "errors"]}}}}
{{"state": "running", "uptime": {number}41, "errors": []}}"""
_GAIN, _LOGIT = 8.0, 16.0  # of the shifted stream; of the likeliest token, when the others' are near 0


class _Shape(NamedTuple):
    """A dense Qwen 3.5; every fourth layer attends."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    key_heads: int  # of Gated DeltaNet
    value_heads: int


SHAPES = {"0.8b": _Shape(24, 1024, 3584, 8, 2, 16, 16), "4b": _Shape(32, 2560, 9216, 16, 4, 16, 32)}


def _config(shape: _Shape) -> dict[str, Any]:
    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(shape.layers)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "layer_types": kinds,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": _HEAD_DIM,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": _STATE_DIM,
        "linear_value_head_dim": _STATE_DIM,
        "linear_conv_kernel_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default"},
        "max_position_embeddings": 32768,
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": True,
        "vocab_size": _VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _attention(shape: _Shape) -> dict[str, tuple[int, ...]]:
    width, kv_width = shape.heads * _HEAD_DIM, shape.kv_heads * _HEAD_DIM
    return {
        "self_attn.q_proj.weight": (2 * width, shape.hidden),
        "self_attn.k_proj.weight": (kv_width, shape.hidden),
        "self_attn.v_proj.weight": (kv_width, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, width),
        "self_attn.q_norm.weight": (_HEAD_DIM,),
        "self_attn.k_norm.weight": (_HEAD_DIM,),
    }


def _delta(shape: _Shape) -> dict[str, tuple[int, ...]]:
    values = shape.value_heads * _STATE_DIM
    channels = 2 * shape.key_heads * _STATE_DIM + values
    return {
        "linear_attn.in_proj_qkv.weight": (channels, shape.hidden),
        "linear_attn.in_proj_z.weight": (values, shape.hidden),
        "linear_attn.in_proj_b.weight": (shape.value_heads, shape.hidden),
        "linear_attn.in_proj_a.weight": (shape.value_heads, shape.hidden),
        "linear_attn.conv1d.weight": (channels, 1, 4),
        "linear_attn.A_log": (shape.value_heads,),
        "linear_attn.dt_bias": (shape.value_heads,),
        "linear_attn.norm.weight": (_STATE_DIM,),
        "linear_attn.out_proj.weight": (shape.hidden, values),
    }


def _shapes(shape: _Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of the checkpoint."""
    hidden, mlp = shape.hidden, (shape.ffn, shape.hidden)
    yield "model.embed_tokens.weight", (_VOCAB, hidden)
    for index in range(shape.layers + 1):
        prefix = f"model.layers.{index}." if index < shape.layers else "mtp.layers.0."
        is_delta = index < shape.layers and index % 4 < 3
        layer = _delta(shape) if is_delta else _attention(shape)
        layer |= {"mlp.gate_proj.weight": mlp, "mlp.up_proj.weight": mlp, "mlp.down_proj.weight": mlp[::-1]}
        layer |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        yield from ((prefix + name, size) for name, size in layer.items())
    yield "model.norm.weight", (hidden,)
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{name}.weight", (hidden,)


def _rings(hidden: int) -> NDArray[np.float32]:
    """Return embeddings: signs in a ring's places, then 1, then -1 for tokens after which the head is wrong."""
    rng, places = np.random.default_rng(7), hidden - 2
    signs = np.ones((_VOCAB, hidden), np.float32)
    for first in range(0, _VOCAB, places):
        ring = rng.choice(np.array([-1, 1], np.float32), places)
        for step in range(min(places, _VOCAB - first)):
            signs[first + step, :places] = np.roll(ring, step)
    signs[:, -1] = np.where(rng.random(_VOCAB) < 0.2, -1, 1)
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


def _values(name: str, size: tuple[int, ...], shape: _Shape) -> NDArray[np.float32]:
    rng = np.random.default_rng(list(name.encode()))
    if name == "model.embed_tokens.weight":
        return _rings(shape.hidden)
    if name in ("model.norm.weight", "mtp.norm.weight"):
        return np.full(size, _LOGIT / shape.hidden - 1, np.float32)
    if name == "mtp.fc.weight":  # the token alone
        return np.eye(*size, dtype=np.float32)
    if ".mlp." in name and name.startswith((f"model.layers.{shape.layers - 1}.", "mtp.")):
        return _shifting(name, size, is_head=name.startswith("mtp."))
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        return np.zeros(size, np.float32)
    if name.endswith("linear_attn.norm.weight"):
        return np.ones(size, np.float32)
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 16, size)).astype(np.float32)
    if len(size) == 1:
        return np.zeros(size, np.float32)  # norms scale by 1 + weight
    values: NDArray[np.float32] = rng.standard_normal(size, np.float32) * np.float32(0.02)
    return values


def _bits(name: str, size: tuple[int, ...], shape: _Shape) -> NDArray[Any]:
    values = _values(name, size, shape)
    return values if len(size) == 1 else (values.view(np.uint32) >> 16).astype(np.uint16)


def write(folder: Path, shape: _Shape, tokenizer: Path | None) -> None:
    """Write a checkpoint, and a tokenizer's files beside it, if given, for llama.cpp's converter."""
    folder.mkdir(parents=True)
    entries = [
        Entry(name, "F32" if len(size) == 1 else "BF16", size, partial(_bits, name, size, shape))
        for name, size in _shapes(shape)
    ]
    write_safetensors(folder / "model.safetensors", entries)
    (folder / "config.json").write_text(json.dumps(_config(shape)))
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
    parser.add_argument("--shape", choices=SHAPES, default="0.8b", help="of the checkpoint; default %(default)s")
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
        write(options.write, SHAPES[options.shape], options.tokenizer)
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
