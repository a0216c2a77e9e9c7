"""What a card's memory goes to, which cards are refused, and what their faults become: on a card that is made up.

No CUDA device takes part: torch.cuda's readings are those of a `Card`, and a runner takes from it what a test says.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError, DeviceLostError, DeviceMemoryError, MemoryBudgetError
from engine.core.step import StepPlan, StepResult
from engine.core.types import Progress
from engine.runtime.cuda.device import check_device, explain_absence
from engine.runtime.execution import device
from engine.runtime.execution.device import resolve_device
from engine.runtime.execution.device_memory import (
    CudaMemory,
    full_steps,
    measure_memory,
    other_steps,
)
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.execution.synthetic import warm_up_plan
from engine.runtime.guard import guard_cuda, to_fault
from engine.settings.engine_config import EngineConfig
from engine.startup.build import _warm_up_cuda
from engine.startup.parts import Parts
from engine.startup.sizes import pool_budget
from loadtest.fake_runner import FakeRunner, FakeStep

GIB, SEGMENT = 1 << 30, 2 << 20
CUDA = torch.device("cuda", 0)
CONFIG = SchedulerConfig(num_blocks=20, block_size=16, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64)


class Card:
    """80 GiB, of which another process holds 3 GiB and CUDA itself half a GiB; weights take 10, and torch keeps a cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.others = 80 * GIB, 7 * GIB // 2
        self.held = 10 * GIB  # by tensors and graphs that live
        self.cached = GIB  # reserved by torch and free
        self.driver = 0  # what graphs take beside torch
        self.peak = 0
        self.fraction = 1.0
        self.capability, self.archs = (9, 0), ["sm_75", "sm_80", "sm_90", "compute_120"]
        for name in (
            "empty_cache", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats", "mem_get_info",
            "set_per_process_memory_fraction", "get_device_capability", "get_device_name", "get_arch_list", "synchronize",
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def take(self, size: int, *, lasting: bool = False) -> None:
        """Have tensors take some bytes, out of the cache as far as it goes, and for good or for a moment."""
        free = self.mem_get_info()[0]
        self.cached += min(max(size - self.cached, 0), free)
        if size > self.cached:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total of 80 GiB.")
        self.peak = max(self.peak, self.memory_reserved())
        if lasting:
            self.held += size
            self.cached -= size

    def empty_cache(self) -> None:
        self.cached = 0

    def memory_reserved(self, device: object = None) -> int:
        return self.held + self.cached

    def max_memory_reserved(self, device: object = None) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self.peak = self.memory_reserved()

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return self.total - self.others - self.memory_reserved() - self.driver, self.total

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device | None = None) -> None:
        if device is not None and device.index is None:
            raise ValueError("Expected a torch.device with a specified index")  # as torch's own does
        self.fraction = fraction

    def get_device_capability(self, device: object) -> tuple[int, int]:
        return self.capability

    def get_device_name(self, device: object) -> str:
        return "Imaginary GPU"

    def get_arch_list(self) -> list[str]:
        return self.archs

    def synchronize(self, device: object) -> None:
        pass


class Taker:
    """A runner that takes memory: a pool and more for as long as it lives, and some for each step; graphs are kept as well."""

    def __init__(self, card: Card, *, pool: int = GIB, step: int = 2 * GIB, beside: int = 0) -> None:
        self.card, self.pool, self.step, self.beside = card, pool, step, beside
        self.blocks = [SimpleNamespace(nbytes=pool // 2)] * 2
        self.plans: list[StepPlan] = []
        self.graphs = 0
        card.take(pool + beside, lasting=True)

    def run(self, plan: StepPlan) -> FakeStep:
        self.plans.append(plan)
        self.card.take(self.step if len(self.plans) > 1 else self.step // 2)  # the second kind of step is the larger
        return FakeStep(StepResult([]), lambda: None)

    def capture(self, report: object) -> None:
        self.graphs = GIB // 2
        self.card.take(self.graphs, lasting=True)
        self.card.driver += GIB // 4

    def close(self) -> None:
        self.card.held -= self.pool + self.beside + self.graphs
        self.card.cached += self.pool + self.beside + self.graphs
        self.card.driver -= GIB // 4 if self.graphs else 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    return Card(monkeypatch)


def measure(card: Card, share: float = 0.75, captures: bool = False, **taker: int) -> CudaMemory:
    return measure_memory(
        lambda config: Taker(card, **taker),  # type: ignore[arg-type,return-value]  # as much of a runner as is asked for
        CONFIG,
        CUDA,
        share=share,
        num_tensors=4,
        vocab_size=96,
        captures=captures,
    )


def warm_up(runner: Taker, captures: bool, **settings: object) -> list[Progress]:
    report: list[Progress] = []
    config = EngineConfig(model="", **settings)  # type: ignore[arg-type]  # mixed value types
    model = SimpleNamespace(vocab_size=96)
    _warm_up_cuda(Parts(config, report.append, CUDA, model, captures=captures), runner, CONFIG)  # type: ignore[arg-type]
    return report


# -- the budget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("captures", [False, True])
def test_the_pool_is_what_others_weights_steps_and_graphs_leave_of_the_share(card: Card, captures: bool) -> None:
    memory = measure(card, captures=captures)
    graphs = 3 * GIB // 4 if captures else 0
    assert memory == CudaMemory(80 * GIB, 60 * GIB, 7 * GIB // 2, 10 * GIB, 2 * GIB, graphs, 4 * SEGMENT)
    assert memory.pool == 60 * GIB - 7 * GIB // 2 - 10 * GIB - 2 * GIB - graphs - 4 * SEGMENT
    assert (card.held, card.cached, card.driver) == (10 * GIB, 0, 0), "only the model is left behind"


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("beside", [0, 5 * GIB])
def test_with_that_pool_the_gpu_is_used_within_a_percent_of_the_share(
    card: Card, share: float, captures: bool, beside: int
) -> None:
    """Also where a runner keeps more than its pool: of recurrent layers the inputs of drafts, of a head its states."""
    memory = measure(card, share, captures, beside=beside)
    pool = memory.pool + 4 * SEGMENT // 2  # half of each tensor's last segment is not used
    runner = Taker(card, pool=pool, beside=beside)
    report = warm_up(runner, captures, gpu_memory_utilization=share)
    assert bool(runner.graphs) == captures
    used = 80 * GIB - torch.cuda.mem_get_info(CUDA)[0]
    assert share - 0.01 <= used / (80 * GIB) <= share
    (told,) = report
    assert told.stage == "memory"
    assert told.detail.startswith(f"{used / GIB:.2f} of 80.00 GiB in use ({used / 80 / GIB:.1%})")
    others = 3.5 + (0.25 if captures else 0.0)
    assert card.fraction == pytest.approx(min(share + 0.01, 1.0) - others / 80)


def test_the_account_names_every_number(card: Card) -> None:
    assert str(measure(card, captures=True)) == (
        "of 80.00 GiB, 60.00 may be used: weights 10.00, a full step 2.00, CUDA graphs 0.75, other processes and CUDA "
        "itself 3.50, which leaves 43.74 for K/V"
    )


@pytest.mark.parametrize(("fewer", "captures"), [(0, True), (5 * GIB, True), (5 * GIB, False)])
def test_the_pool_is_sized_by_the_rank_with_least_room(card: Card, fewer: int, captures: bool) -> None:
    """What another rank's GPU lacks is left free on this one, since all ranks have as many blocks."""
    ranks = SimpleNamespace(least_room=lambda room: room - fewer)
    model = SimpleNamespace(vocab_size=96, states=[], dtype=torch.float32, max_model_len=512)
    config = EngineConfig(model="", gpu_memory_utilization=0.75)
    parts = Parts(config, lambda _: None, CUDA, model, captures=captures, ranks=ranks)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "make_runner", lambda _, config: Taker(card))
        found = pool_budget(parts, CONFIG, 0)
    assert found.num_bytes == measure(card, captures=captures).pool + 4 * SEGMENT - fewer
    assert ("less on another rank 5.00, which leaves" in found.account) == bool(fewer)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ranks_of_a_cpu_share_one_memory(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.startup.sizes.default_cpu_budget", lambda: GIB)
    config = EngineConfig(model="", tensor_parallel_size=num_ranks)
    parts = SimpleNamespace(config=config, device=torch.device("cpu"), model=None, bytes_per_block=GIB)
    assert pool_budget(parts, CONFIG, 0).num_bytes == GIB // num_ranks  # type: ignore[arg-type]


def test_a_share_that_is_used_up_leaves_less_than_nothing(card: Card) -> None:
    memory = measure(card, 0.1)
    assert memory.pool < 0
    assert str(memory).endswith("which leaves 0.00 for K/V")


def test_a_step_too_large_for_the_gpu_is_told(card: Card) -> None:
    with pytest.raises(
        MemoryBudgetError,
        match=r"A step of 64 tokens of 4 sequences does not fit .* weights \(10\.00 GiB\) .* lower --max-num-batched-tokens",
    ):
        measure(card, step=90 * GIB)


def test_a_step_too_large_for_what_the_pool_leaves_is_told(card: Card) -> None:
    with pytest.raises(MemoryBudgetError, match=r"does not fit beside weights and KV pool: .* of 80\.00 GiB of cuda"):
        warm_up(Taker(card, pool=66 * GIB), captures=False, kv_cache_memory_bytes=66 * GIB)
    assert card.fraction == 1.0, "a pool that was asked for in bytes is held to no share"


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len"), [(4, 64, 512), (1, 512, 40), (3, 100, 8), (7, 7, 64)]
)
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_full_steps_are_the_largest_that_the_scheduler_may_plan(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int
) -> None:
    config = SchedulerConfig(
        num_blocks=64,
        block_size=4,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=num_drafts,
    )
    crowd, scored = full_steps(config, vocab_size=8)
    assert len(crowd.rows) == crowd.num_slices == max_num_seqs
    num_draws = sum(len(piece.samples) for piece in crowd.chunks)
    assert crowd.num_samples == num_draws == max_num_seqs * (1 + num_drafts)
    assert crowd.num_tokens == min(max_num_batched_tokens, max_num_seqs * max_model_len)
    assert scored.num_tokens == min(max_num_batched_tokens, max_model_len)
    assert [piece.prompt_logprobs for piece in scored.chunks] == [0]
    for plan in (crowd, scored):
        assert sum(piece.num_tokens for piece in plan.chunks) == plan.num_tokens
        assert all(piece.num_tokens <= max_model_len for piece in plan.chunks)
        FakeRunner(config).run(plan).wait()


def test_steps_of_whole_texts_have_no_rest_of_one() -> None:
    """An encoder finds out where a text begins by its first position."""
    assert [plan.num_tokens for plan in other_steps(CONFIG)] == [8, 64]
    assert not other_steps(replace(CONFIG, whole_step=64))


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(20, 4), (12, 4), (11, 3), (3, 1)])
def test_rows_write_their_states_to_blocks_of_their_own(num_blocks: int, num_slots: int) -> None:
    """As far as a pool goes; beyond, to the same pieces of the same slots, whose numbers have the same type."""
    config = replace(CONFIG, num_blocks=num_blocks, state_blocks=3)
    slots = [move.written for move in warm_up_plan(config, 4, 8).states]
    assert slots == [tuple(range(3 * (at % num_slots), 3 * (at % num_slots) + 3)) for at in range(4)]
    assert not warm_up_plan(CONFIG, 4, 8).states


# -- the card ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_the_device_has_a_number(name: str, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch.cuda.set_per_process_memory_fraction cannot do without."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # not to be left behind
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device(name) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda._utils._get_device_index(torch.device("cuda"))


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_cache_grows_in_place_unless_the_environment_says_otherwise(
    name: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {name: "max_split_size_mb:64"} if name else {}
    monkeypatch.setattr(device.os, "environ", environ)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    resolve_device("cuda")
    expected = {name: "max_split_size_mb:64"} if name else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert environ == expected


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),  # a newer card of the same generation
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "compute_90"], True),  # compiled by the driver
        ((10, 3), ["sm_100a", "sm_120"], False),
        ((9, 0), ["sm_90a"], True),
        ((7, 0), ["sm_75", "sm_80", "compute_80"], False),
        ((9, 0), [], True),
    ],
)
def test_a_card_that_torch_was_not_built_for_is_refused(
    card: Card, capability: tuple[int, int], archs: list[str], runs: bool
) -> None:
    card.capability, card.archs = capability, archs
    if runs:
        check_device(CUDA, torch.float16)
        return
    with pytest.raises(
        ConfigError, match=rf"no kernels for Imaginary GPU \(compute capability {capability[0]}\..*{archs[0]}"
    ):
        check_device(CUDA, torch.float16)


def test_bfloat16_is_refused_where_it_cannot_be_multiplied(card: Card) -> None:
    check_device(CUDA, torch.bfloat16)
    card.capability = (7, 5)
    check_device(CUDA, torch.float16)
    check_device(CUDA, torch.float32)
    with pytest.raises(
        ConfigError, match=r"\(compute capability 7\.5\) cannot multiply bfloat16, .* --dtype to float16"
    ):
        check_device(CUDA, torch.bfloat16)


def test_the_absence_of_a_card_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built without CUDA" in explain_absence()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "made for CUDA 13.0) sees no CUDA device here" in explain_absence()


def test_a_thread_takes_a_step_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS has a handle a thread: the first request would wait for it, and for what it allocates."""
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(
        ModelRunner, "run", lambda self, plan: (calls.append(plan), FakeStep(StepResult([]), lambda: None))[1]
    )
    runner = ModelRunner.__new__(ModelRunner)
    runner._device, runner._config = CUDA, CONFIG
    guard_cuda(runner, CUDA).begin()
    device, plan = calls
    assert device == CUDA
    assert [(piece.num_tokens, len(piece.samples)) for piece in plan.chunks] == [(2, 1)], "no graph takes it"  # type: ignore[attr-defined]
    runner._device = torch.device("cpu")
    runner.begin()
    assert len(calls) == 2


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
            DeviceMemoryError,
            "CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors ..."), DeviceMemoryError, "CUDA error: out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), DeviceMemoryError, "CUBLAS"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), DeviceMemoryError, "out of memory"),
        (
            torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."),
            DeviceLostError,
            "the CUDA device is lost: CUDA error: an illegal memory access was encountered",
        ),
        (RuntimeError("CUDA error: unspecified launch failure"), DeviceLostError, "unspecified launch failure"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), DeviceLostError, "illegal"),
        (RuntimeError("The size of tensor a (3) must match"), RuntimeError, "The size of tensor a (3) must match"),
    ],
)  # fmt: skip
def test_an_error_of_torchs_becomes_the_engines(error: RuntimeError, kind: type[Exception], told: str) -> None:
    fault = to_fault(error)
    assert type(fault) is kind
    assert told in str(fault)
    assert "\n" not in str(fault)


class Faulty(FakeRunner):
    """Raises in run or in wait, with a large tensor on its stack."""

    def __init__(self, error: RuntimeError, *, late: bool) -> None:
        super().__init__(CONFIG)
        self.error, self.late = error, late
        self.tensor: weakref.ref[torch.Tensor] | None = None
        self.closed = False

    def run(self, plan: StepPlan) -> FakeStep:
        if self.late:
            return FakeStep(StepResult([]), self.fail)
        self.fail()
        raise AssertionError

    def fail(self) -> None:
        hidden = torch.empty(1000)
        self.tensor = weakref.ref(hidden)
        raise type(self.error)(*self.error.args)  # a new one: this one would keep its traceback

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("late", [False, True], ids=["run", "wait"])
def test_a_step_out_of_memory_holds_on_to_nothing(card: Card, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the cache is emptied, the tensors of the step that failed must be gone."""
    inner = Faulty(torch.OutOfMemoryError("CUDA out of memory."), late=late)
    runner = guard_cuda(inner, CUDA)
    alive: list[bool] = []
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: alive.append(inner.tensor is not None and inner.tensor() is not None)
    )
    gc.disable()
    try:
        with pytest.raises(DeviceMemoryError, match="CUDA out of memory") as caught:
            runner.run(warm_up_plan(CONFIG, 2, 8)).wait()
    finally:
        gc.enable()
    assert caught.value.__context__ is None
    assert alive == [False]
    runner.close()
    assert inner.closed


@pytest.mark.parametrize("late", [False, True], ids=["run", "wait"])
def test_a_lost_device_is_left_alone(card: Card, late: bool) -> None:
    inner = Faulty(torch.AcceleratorError("CUDA error: unspecified launch failure"), late=late)
    runner = guard_cuda(inner, CUDA)
    with pytest.raises(DeviceLostError, match="the CUDA device is lost: CUDA error: unspecified launch failure"):
        runner.run(warm_up_plan(CONFIG, 2, 8)).wait()
    runner.close()
    assert not inner.closed


def test_a_device_that_is_lost_while_memory_is_freed_is_lost(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(device: object) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", lose)
    runner = guard_cuda(Faulty(torch.OutOfMemoryError("CUDA out of memory."), late=False), CUDA)
    with pytest.raises(DeviceLostError):
        runner.run(warm_up_plan(CONFIG, 2, 8))
