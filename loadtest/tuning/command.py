"""`quire tune`: the command line, the picture and the file of settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from engine.core.page_table import blocks_for
from loadtest.arguments import positive_float, positive_int
from loadtest.output import print_table
from loadtest.plots import require_matplotlib
from loadtest.tuning.probe import Load, Opener
from loadtest.tuning.tuner import Goal, Tuned, tune

_MAX_BLOCK_SIZE = 1024  # the largest that the engine accepts
_LARGEST_SPREAD = 0.15  # of steps that were measured while nothing else ran


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `tune`."""
    parser.add_argument("--model", metavar="MODEL", help="as `quire serve` takes it; default: the embedded one")
    parser.add_argument(
        "--target-itl-ms", metavar="MS", type=positive_float,
        help="the longest acceptable gap between two tokens; default: the most tokens a second",
    )  # fmt: skip
    parser.add_argument(
        "--context", metavar="TOKENS", type=positive_int, default=512, help="length of sequences; default %(default)s"
    )
    parser.add_argument(
        "--block-sizes", metavar="N", type=_block_size, nargs="+", default=[16, 8, 32, 64], help="default 16 8 32 64"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("quire.yaml"), help="default %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of all measurements, .png or .svg")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="after --, other settings of `quire serve`")


def _block_size(text: str) -> int:
    value = positive_int(text)
    if value.bit_count() != 1 or value > _MAX_BLOCK_SIZE:
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be a power of two from 1 to {_MAX_BLOCK_SIZE}")
    return value


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    if options.plot:
        require_matplotlib()
    goal = Goal(options.context, None if options.target_itl_ms is None else options.target_itl_ms / 1e3)
    opener = Opener(options.model, options.settings, _report)
    tuned = tune(opener.open, goal, options.block_sizes, opener.largest_step, _report)
    _show(tuned, goal)
    if tuned.spread > _LARGEST_SPREAD:
        print(f"Steps of one size differed by {tuned.spread:.0%}: tune again while nothing else uses this machine.")
    options.output.write_text(config_file(tuned, goal, options.model, opener.given), encoding="utf-8")
    print(f"Written to {options.output}; use it: quire serve --config {options.output}")
    if options.plot:
        _draw(options.plot, tuned, goal)
    return 0


def _report(line: str) -> None:
    print(line, flush=True)


def config_file(tuned: Tuned, goal: Goal, model: str | None, given: dict[str, Any]) -> str:
    """Return a YAML file of the given settings and of those that were found."""
    found: dict[str, Any] = {} if model is None else {"model": model}
    found |= {name.replace("_", "-"): _plain(value) for name, value in given.items()}
    found |= {
        "max-num-seqs": tuned.max_num_seqs,
        "max-num-batched-tokens": tuned.max_num_batched_tokens,
        "block-size": tuned.block_size,
    }
    target = "as many tokens a second as it gives"
    if goal.target_s is not None:
        target = f"at most {goal.target_s * 1e3:g} ms between two tokens"
    head = (
        f"# quire tune: {target}, at contexts of {goal.context} tokens.\n"
        f"# {tuned.max_num_seqs} sequences decode in {tuned.step_s * 1e3:.1f} ms, and in {tuned.full_step_s * 1e3:.1f} ms "
        f"beside {tuned.chunk} tokens of a prompt.\n"
    )
    return head + yaml.safe_dump(found, sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool):
        return value
    for plain in (int, float):  # of a subclass, such as a size in bytes, yaml would refuse to write
        if isinstance(value, plain):
            return plain(value)
    return str(value)


def _show(tuned: Tuned, goal: Goal) -> None:
    print(
        f"\n--max-num-seqs {tuned.max_num_seqs} --max-num-batched-tokens {tuned.max_num_batched_tokens} "
        f"--block-size {tuned.block_size}"
    )
    print(
        f"{tuned.max_num_seqs} sequences of {goal.context} tokens decode in {tuned.step_s * 1e3:.1f} ms "
        f"({tuned.max_num_seqs / tuned.step_s:,.0f} tokens/s), in {tuned.full_step_s * 1e3:.1f} ms beside {tuned.chunk} "
        "tokens of a prompt."
    )
    rows = []
    for figure in tuned.blocks:
        # On average the last block of a sequence is half empty.
        waste = (figure.block_size - 1) / 2 / (blocks_for(goal.context, figure.block_size) * figure.block_size)
        rates = (f"{figure.decode_tokens_per_s:,.0f}", f"{figure.prompt_tokens_per_s:,.0f}")
        rows.append((figure.block_size, *rates, f"{waste:.1%}"))
    if rows:
        print_table(("block size", "tokens/s decoding", "of prompts", "K/V wasted"), rows)


def _draw(path: Path, tuned: Tuned, goal: Goal) -> None:
    plt = require_matplotlib()
    figure, (prompts, decode, blocks) = plt.subplots(1, 3, figsize=(15, 4.5), constrained_layout=True)
    alone = {load: load.num_prompt_tokens for load in tuned.seconds if not load.num_seqs}
    _draw_steps(prompts, tuned, alone, "")
    prompts.axvline(tuned.chunk, color="tab:red", linestyle="--", label=f"chosen: {tuned.chunk}")
    prompts.set(title="A part of a prompt", xlabel="tokens", ylabel="ms / step", xscale="log", ylim=(0, None))
    for beside in sorted({load.num_prompt_tokens for load in tuned.seconds if load.num_seqs}):
        label = f"beside {beside} tokens of a prompt" if beside else "decoding alone"
        chosen = {load: load.num_seqs for load in tuned.seconds if load.num_prompt_tokens == beside}
        _draw_steps(decode, tuned, chosen, label)
    decode.axvline(tuned.max_num_seqs, color="tab:red", linestyle="--", label=f"chosen: {tuned.max_num_seqs}")
    decode.set(title=f"Sequences of {goal.context} tokens", xlabel="sequences", ylabel="ms / step", ylim=(0, None))
    for axis in (prompts, decode):
        if goal.target_s is not None:
            axis.axhline(goal.target_s * 1e3, color="tab:gray", linestyle=":", label="target")
        axis.legend()
    ordered = sorted(tuned.blocks)
    names = [str(each.block_size) for each in ordered]
    for label, rates in (
        ("decoding", [each.decode_tokens_per_s for each in ordered]),
        ("prompts", [each.prompt_tokens_per_s for each in ordered]),
    ):
        blocks.plot(names, [100 * rate / max(rates) for rate in rates], marker="o", label=label)
    blocks.set(title=f"Block size (chosen: {tuned.block_size})", xlabel="tokens", ylabel="% of the fastest")
    if ordered:
        blocks.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_steps(axis: Any, tuned: Tuned, sizes: Mapping[Load, int], label: str) -> None:
    """Plot the step times of loads over their sizes; a size of 0 is left out."""
    points = sorted((size, tuned.seconds[load] * 1e3) for load, size in sizes.items() if size)
    if points:
        axis.plot(*zip(*points, strict=True), marker="o", label=label or None)
