"""Recurrent layers in the native library: their definitions in torch, and the same bits whatever the steps of a sequence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_attention import make_batch
from torch import Tensor

from engine.runtime.attention.table import load_backend
from engine.runtime.kv_layout import StepStates
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.load import load_model
from engine.runtime.native.library import Library
from engine.runtime.pool.kv_cache import KVCache
from engine.settings.engine_config import EngineConfig
from tests.cpu.model_driver import state_blocks
from tests.cpu.test_models_families import CASES, GRANITE_MOE, LFM2, MAMBA, QWEN3_5, Case, write_tiny

CPU = torch.device("cpu")
BLOCK, ROWS, SLOTS, LENGTH, MAX_DRAFTS = 16, 3, 8, 200, 4
LAYERS = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
NARROW = {"linear_key_head_dim": 12, "linear_conv_kernel_dim": 3}
MATRICES = LAYERS | {"embedding_multiplier": 1.0}  # in torch, bfloat16 loses digits of another product
SMALL = MATRICES | {"mamba_d_head": 8, "mamba_n_heads": 16, "mamba_d_state": 12}
LATENT = {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}  # with experts in a narrower space
CONV = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
SHAPES = {
    # Blocks of 32 columns, which have a form of their own; blocks of 8, less than a vector of some instruction sets.
    "wide": Case("Qwen3_5TextConfig", QWEN3_5 | LAYERS | {"linear_value_head_dim": 64}),
    "narrow": Case("Qwen3_5TextConfig", QWEN3_5 | LAYERS | NARROW),
    # Groups of two heads; then one group, numbers that no vector divides, and bounds of steps.
    "mamba": Case("GraniteMoeHybridConfig", GRANITE_MOE | MAMBA | MATRICES | {"mamba_n_heads": 4, "mamba_expand": 4}),
    "mamba-narrow": Case("GraniteMoeHybridConfig", CASES["granitemoehybrid-mamba-dense"].settings | SMALL),
    "mamba-latent": Case("NemotronHConfig", CASES["nemotron_h-latent"].settings | LATENT),
    "short_conv": Case("Lfm2Config", LFM2 | CONV | {"hidden_size": 192}),
    "short_conv-biased": Case("Lfm2Config", LFM2 | CONV | {"hidden_size": 72, "conv_bias": True, "conv_L_cache": 7}),
}
_random = random.Random(9)
IDS = torch.tensor([[_random.randrange(3, 128) for _ in range(LENGTH)] for _ in range(ROWS)])


class Part(NamedTuple):
    """A sequence's part of a step; `slots` are read and written, and the first may be none."""

    row: int
    start: int
    ids: Tensor
    slots: tuple[int | None, int]
    num_replays: int = 0
    num_drafts: int = 0
    midway: tuple[int, int] | None = None  # a slot, and the tokens after which it is written


class Steps:
    """A pool, of which each slot is NaN and anywhere, and steps over it."""

    def __init__(self, model: Decoder, *, is_native: bool = True) -> None:
        backend, size, width = load_backend("cpu_native", CPU), state_blocks(model, BLOCK), LENGTH // BLOCK + 1
        num_blocks = ROWS * width + SLOTS * size
        self._model, self._cache = model, KVCache(
            model.states, backend, num_blocks=num_blocks, block_size=BLOCK, dtype=model.dtype, device=CPU,
            max_rows=ROWS, max_drafts=MAX_DRAFTS,
        )  # fmt: skip
        if not is_native:
            self._cache.paged_step = None
        blocks = _random.sample(range(num_blocks), num_blocks)
        self._tables = [[blocks.pop() for _ in range(width)] for _ in range(ROWS)]
        self._slots = [[blocks.pop() for _ in range(size)] for _ in range(SLOTS)]
        for slot in self._slots:
            self._cache.blocks[0][slot] = torch.nan

    def run(self, *parts: Part) -> list[Tensor]:
        """Hidden states of each part."""
        lens = [len(part.ids) for part in parts]
        batch = make_batch([(p.start, len(p.ids)) for p in parts], [self._tables[p.row] for p in parts], BLOCK)
        batch.ids = torch.cat([part.ids for part in parts])
        nowhere = [-1] * len(self._slots[0])
        read = [nowhere if part.slots[0] is None else self._slots[part.slots[0]] for part in parts]
        columns = (
            read,
            [self._slots[part.slots[1]] for part in parts],
            [0, *torch.tensor(lens).cumsum(0).tolist()],
            [len(part.ids) - part.num_drafts for part in parts],
            [part.num_replays for part in parts],
            [part.row for part in parts],
            [self._slots[part.midway[0]] if part.midway else slot for part, slot in zip(parts, read, strict=True)],
            [part.midway[1] if part.midway else part.num_replays for part in parts],
        )
        batch.states = StepStates(*(torch.tensor(column, dtype=torch.int32).numpy() for column in columns))
        self._cache.prepare(batch)
        with torch.inference_mode():
            return list(self._model.forward(batch.ids, batch.positions, self._cache, None).split(lens))

    def state(self, slot: int) -> bytes:
        return self._cache.blocks[0][self._slots[slot]].view(torch.uint8).numpy().tobytes()


def whole(model: Decoder, num: int, *, is_native: bool = True) -> tuple[Tensor, bytes]:
    """The first sequence's hidden states in one step of so many tokens, and the state after it."""
    steps = Steps(model, is_native=is_native)
    hidden, *_ = steps.run(Part(0, 0, IDS[0, :num], (None, 0)))
    return hidden, steps.state(0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in SHAPES}
    for name, folder in made.items():
        write_tiny(SHAPES[name], folder)
    return made


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def load(folder: Path, dtype: torch.dtype = torch.float32, state_dtype: str = "float32") -> Decoder:
    config = EngineConfig(model=str(folder), state_dtype=state_dtype)
    model = load_model(config, CPU, dtype, lambda progress: None)
    assert isinstance(model, Decoder)
    assert model._native is not None
    return model


@pytest.mark.parametrize(("state_dtype", "error"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_it_is_its_definition(library: Library, shape: Path, state_dtype: str, error: float) -> None:
    model = load(shape, state_dtype=state_dtype)
    (ours, state), (theirs, expected) = (whole(model, LENGTH, is_native=each) for each in (True, False))
    torch.testing.assert_close(ours, theirs, atol=error, rtol=error)
    if state_dtype == "float32":
        states = [torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (state, expected)]
        torch.testing.assert_close(*states, atol=error, rtol=error, equal_nan=True)


def test_states_are_rounded_to_the_nearest(library: Library, shape: Path) -> None:
    """As the definition rounds them: after one token, but for sums in another order."""
    model = load(shape, torch.bfloat16, "bfloat16")
    states = [bytearray(whole(model, 1, is_native=each)[1]) for each in (True, False)]
    ours, theirs = (torch.frombuffer(each, dtype=torch.int16) for each in states)
    assert (ours == theirs).float().mean() > 0.9


@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid-mamba", "lfm2"])
def test_definitions_write_a_state_midway(name: str, tmp_path: Path) -> None:
    """At a position in a chunk; with replays it is where the rows begin, and goes into the slot that was read."""
    write_tiny(CASES[name], tmp_path)
    model = load_model(EngineConfig(model=str(tmp_path)), CPU, torch.float32, lambda progress: None)
    assert isinstance(model, Decoder)
    steps = Steps(model, is_native=False)
    steps.run(Part(0, 0, IDS[0, :20], (None, 0), midway=(2, 7)))
    steps.run(Part(0, 20, torch.cat((IDS[0, 20:23], IDS[1, :1])), (0, 0), num_drafts=3))  # two are right
    steps.run(Part(0, 23, IDS[0, 23:24], (0, 1), num_replays=2))
    for slot, num in ((2, 7), (0, 23), (1, 24)):
        states = (steps.state(slot), whole(model, num, is_native=False)[1])
        found, expected = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in states)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.in_turns
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "float32"),
        (torch.float32, "bfloat16"),
        (torch.bfloat16, "bfloat16"),
    ],
    ids=str,
)
def test_no_cut_shows(library: Library, shape: Path, dtype: torch.dtype, state_dtype: str) -> None:
    """Chunks of any length, beside others, from one slot into the same or another, some into a third midway."""
    model = load(shape, dtype, state_dtype)
    expected, state = whole(model, LENGTH)
    for trial in range(3):
        library.use_threads(1 + trial)
        steps, hidden, num_midway = Steps(model), [], 0
        starts, slots = [0] * ROWS, [None] * ROWS
        while starts[0] < LENGTH:
            parts = []
            for row in _random.sample(range(ROWS), ROWS):
                num = min(_random.choice((1, 2, 63, 64, 65, 130)), LENGTH - starts[row])
                if num == 0 or (row and _random.random() < 0.3):
                    continue
                taken = [slot for part in parts for slot in (part.slots[1], *(part.midway or ())[:1])]
                free = _random.sample(sorted(set(range(SLOTS)).difference(slots, taken)), 2)
                to = slots[row] if slots[row] is not None and trial % 2 else free[0]
                midway = None if num == 1 or row else (free[1], _random.choice((1, num - 1, _random.randrange(1, num))))
                ids = IDS[row, starts[row] : starts[row] + num]
                parts.append(Part(row, starts[row], ids, (slots[row], to), midway=midway))
            for part, made in zip(parts, steps.run(*parts), strict=True):
                starts[part.row], slots[part.row] = part.start + len(part.ids), part.slots[1]
                hidden += [made] if part.row == 0 else []
                if part.midway and num_midway < 2:
                    slot, after = part.midway
                    assert steps.state(slot) == whole(model, part.start + after)[1]
                    num_midway += 1
        assert torch.equal(torch.cat(hidden), expected)
        assert steps.state(slots[0]) == state


@pytest.mark.in_turns
def test_replays_of_drafts_leave_no_trace(library: Library, shape: Path) -> None:
    """Each step takes in those that were right, also into the slot that it reads; wrong ones change nothing."""
    model, num_kept_apart = load(shape), 0
    for trial, (begin, end) in enumerate(((1, 40), (50, 80), (120, 140))):
        library.use_threads(1 + trial)
        expected, state = whole(model, end)
        steps, at = Steps(model), begin
        hidden, slot, right = steps.run(Part(1, 0, IDS[0, :at], (None, 0))), 0, 0
        while at + MAX_DRAFTS + 1 < end:
            drafts, to, replays = _random.randrange(MAX_DRAFTS + 1), _random.choice((slot, 1 - slot)), right
            right = _random.randrange(drafts + 1)
            ids = torch.cat((IDS[0, at : at + 1 + right], IDS[1, : drafts - right]))
            mate = Part(2, 0, IDS[1, :70], (None, 7)), Part(1, at, ids, (slot, to), replays, drafts)
            hidden.append(steps.run(*mate[_random.randrange(2) :])[-1][: 1 + right])
            if to != slot and replays:
                assert steps.state(slot) == whole(model, at)[1]
                num_kept_apart += 1
            at, slot = at + 1 + right, to
        hidden += steps.run(Part(1, at, IDS[0, at:end], (slot, slot), right))
        assert torch.equal(torch.cat(hidden), expected)
        assert steps.state(slot) == state
    assert num_kept_apart
