"""Writes docs/models.md: architectures, file formats, devices, and the tests that hold each.

    python -m tests.cpu.models_page > docs/models.md

tests/cpu/test_models_page.py compares. Every row comes from a table of the code (families, GGUF architectures and types,
quantization methods, schemes) and every number from a table of tests, so a family or a format without a test shows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name

import transformers

from engine.files.formats import FORMATS
from engine.files.gguf_kinds import Kind
from engine.files.mmproj import PROJECTORS
from engine.files.quant_config import READERS
from engine.runtime.models.config_file import BOTH_WAYS, TOWERS
from engine.runtime.models.encoder_families import ENCODERS
from engine.runtime.models.families import FAMILIES, family_of
from engine.runtime.native.ops import is_served_quantised
from engine.runtime.schemes import SCHEMES
from engine.runtime.weights.gguf_config import ARCHITECTURES
from tests.cpu import (
    test_encoders,
    test_engine_families,
    test_models_transformers,
    test_moe_stored,
    test_quant,
    test_recurrent,
    test_served_models,
    test_stored,
    test_weights_gguf,
)
from tests.cpu.test_models_families import CASES, ON_A_GPU, ONCE_ON_A_GPU, Case
from tests.gpu.features import FEATURES

ROOT = Path(__file__).parents[2]

HEAD = """# Models

Made from the code and its tests by `python -m tests.cpu.models_page`; a test compares them, so this page describes this
version. `quire serve` takes a folder, a .gguf file (of a split one the first part), `ORG/NAME` or `ORG/NAME:Q4_K_M` of a
model hub; [tune.md](tune.md) has the levers.

Each number counts configs or files that a test compares with an oracle: transformers' forward pass in float32, or the documented arithmetic,
to 1e-4 in logits or log probabilities. An empty cell means that no test covers it. All tests but those in `tests/gpu/` run on a CPU. CUDA
kernels run there in Triton's interpreter, and are compiled for three GPUs. {gpu}
"""
_REHEARSED = """**No test in `tests/gpu/` has run on a GPU yet**: some of them run in a rehearsal, on a device that is made of
a CPU, and the others are only collected there."""
_RUN = "The tests in `tests/gpu/` passed on {name} on {date}, at commit {commit}."
_FAMILIES = """
## Architectures

By `model_type` of config.json. The engine's tests run chunked, preempted and batched requests; families that differ from
one that is tested there below the engine only have none of their own. On CUDA, decode steps of all of them are captured as
CUDA graphs, unless the experts of a layer are stored in different ways. The last column says which families `tests/gpu/` serves on a GPU.

| `model_type` | models | safetensors: configs | engine: configs | GGUF: architectures (files) | tests on a GPU |
|---|---|---|---|---|---|"""
_LENGTHS = """
Keys are cached rotated, so one engine rotates all of them alike. LongRoPE (Phi-3, Phi-3.5, Phi-4-mini) has two lists of factors, and its
authors choose by the length of each sequence. Quire chooses by the longest sequence that it serves, and the start says which list is in
force: the long one where `--max-model-len` (or, if it is not set, the model's own limit) exceeds `original_max_position_embeddings`, else the
short one. Sequences that are shorter than that differ from transformers under the long factors. `--max-model-len 4096`, for a model whose first
limit is 4096, equals it.
"""
_OTHERS = """
Other causal models run by transformers' own code over Quire's pool, from safetensors without quantization; tested:
"""
_WRAPPED = """
Of checkpoints that take images or sound, too, the text is served, and the start says so; tested, in safetensors: {names}.
"""
_BOTH_WAYS = ("eurobert", "gemma3_text")  # decoders that attend both ways, the second if its config says so
_NUMBERS = """
## Models that answer with numbers

Encoders attend both ways, and so do EuroBERT and EmbeddingGemma among the decoders. Each text is computed in one step. A test compares the vectors and
the label scores of each with transformers to 1e-5. Any decoder above makes vectors; one whose class ends in `ForSequenceClassification` scores
labels, and so do `Qwen2ForRewardModel` and `Qwen2ForProcessRewardModel`, of the last token: a step's reward is that of the text up to its end.
[Embeddings and reranking](guides/embeddings.md) has the endpoints.

| `model_type` | models | vectors: configs | label scores: configs |
|---|---|---|---|"""
_IMAGES = """
## Images

[Images](guides/images.md) are taken by these kinds of checkpoints, from safetensors: {towers}. From GGUF, with the vision half
in a second file: {halves}. The tower and the image processor
are transformers' own, except for LFM2-VL's processor. Where tokens of an image attend both ways ({both_ways}, as the config says), a GPU needs `--attention-backend torch`. All other models
refuse requests with images.
"""
_FEATURES = """
On a GPU, `tests/gpu/` serves beside these families {features} ({state})."""
_GGUF = """
## GGUF

Architectures that are read: {architectures}.

*As stored* means that the rows are multiplied in the type's own bits; *dequantised* that they become the model's dtype
while they are loaded, as all types do with `--quantization none`. The `gguf` package has no Q1_0 and Q2_0: their rule is
ggml's.

| type | on a CPU | on CUDA | dequantised as `gguf` does | multiplied as stored |
|---|---|---|---|---|"""
_STORED = """
## Quantised safetensors

By `quant_method`, in Quire's own families, with the variants that tests hold against dequantisation written from the
formats' documents. A CPU multiplies GPTQ, AWQ, W4A16, W8A16, W8A8, FP8 and MXFP4 in rows of 4 or 8 bits, and rounds
activations to 8 bits as for GGUF, on AMX to 16. CUDA multiplies FP8 with a scale for a row or a tensor on tensor cores, and rounds
activations to FP8 with a scale for each token; kernels decode integers, MXFP4 and FP8 in blocks as they multiply, and leave
activations alone. Every other matrix (act-order, NVFP4, nf4; on a CPU also 8 bits with zero points) is dequantised at load;
the start says how many.

| `quant_method` | variants tested, matrix by matrix | through a whole model |
|---|---|---|"""
_SCHEMES = """
## `--quantization`

| name | weights |
|---|---|"""
_FORMATS = """
## `--load-format`

| name | reads |
|---|---|"""


def page() -> str:
    """Return the page."""
    run = _gpu_run()
    state = "written, not run" if run is None else "passed"
    parts = [
        HEAD.format(gpu=_REHEARSED if run is None else _RUN.format(**run)),
        _FAMILIES.lstrip("\n"),
        *map(_row, _families(state)),
        _LENGTHS.rstrip("\n"),
        _OTHERS + _listed(_adapted()) + ".",
        _WRAPPED.format(names=_listed(test_served_models.WRAPPERS)).rstrip("\n"),
        _FEATURES.format(features=_listed(FEATURES), state=state),
        _NUMBERS,
        *map(_row, _encoders()),
        _IMAGES.format(towers=_listed(TOWERS), both_ways=_listed(BOTH_WAYS), halves=_halves()).rstrip("\n"),
    ]
    parts += [_GGUF.format(architectures=_listed(ARCHITECTURES)), *map(_row, _types())]
    parts += [_STORED, *map(_row, _methods())]
    parts += [_SCHEMES, *(_row((f"`{name}`", _summary(resolve_name(place)))) for name, place in SCHEMES.items())]
    parts += [_FORMATS, *(_row((f"`{name}`", _summary(resolve_name(each.reader)))) for name, each in FORMATS.items())]
    return "\n".join(parts) + "\n"


def _gpu_run() -> dict[str, str] | None:
    """Return the newest run of loadtest/gpu.sh that is kept and in which all tests of the engine passed, if there is one."""
    found = []
    for path in (ROOT / "loadtest/results").glob("gpu-*/results.json"):
        results = json.loads(path.read_text(encoding="utf-8"))
        has_passed = results["parts"].get("engine-tests", {}).get("status") == "done"
        if has_passed and not results["rehearsal"]:
            host = results["host"]
            found.append({"date": host["date"][:10], "name": results["gpu"], "commit": host["commit"]})
    return max(found, key=lambda run: run["date"], default=None)


def _families(state: str) -> Iterator[Sequence[str]]:
    own = [name for kind, name in (case.values for case in test_engine_families.CASES) if kind.CASES is CASES]
    own += test_recurrent.NAMES
    for family in [name for name in FAMILIES if name != "eurobert"]:
        cases = [name for name, case in CASES.items() if _type_of(case) == family]
        files: dict[str, int] = {}
        for name, (case, _, _) in test_weights_gguf.ARCHITECTURES.items():
            if _type_of(case) == family:
                files[name.partition("/")[0]] = files.get(name.partition("/")[0], 0) + 1
        yield (
            f"`{family}`",
            _summary(family_of(family)).rstrip("."),
            _count(cases),
            _count(set(cases) & set(own)),
            ", ".join(f"{name} ({count})" for name, count in files.items()),
            state if set(cases) & {*ON_A_GPU, *ONCE_ON_A_GPU} else "",
        )


def _encoders() -> Iterator[Sequence[str]]:
    for kind, read in {**ENCODERS, **{name: family_of(name) for name in _BOTH_WAYS}}.items():
        counts = [
            _count(each for each, (name, _) in table.items() if kind == (each if each in ENCODERS else _kind_of(name)))
            for table in (test_encoders.KINDS, test_encoders.CLASSIFIERS)
        ]
        yield f"`{kind}`", _summary(read).rstrip("."), *counts


def _kind_of(name: str) -> str:
    return str(getattr(transformers, f"{name}Config").model_type)


def _type_of(case: Case) -> str:
    return str(case.build().model_type)


def _halves() -> str:
    """Return the projector types of vision halves, with the kinds of models."""
    return ", ".join(f"`{name}` ({_listed(sorted({*row.kinds.values()}))})" for name, row in PROJECTORS.items())


def _adapted() -> list[str]:
    return [name for name in test_models_transformers.CASES if name not in FAMILIES]


def _types() -> Iterator[Sequence[str]]:
    for kind in Kind:
        is_float = kind.name in ("F32", "F16", "BF16")
        on_cpu = "as the model's dtype" if is_float else "as stored" if is_served_quantised([kind]) else "dequantised"
        yield (
            kind.name,
            on_cpu,
            "as the model's dtype" if is_float else "dequantised",
            "yes" if kind.name in test_weights_gguf.KINDS else "",
            "yes" if kind in test_quant.KINDS else "",
        )


def _methods() -> Iterator[Sequence[str]]:
    matrices: dict[str, list[str]] = {method: [] for method in READERS}
    models: dict[str, list[str]] = {method: [] for method in READERS}
    for name, packing in test_stored.CASES.items():
        matrices[_method(packing.config)].append(name)
        if name in test_stored.SERVED:
            models[_method(packing.config)].append(name)
    for name, config in test_moe_stored.METHODS.items():
        models[_method(config)].append(f"experts of {name}")
    for name, (_, packing) in test_moe_stored.WHOLE.items():
        models[_method(packing.config)].append(name.partition("/")[0])
    for method in READERS:
        yield f"`{method}`", ", ".join(matrices[method]), ", ".join(models[method])


def _method(config: Mapping[str, object]) -> str:
    return str(config["quant_method"]).replace("_", "-")


def _summary(described: object) -> str:
    """Return the first line of a docstring."""
    return (described.__doc__ or "").strip().partition("\n")[0]


def _count(found: Iterable[object]) -> str:
    return str(len(list(found)) or "")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
