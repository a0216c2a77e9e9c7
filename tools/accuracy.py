"""Measures the accuracy that each format of weights costs.

    python -m tools accuracy --models-dir DIR --llama-quantize FILE

Two figures a format. The KL divergence of a random model of width 512, from the float32 forward on the same stored
weights: the cost of Quire's products. The perplexity of SmolLM2, requantised from one set of float32 weights, over that
of these weights: the cost of the format and of the products. A format whose blocks do not divide SmolLM2's rows has no
perplexity. llama.cpp's mixed files, which --llama-quantize makes, have no divergence.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.errors import QuireError
from loadtest.arguments import positive_int
from loadtest.errors import LoadtestError
from loadtest.output import markdown, save_json
from loadtest.peers.table import FORMATS, file_of
from loadtest.shapes import COMPARED, Shape
from tools.perplexity import PerplexityError, Score, measure, read_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TINY = Shape("tiny-512", "llama", 2, 512, 8, 4, 64, 1536, 512, 1024, 1e4, 1e-5, stds=(0.1, 0.044))
_TRAINED = "smollm2-135m"
_MIXED = ("IQ4_NL", "IQ4_XS", "IQ3_S", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")
_NUM_PROMPTS, _PROMPT = 8, 64  # ids for the divergence


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `accuracy`."""
    parser.add_argument("--models-dir", type=Path, metavar="DIR", required=True, help="where files are kept")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, metavar="NAME", default=FORMATS, help="default: all")
    parser.add_argument("--llama-quantize", type=Path, metavar="FILE", help="llama.cpp's; makes the mixed files")
    parser.add_argument("--mixed", nargs="+", metavar="NAME", default=_MIXED)
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8; default: pydoc's topics, which Python brings")
    parser.add_argument("--tokens", type=positive_int, default=10_240, metavar="N", help="of the text")
    parser.add_argument("--window", type=positive_int, default=512, metavar="N", help="tokens of a window")
    parser.add_argument("--skip", type=positive_int, default=257, metavar="N", help="of a window, not scored")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Measure one format after another, and print each row when it is known."""
    options.model, rows = None, {}
    exact = _score(options, "hf", "--dtype float32 --quantization none")
    print("\n".join(markdown(_HEAD, [("float32", "0", f"{exact.perplexity:.3f}", "1")])), flush=True)
    mixed = options.mixed if options.llama_quantize else []
    for name in (*(file_of("quire", each) for each in options.formats), *mixed):
        file, divergence, ratio = name, float("nan"), float("nan")
        if name in mixed:
            file = _quantize(options, name)
        else:
            divergence = kl_of(_tiny(options.models_dir, name))
        try:
            score = _score(options, file, "")
            ratio = score.perplexity / exact.perplexity
        except (LoadtestError, QuireError) as error:  # no file: the rows are not a multiple of the blocks
            print(f"{name}: {error}")
        rows[name] = {"kl": divergence, "perplexity": ratio * exact.perplexity, "ratio": ratio}
        cells = (name, f"{divergence:.1e}", f"{ratio * exact.perplexity:.3f}", f"{ratio:.4f}")
        print(list(markdown(_HEAD, [cells]))[2], flush=True)
        save_json(options.json, {"float32": exact, "formats": rows})
    return 0


_HEAD = ("weights", "KL, width 512", "perplexity of SmolLM2", "to float32")


def _score(options: argparse.Namespace, file: str, settings: str) -> Score:
    if not (options.models_dir / _TRAINED / file).exists():
        _prepare(options.models_dir, COMPARED[_TRAINED], file)
    return measure(f"{options.models_dir / _TRAINED / file} {settings}", options, read_text(options.text))


def _prepare(folder: Path, shape: Shape, file: str) -> None:
    from engine.sources.model_source import find_model
    from loadtest.peers.models import prepare

    prepare(shape, Path(find_model(None).path), folder, [file], lambda _: None)


def _quantize(options: argparse.Namespace, name: str) -> str:
    """Return a mixed file, made by llama-quantize."""
    folder, file = options.models_dir / _TRAINED, f"llama-{name}.gguf"
    if not (folder / file).exists():
        _prepare(options.models_dir, COMPARED[_TRAINED], "bf16.gguf")
        command = [options.llama_quantize, folder / "bf16.gguf", folder / file, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise PerplexityError(f"llama-quantize {name} failed: {done.stderr.strip().splitlines()[-1]}")
    return file


def _tiny(folder: Path, file: str) -> Path:
    _prepare(folder, TINY, file)
    return folder / TINY.name / file


def kl_of(path: Path) -> float:
    """Return the mean divergence of a served file from its float32 forward."""
    served, exact = _logprobs(path), _logprobs(path, dtype="float32", quantization="none")
    return float((math.e**exact * (exact - served)).sum(-1).mean())


def _logprobs(path: Path, **settings: Any) -> NDArray[np.float64]:
    """Return log probabilities of the whole vocabulary, after each token of fixed prompts."""
    import numpy as np

    from quire import LLM, SamplingParams

    rng = random.Random(0)
    prompts = [[rng.randrange(TINY.vocab) for _ in range(_PROMPT)] for _ in range(_NUM_PROMPTS)]
    with LLM(str(path), max_logprobs=TINY.vocab, **settings) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=TINY.vocab), progress=False)
    rows = [entry for output in outputs for entry in output.prompt_logprobs or () if entry]
    return np.array([[row[token].logprob for token in range(TINY.vocab)] for row in rows])
