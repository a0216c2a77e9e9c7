"""`bash loadtest/gpu.sh --tune`: searches sizes for the attention kernels.

It starts from the table in engine/runtime/cuda/attention_tuning.py, changes one size after another, and keeps what is
faster: each combination takes seconds to compile, so not all are tried. Sizes that the GPU cannot hold are skipped. The
printed lines are to be entered in the table.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tools.gpu.figures import Figure
from tools.gpu.task import Task
from tools.gpu.timing import num_copies

if TYPE_CHECKING:
    from engine.runtime.cuda.attention_tuning import Cut, DecodeTile, PromptTile, Tuning

    Part = DecodeTile | PromptTile | Cut


class Load(NamedTuple):
    """A timed step: queries and contexts of its sequences."""

    queries: list[int]
    contexts: list[int]


class Search(NamedTuple):
    """Fields of one part of a Tuning, the values to try, and the steps to time."""

    part: str
    fields: Sequence[tuple[str, Sequence[int]]]
    loads: Sequence[Load]


_TILES = (("keys", (32, 64, 128)), ("warps", (2, 4, 8)))
_DECODES = (Load([1] * 128, [4096] * 128), Load([1] * 8, [8192] * 8))
_PROMPT, _TURNS = Load([8192], [8192]), Load([16] * 4, [8208] * 4)
SEARCHES = (
    Search("decode", (*_TILES, ("stages", (3, 5, 7))), _DECODES),
    Search("long", (("rows", (64, 128)), *_TILES, ("stages", (2, 3, 4))), (_PROMPT,)),
    Search("decode_cut", (("programs_per_sm", (1, 2, 4)), ("min_keys", (64, 128, 256))), _DECODES[1:]),
    Search("short", (("rows", (64,)), *_TILES, ("stages", (2, 3, 4))), (_TURNS,)),
    Search("prompt_cut", (("programs_per_sm", (1, 2, 4)), ("min_keys", (256, 512, 1024))), (_TURNS,)),
)
_HEADS, _KV_HEADS, _HEAD_DIMS = 32, 8, (128, 64, 256)  # the most common first


def run(task: Task) -> None:
    """Make every search for every head_dim; each result is written immediately."""
    from engine.runtime.cuda.attention_tuning import choose_tuning

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    capability = (0, 0)
    if device.type == "cpu":
        # As in kernels.py: the corrected interpreter, before anything imports Triton.
        importlib.import_module("tests.conftest")
        importlib.import_module("tests.kernels.conftest")
    else:
        capability = torch.cuda.get_device_capability(device)
    for dim in (16,) if task.is_rehearsal else _HEAD_DIMS:
        tuning = choose_tuning(dim, 2, capability)
        for search in SEARCHES:
            tuning = _search(task, device, dim, tuning, _tiny(search) if task.is_rehearsal else search)


def _search(task: Task, device: torch.device, dim: int, tuning: Tuning, search: Search) -> Tuning:
    """Return the tuning with the best sizes of one part."""
    times: dict[str, list[float]] = {}
    part = getattr(tuning, search.part)

    def seconds(part: Part) -> list[float]:
        changed: dict[str, Any] = {search.part: part}
        tried = tuning._replace(**changed)
        if str(part) not in times:
            times[str(part)] = [_time(task, device, dim, tried, load, str(part)) for load in search.loads]
        return times[str(part)]

    begun = seconds(part)
    best = climb(part, search.fields, lambda other: ratio(seconds(other), begun))
    name = f"head_dim {dim}, {search.part}"
    task.notebook.detail(name, times)
    task.notebook.figure(
        Figure(f"{name}: time against the table's", ratio(seconds(best), begun), "", less_is_better=True)
    )
    if best != part:
        task.notebook.note(f"{name}: {best} instead of {part}")
    found: dict[str, Any] = {search.part: best}
    return tuning._replace(**found)


def climb(part: Part, fields: Sequence[tuple[str, Sequence[int]]], cost: Callable[[Part], float]) -> Part:
    """Change one field after another to the best value, if it saves more than 1 %."""
    best = part
    for field, values in fields:
        for value in values:
            other = best._replace(**{field: value})
            if other != best and cost(other) < 0.99 * cost(best):
                best = other
    return best


def ratio(seconds: Sequence[float], begun: Sequence[float]) -> float:
    """Return the geometric mean over the loads; infinite if one failed."""
    return math.prod(a / b for a, b in zip(seconds, begun, strict=True)) ** (1 / len(begun))


def _time(task: Task, device: torch.device, dim: int, tuning: Tuning, load: Load, part: str) -> float:
    from tools.gpu.attention import attend_s

    heads, kv_heads = (4, 2) if task.is_rehearsal else (_HEADS, _KV_HEADS)
    num_bytes = 4 * sum(load.contexts) * kv_heads * dim
    try:
        with torch.inference_mode():
            return attend_s(device, heads, kv_heads, dim, *load, num_copies(num_bytes), tuning=tuning)
    except Exception as error:  # too little shared memory or too few registers
        if isinstance(error, torch.AcceleratorError):
            raise
        task.notebook.detail(f"head_dim {dim}, {part}: skipped", f"{type(error).__name__}: {str(error)[:200]}")
        return math.inf


def _tiny(search: Search) -> Search:
    """Return a search of one field and one value, for the interpreter."""
    field, values = search.fields[0]
    loads = [Load([min(n, 3) for n in load.queries[:2]], [40] * len(load.queries[:2])) for load in search.loads[:1]]
    return Search(search.part, ((field, values[:1]),), loads)
