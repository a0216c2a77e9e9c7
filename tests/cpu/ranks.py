"""What each rank does in tests/cpu/test_ranks.py and test_groups.py. Imports neither pytest nor transformers, to start soon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.runtime.attention.backend import AttentionBackend, Batch
from engine.runtime.attention.table import load_backend
from engine.runtime.kv_layout import RecurrentSpec, StepStates
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.load import load_model
from engine.runtime.native.functions import GroupError
from engine.runtime.native.library import native
from engine.runtime.parallel.cpu_groups import GlooGroup, SharedMemoryGroup
from engine.runtime.parallel.group import SINGLE, Group, least
from engine.runtime.pool.groups import one_group
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.states import place_states
from engine.settings.engine_config import EngineConfig
from tests.cpu.dense_attention import DenseAttention

CPU = torch.device("cpu")
PROMPTS = [[7, 99, 23, 5, 41, 120, 3, 64, 18], [11], [88, 4, 56, 31, 77]]
NUM_STEPS = 3
TIMEOUT_S = 60  # of a wait for another rank
BLOCKS = 8  # of a sequence, of 4 tokens


def load(folder: Path, group: Group, **settings: Any) -> CausalLM:
    config = EngineConfig(**({"model": str(folder), "dtype": "float32"} | settings))
    return load_model(config, CPU, getattr(torch, config.dtype), lambda progress: None, group)


def forward(
    model: CausalLM,
    backend: AttentionBackend,
    cache: KVCache,
    places: Sequence[int],
    steps: Sequence[tuple[int, list[int]]],
) -> Tensor:
    """Logits of every token of some sequences, each with a place in the pool and (tokens cached, tokens now)."""
    tables = [[place * BLOCKS + i for i in range(BLOCKS)] for place in places]
    lens = [len(ids) for _, ids in steps]
    ends = [start + num for (start, _), num in zip(steps, lens, strict=True)]
    positions = [torch.arange(end - num, end) for end, num in zip(ends, lens, strict=True)]
    slots = [place * BLOCKS * 4 + at for place, at in zip(places, positions, strict=True)]
    batch = Batch(
        ids=torch.tensor([token for _, ids in steps for token in ids]),
        positions=torch.cat(positions),
        kv_slots=torch.cat(slots),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        query_starts=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
        context_lens=torch.tensor(ends, dtype=torch.int32),
        sample_rows=torch.tensor([], dtype=torch.int64),
        query_lens_host=lens,
        context_lens_host=ends,
        block_tables_host=tables,
    )
    if any(isinstance(spec, RecurrentSpec) for spec in model.states):
        batch.states = states_of(model, places, steps)
    cache.prepare(batch)
    return model.logits(model.forward(batch.ids, batch.positions, cache)).clone()


def state_blocks(model: CausalLM) -> int:
    return place_states(model.states, 4 * one_group(model.states, model.dtype).cuts[-1]).num_blocks


def num_blocks(model: CausalLM) -> int:
    return 4 * (BLOCKS + state_blocks(model))


def states_of(model: CausalLM, places: Sequence[int], steps: Sequence[tuple[int, list[int]]]) -> StepStates:
    """A slot for each place, behind the blocks of all."""
    size, lens = state_blocks(model), np.array([len(ids) for _, ids in steps], np.int32)
    written = (4 * BLOCKS + size * np.array(places)[:, None] + np.arange(size)).astype(np.int32)
    begins = np.array([start == 0 for start, _ in steps])
    read = np.where(begins[:, None], np.int32(-1), written)
    zeros = np.zeros(len(lens), np.int32)
    return StepStates(read, written, np.append(0, lens.cumsum()).astype(np.int32), lens, zeros, zeros, read, zeros)


@torch.inference_mode()
def answer(model: CausalLM, group: Group) -> tuple[Tensor, list[list[int]], bool]:
    """Logits of all prompts and of greedy steps, the tokens, and whether the first prompt has the same bits alone."""
    backend = load_backend("cpu_native", CPU)
    cache = KVCache(model.states, backend, num_blocks=num_blocks(model), block_size=4, dtype=model.dtype, device=CPU)
    alone = forward(model, backend, cache, [3], [(0, PROMPTS[0])])
    found = [forward(model, backend, cache, [2, 0, 1], [(0, prompt) for prompt in PROMPTS])]
    is_same = torch.equal(alone, found[0][: len(PROMPTS[0])])
    rows = torch.tensor([len(prompt) for prompt in PROMPTS]).cumsum(0) - 1
    logits, tokens = found[0][rows], []
    for step in range(NUM_STEPS):
        ids = logits.argmax(-1)
        group.broadcast(ids)
        tokens.append(ids.tolist())
        starts = [len(prompt) + step for prompt in PROMPTS]
        logits = forward(
            model,
            backend,
            cache,
            [2, 0, 1],
            [(start, [token]) for start, token in zip(starts, tokens[-1], strict=True)],
        )
        found.append(logits)
    return torch.cat(found), tokens, is_same


@torch.inference_mode()
def in_torch(model: CausalLM) -> Tensor:
    """Logits of the first prompt, operation by operation."""
    ids = torch.tensor(PROMPTS[0])
    return model.logits(model.forward(ids, torch.arange(len(ids)), DenseAttention(model.states)))


@torch.inference_mode()
def rounded(model: CausalLM) -> tuple[Tensor, bool]:
    """Logits of all prompts, and whether the first has the same bits alone."""
    backend = load_backend("cpu_native", CPU)
    cache = KVCache(model.states, backend, num_blocks=num_blocks(model), block_size=4, dtype=model.dtype, device=CPU)
    alone = forward(model, backend, cache, [3], [(0, PROMPTS[0])])
    found = forward(model, backend, cache, [2, 0, 1], [(0, prompt) for prompt in PROMPTS])
    return found, torch.equal(alone, found[: len(PROMPTS[0])])


def work(rank: int, folder: Path, names: Sequence[str], rounded_names: Sequence[str], send: Any) -> None:
    """Compute all models alone, on 2 ranks and on 4, and send what rank 0 finds by name and size."""
    torch.set_num_threads(1)
    library = native()
    assert library is not None
    library.use_threads(1)
    groups: dict[int, Group] = {
        size: SharedMemoryGroup(library, folder / str(size), rank, size, timeout_s=TIMEOUT_S)
        for size in (2, 4)
        if rank < size
    }
    gloo = GlooGroup(folder, rank, 2, timeout_s=TIMEOUT_S) if rank < 2 else None
    found: dict[Any, Any] = {}
    for name in names:
        path = folder / name
        whole = load(path, SINGLE) if rank == 0 else None
        expected = answer(whole, SINGLE) if whole is not None else None
        for size, group in groups.items():
            result = answer(load(path, group), group)
            if expected is not None:
                found[name, size] = (*expected[:2], *result)
        if gloo is not None:
            plain = in_torch(load(path, gloo))
            if whole is not None:
                found[name, 0] = (in_torch(whole), plain)
    for name in rounded_names:
        path = folder / name
        ours = {size: rounded(load(path, group, dtype="bfloat16")) for size, group in groups.items()}
        if rank == 0:
            found[name, "rounded"] = (
                rounded(load(path, SINGLE)),
                rounded(load(path, SINGLE, dtype="bfloat16")),
                ours,
            )
    if rank == 0:
        torch.save(found, folder / "found.pt")
        send.send(True)
    for group in groups.values():
        group.all_reduce(torch.zeros(1))  # all have finished
        group.close()


def open_kind(kind: str, rank: int, folder: Path, size: int, timeout_s: float) -> Group:
    library = native()
    if kind == "gloo":
        return GlooGroup(folder, rank, size, timeout_s=timeout_s)
    assert library is not None
    return SharedMemoryGroup(library, folder, rank, size, timeout_s=timeout_s)


def exchange(rank: int, folder: Path, size: int) -> None:
    """Compare all calls over shared memory with gloo's, bit by bit."""
    shared, gloo = (open_kind(kind, rank, folder, size, TIMEOUT_S) for kind in ("shared", "gloo"))
    generator = torch.Generator().manual_seed(rank)
    for num in (1, 3, 576, 65_537, 200_003):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(num, generator=generator).to(dtype)
            ours, theirs = x.clone(), x.clone()
            shared.all_reduce(ours)
            gloo.all_reduce(theirs)
            assert torch.equal(ours, theirs)
    for rows, num, width in ((1, 5, 5 * size - 2), (7, 30_001, 30_001 * size), (2, 200_000, 200_000 * size - 199_999)):
        x = torch.randn(rows, num, generator=generator)
        outs = [torch.empty(rows, width) if rank == 0 else None for _ in range(2)]
        shared.gather(x, outs[0])
        gloo.gather(x, outs[1])
        assert rank or (outs[0] is not None and outs[1] is not None and torch.equal(outs[0], outs[1]))
    for x in (torch.arange(100_000) + rank, torch.full((3,), rank, dtype=torch.uint8)):
        ours, theirs = x.clone(), x.clone()
        shared.broadcast(ours)
        gloo.broadcast(theirs)
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, x - rank)
    gloo.all_reduce(torch.zeros(1))  # all have finished


def sum_for_ever(rank: int, folder: Path, size: int, kind: str) -> None:
    group = open_kind(kind, rank, folder, size, TIMEOUT_S)
    while True:
        group.all_reduce(torch.ones(8))


def wait_for_ever(rank: int, folder: Path, size: int) -> None:
    group = open_kind("shared", rank, folder, size, TIMEOUT_S)
    try:
        group.all_reduce(torch.ones(8))
    except GroupError:
        return
    raise AssertionError("no rank was there to add anything")


def sum_once(rank: int, folder: Path, size: int, timeout_s: float) -> None:
    group, x = open_kind("shared", rank, folder, size, timeout_s), torch.ones(8)
    group.all_reduce(x)
    assert x.tolist() == [float(size)] * 8


AGREED = [(1 << 40) + 1, 0, -(1 << 40)]


def agree(rank: int, folder: Path, size: int, kind: str) -> list[int]:
    """The least of the ranks' numbers, each time of another rank's."""
    group = open_kind(kind, rank, folder, size, timeout_s=TIMEOUT_S)
    agreed = [least(group, number + (rank - at) % size, CPU) for at, number in enumerate(AGREED)]
    assert agreed == AGREED
    return agreed
