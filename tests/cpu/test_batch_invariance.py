"""The same bits whatever else is in the batch: what the native kernels promise, held exactly, not approximately.

bfloat16 rounds every result to three digits, so a last bit that depends on the batch soon changes a word of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from test_attention import empty_pools, make_batch, make_tables
from transformers import LlamaConfig

from engine.core.budget import Costs, Load, StepTime
from engine.core.rows import Rows
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import PreemptionKind
from engine.core.step import StepPlan, StepResult
from engine.runtime.attention.cpu_native import CpuNativeAttention
from engine.runtime.execution.plain_steps import PlainSteps
from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.load import load_model
from engine.runtime.native.build import Isa, best_isa, machine_isas
from engine.runtime.native.library import Library, choose_kernels, native
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from engine.text.tokenizer_files import load_tokenizer
from tests.cpu.model_driver import Served, make_runner, request, serve, settings
from tests.cpu.native_linears import ISAS, packed
from tests.cpu.tile_model import tiles_in_use

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LENGTH = 700  # positions: nearly three spans
CURIOUS = (0, 1, 15, 16, 127, 128, 129, 255, 256, 257, 500, 511, 512, 699)


@pytest.fixture(scope="module", params=dict.fromkeys((*ISAS, best_isa() or ISAS[0])), ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The library on one instruction set after the other."""
    if request.param is not Isa.AMX and machine_isas():
        choose_kernels(request.param.name.lower())
    with tiles_in_use() if request.param is Isa.AMX else nullcontext(native()) as kernels:
        if kernels is None:
            pytest.skip("no native library and no C compiler")
        assert native() is kernels
        yield kernels
    choose_kernels("auto")


@pytest.fixture(autouse=True)
def library(kernels: Library) -> Iterator[Library]:
    """The same on one thread where a test does not ask for more."""
    num_threads = kernels.num_threads
    kernels.use_threads(1)
    yield kernels
    kernels.use_threads(num_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize(("head_dim", "is_int8"), [(64, False), (64, True), (72, False)])
def test_attention_of_a_position_is_one_result(
    library: Library, head_dim: int, is_int8: bool, window: int | None, dtype: torch.dtype
) -> None:
    """As a row of a whole prompt, of a chunk, as a decode step alone or in a crowd, on one thread or several."""
    torch.manual_seed(3)
    spec = AttentionSpec(6, 2, head_dim, 0.125, window=window, softcap=3.0, sinks=torch.linspace(-1, 1, 6))
    q, k, v = (torch.randn(LENGTH, heads, head_dim).to(dtype) for heads in (6, 2, 2))
    backend = CpuNativeAttention()
    lengths = [(LENGTH, 0), (300, 1), (5, 1), (40, 9), (17, 1), (17, 1)]
    table, *others, friend, friend_too = make_tables(lengths, 16, is_scattered=True)
    pools = empty_pools(backend, spec, 96, 16, torch.int8 if is_int8 else dtype)

    def attend(start: int, stop: int, crowd: bool = False) -> torch.Tensor:
        steps, tables = [(start, stop - start)], [table]
        if crowd:
            steps, tables = [(300, 1), *steps, (5, 1), (40, 9)], [others[0], table, *others[1:]]
            steps += [(340, 1), (550, 1)]  # which begin with blocks of the one looked at
            tables += [table[:20] + friend, table[:33] + friend_too]
        rows = sum(num for _, num in steps)
        at = slice(1, 1 + stop - start) if crowd else slice(0, stop - start)
        batched = [torch.randn(rows, x.shape[1], head_dim).to(dtype) for x in (q, k, v)]
        for mine, x in zip(batched, (q, k, v), strict=True):
            mine[at] = x[start:stop]
        backend.prepare(make_batch(steps, tables, 16))
        return backend.attend(spec, *batched, *pools)[at]

    library.use_threads(2)
    whole = attend(0, LENGTH)
    for num_threads in (1, 3):
        library.use_threads(num_threads)
        assert torch.equal(attend(0, LENGTH), whole)
        assert torch.equal(attend(130, 430), whole[130:430])
        for position in CURIOUS:
            assert torch.equal(attend(position, position + 1), whole[position : position + 1]), position
            assert torch.equal(attend(position, position + 1, crowd=True), whole[position : position + 1]), position


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (72, 1528)])
def test_a_linears_row_is_one_result(library: Library, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x = torch.randn(67, shape[1]).to(dtype)
    linear = packed(library, torch.randn(shape).to(dtype))
    whole = linear(x)
    for start, stop in ((0, 1), (66, 67), (3, 5), (10, 27), (0, 64)):
        library.use_threads(1 + start % 2)
        assert torch.equal(linear(x[start:stop]), whole[start:stop])


def know(times: StepTime, load: Load, seconds: float) -> None:
    """Steps take long with prompts, whatever they took."""
    times.costs, times._num_chunks = Costs(fixed_s=0.01, decode_s=0.001, token_s=0.002), 100


def noting(computed: list[StepPlan]) -> Callable[[PlainSteps, StepPlan, Rows], StepResult]:
    """PlainSteps.compute, which notes its plans."""
    compute = PlainSteps.compute

    def note(steps: PlainSteps, plan: StepPlan, rows: Rows) -> StepResult:
        computed.append(plan)
        return compute(steps, plan, rows)

    return note


@pytest.fixture(scope="module")
def model(kernels: Library, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """The default model with the best kernels, and a small one with others, which are slower."""
    config = EngineConfig(model=str(find_model(None).path))
    if kernels.isa is not best_isa():
        folder = tmp_path_factory.mktemp("small")
        LlamaConfig(**SMALL).save_pretrained(folder)
        config = EngineConfig(model=str(folder), load_format="dummy")
    return load_model(config, torch.device("cpu"), torch.bfloat16, lambda progress: None)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=["", "int8"])
def test_bfloat16_text_is_the_same_alone_busy_chunked_preempted_swapped_and_on_a_hit(
    model: CausalLM, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepTime, "observe", know)
    tokenizer = load_tokenizer(str(Path(find_model(None).path)))
    texts = [
        "Once upon a time",
        "The capital of France is",
        "1, 2, 3, 4,",
        "In the beginning there were " + "many " * 20,
    ]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    asked = [
        request(f"{i}-{kind}", prompt, max_tokens=9, seed=i, temperature=temperature, n=n)
        for i, prompt in enumerate(prompts)
        for kind, temperature, n in (("greedy", 0.0, 1), ("sampled", 1.0, 2))
    ]
    alone = {}
    for one in asked:
        alone |= serve(model, settings(), [one], runner=make_runner(model, settings(), kv_dtype=kv_dtype)).ids
    assert len(alone) == 12
    computed = list[StepPlan]()
    monkeypatch.setattr(PlainSteps, "compute", noting(computed))
    mate = request("mate", prompts[0], max_tokens=4, logprobs=1)  # steps with it are not plain
    regimes = {
        "busy": settings(max_num_seqs=12),
        "chunked": settings(max_num_batched_tokens=16),
        "preempting": settings(num_blocks=16, max_num_seqs=12),
        "swapping": settings(num_blocks=16, max_num_seqs=12, num_host_blocks=60),
        "uncached": settings(enable_prefix_caching=False),
    }
    for depth, (name, config) in enumerate(regimes.items()):
        scheduler, runner = Scheduler(config), make_runner(model, config, kv_dtype=kv_dtype)
        computed.clear()
        served = serve(model, config, [*asked, mate], depth=depth % 2, apart=1, scheduler=scheduler, runner=runner)
        assert {key: ids for key, ids in served.ids.items() if key != ("mate", 0)} == alone, name
        assert 0 < len(computed) < scheduler.stats.steps
        preempted = scheduler.stats.preempted
        assert (preempted[PreemptionKind.RECOMPUTE] > 0) == name.startswith("preempting")
        assert (preempted[PreemptionKind.SWAP] > 0) == (name == "swapping")


def test_of_a_plain_step_the_row_that_is_not_finite_fails_alone(model: CausalLM) -> None:
    asked = [request(str(first), range(first, first + 20), max_tokens=6) for first in (300, 400)]
    well = serve(model, settings(), asked)
    scheduler, runner, served = Scheduler(settings()), make_runner(model, settings()), Served()
    for one in asked:
        scheduler.add(one)
    blocks: list[int] = []
    while (plan := scheduler.plan(0.0)) is not None:
        blocks = blocks or list(scheduler.running[0].kv.tables[0][:5])
        runner.blocks[0][blocks if plan.slots else []] = torch.nan
        step = runner.run(plan)
        assert isinstance(step, StepResult)
        served.take(scheduler.commit(plan, step.wait(), 0.0))
    assert served.ids == {("300", 0): well.ids["300", 0][:1], ("400", 0): well.ids["400", 0]}
    error = served.events["300", 0][-1].error
    assert error is not None
    assert "not a finite number" in error.sentence


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=["", "int8"])
def test_bfloat16_text_is_the_same_after_a_prefix_was_found(model: CausalLM, kv_dtype: torch.dtype) -> None:
    config = settings(block_size=32, num_blocks=24)
    first = [(7 * i) % 1000 + 300 for i in range(100)]
    prompts = [first, [*first[:55], 11, 12, 13], first[:41], [*first[:90], *range(500, 540)]]
    asked = [request(str(i), prompt, seed=i, temperature=0.7, logprobs=1) for i, prompt in enumerate(prompts)]
    scheduler, runner = Scheduler(config), make_runner(model, config, kv_dtype=kv_dtype)
    for one, num_cached in zip(asked, (0, 32, 32, 64), strict=True):
        alone = serve(model, config, [one], runner=make_runner(model, config, kv_dtype=kv_dtype))
        served = serve(model, config, [one], scheduler=scheduler, runner=runner)
        events = served.events[one.request_id, 0]
        assert events[0].prompt is not None
        assert events[0].prompt.num_cached_tokens == num_cached
        assert served.ids == alone.ids
        assert [event.logprobs for event in events] == [e.logprobs for e in alone.events[one.request_id, 0]]
