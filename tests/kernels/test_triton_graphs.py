"""Decode steps as graphs against the same steps one kernel after the other: tokens, log probabilities, every regime.

Without a device a graph is its computation, run as it is: what is checked then is all but the recording itself.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.rows import Rows, SequenceSlice
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import RowStart, Sample, StepPlan
from engine.core.types import Progress, Request, SamplingParams, TokenEvent, TokenLogprob
from engine.runtime.attention.backend import Batch
from engine.runtime.attention.triton_paged import TritonPagedAttention
from engine.runtime.execution import decode_graphs
from engine.runtime.execution.decode_graphs import (
    DecodeGraphs,
    DecodeInputs,
    Outputs,
    graph_sizes,
    long_graph_sizes,
    longest_context,
)
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.pool import groups
from engine.runtime.pool.batch import DecodeRows
from engine.runtime.pool.row_tables import Changes, RowTables
from engine.runtime.sampling import sampler
from engine.runtime.sampling.sampler import Sampler, is_plain
from engine.runtime.transfer import Drawn
from tests.cpu.model_driver import Poisoner, TinyModel, make_runner, request, serve, settings
from tests.cpu.test_constraint import StepGrammar

# Rows of nobody have no keys, and no result: 0 / 0, which NumPy would warn of.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODEL = TinyModel(device=DEVICE)
_random = random.Random(11)
PROMPTS = [[_random.randrange(MODEL.vocab_size) for _ in range(length)] for length in (1, 6, 11, 7, 3)]
# What a graph draws by itself, and what it does not.
GREEDY: list[dict] = [{}] * 5
WISHES: list[dict] = [
    {},
    {"temperature": 0.9, "seed": 2**64 - 3, "min_p": 0.02},
    {"temperature": 1.0, "seed": 7, "top_p": 0.7, "n": 2},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logprobs": 2},
    {
        "temperature": 0.7,
        "seed": 1,
        "top_k": 5,
        "logit_bias": ((3, 2.0),),
        "bad_words": ((4,), *((a, 9) for a in range(61))),
    },
]


def asked(wishes: list[dict]) -> list[Request]:
    return [
        request(f"r{i}", prompt, max_tokens=8, **wish)
        for i, (prompt, wish) in enumerate(zip(PROMPTS, wishes, strict=False))
    ]


def with_graphs(config: SchedulerConfig) -> ModelRunner:
    runner = make_runner(MODEL, config, "triton", device=DEVICE)
    told: list[Progress] = []
    runner.capture(told.append)
    assert [progress.total for progress in told] == [len(graph_sizes(config.max_num_seqs))] * len(told)
    assert told[-1].done == told[-1].total
    return runner


def logprobs(events: list[TokenEvent]) -> list[TokenLogprob]:
    return [entry for event in events for entry in event.logprobs or ()]


@pytest.mark.parametrize(
    ("regime", "wishes", "depth"),
    [({}, GREEDY, 1), ({}, WISHES, 0), ({"num_blocks": 12, "max_num_batched_tokens": 9}, WISHES, 1)],
    ids=["greedy", "mixed", "tiny_pool_chunked"],
)
def test_a_graph_says_what_the_steps_say(regime: dict, wishes: list[dict], depth: int) -> None:
    config = settings(max_num_seqs=6, **regime)
    expected = serve(
        MODEL, config, asked(wishes), depth=depth, apart=0, runner=make_runner(MODEL, config, device=DEVICE)
    )
    scheduler, launched = Scheduler(config), []
    runner = with_graphs(config)
    launch = DecodeGraphs.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DecodeGraphs, "launch", lambda self, rows: (launched.append(rows.fields.shape[1]), launch(self, rows))[1]
        )
        served = serve(MODEL, config, asked(wishes), depth=depth, apart=0, scheduler=scheduler, runner=runner)
    assert served.ids == expected.ids
    assert len(launched) > 5
    if regime:
        assert scheduler.stats.preemptions > 0
    for key, events in served.events.items():
        for ours, others in zip(logprobs(events), logprobs(expected.events[key]), strict=True):
            assert ours.logprob == pytest.approx(others.logprob, abs=1e-4)


@pytest.mark.parametrize("depth", [0, 1])
def test_layers_with_windows_have_tables_of_their_own(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "TILE_KEYS", 64)  # as many as these kernels take
    windows = groups.group_layers(MODEL.states, MODEL.dtype, 256).windows
    assert windows == (24 + 63,)
    requests = [request(f"r{length}", [length % 61] * length, max_tokens=12) for length in (100, 88, 3)]
    plain = settings(max_num_seqs=3, max_num_batched_tokens=60)
    expected = serve(MODEL, plain, requests, depth=depth, runner=make_runner(MODEL, plain, device=DEVICE))
    config = replace(plain, windows=windows)
    scheduler = Scheduler(config)
    runner = Poisoner(with_graphs(config), scheduler)
    served = serve(MODEL, config, requests, depth=depth, scheduler=scheduler, runner=runner)  # type: ignore[arg-type]
    assert served.ids == expected.ids


def test_only_rows_that_ask_for_more_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside them, what the graph has drawn for the others stands; with a grammar as well, and one that fails."""
    wishes = [
        {},
        {"temperature": 1.0, "seed": 5, "grammar": StepGrammar(reach=3)},
        {"temperature": 0.8, "seed": 6},
        {"temperature": 1.0, "seed": 7, "grammar": StepGrammar(fails_at=4)},
        {"repetition_penalty": 1.4, "logprobs": 2},
    ]
    config = settings(max_num_seqs=6)
    expected = serve(MODEL, config, asked(wishes), depth=1, apart=0, runner=make_runner(MODEL, config, device=DEVICE))
    runner, drawn = with_graphs(config), []
    draw, prepare = sampler.draw, DecodeGraphs.prepare

    def note(logits: Tensor, *args: object) -> Drawn:
        drawn.append(len(logits))
        return draw(logits, *args)

    def note_launch(self: DecodeGraphs, slices: list[SequenceSlice], changes: Changes) -> DecodeRows:
        drawn.append(-sum(not is_plain(piece) for piece in slices))
        return prepare(self, slices, changes)

    monkeypatch.setattr(sampler, "draw", note)
    monkeypatch.setattr(DecodeGraphs, "prepare", note_launch)
    served = serve(MODEL, config, asked(wishes), depth=1, apart=0, runner=runner)
    assert served.ids == expected.ids
    assert {key: len(logprobs(events)) for key, events in served.events.items()} == {
        key: len(logprobs(events)) for key, events in expected.events.items()
    }
    launches = [at for at, num in enumerate(drawn) if num < 0]
    assert len(launches) > 5
    assert all(drawn[at + 1] == -drawn[at] for at in launches)


def test_filters_are_part_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn again behind it."""
    wishes = [
        {"temperature": 1.1, "seed": 3, "top_p": 0.8},
        {"temperature": 0.9, "seed": 4, "top_k": 4},
        {"temperature": 1.4, "seed": 5, "top_k": 2**70, "top_p": 0.9, "min_p": 0.01},
        {},
    ]
    config = settings(max_num_seqs=4)
    expected = serve(MODEL, config, asked(wishes), depth=1, apart=0, runner=make_runner(MODEL, config, device=DEVICE))
    runner, calls = with_graphs(config), []
    for owner, name in ((DecodeGraphs, "launch"), (Sampler, "sample")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, c=call, n=name: (calls.append(n), c(*args))[1])
    served = serve(MODEL, config, asked(wishes), depth=1, apart=0, runner=runner)
    assert served.ids == expected.ids
    assert "launch" in calls
    assert "sample" not in calls[calls.index("launch") :]


def test_long_contexts_have_graphs_that_are_cut_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many splits as a graph for short contexts has would leave a long one to a few programs."""
    monkeypatch.setattr(decode_graphs, "_PLANNED_CONTEXT", 16)
    config = settings(max_num_seqs=5)
    planned, launched = [], []
    prepare, launch = TritonPagedAttention.prepare, DecodeGraphs.launch

    def note(self: TritonPagedAttention, batch: Batch) -> None:
        planned.append((batch.context_lens_host[0], len(batch.context_lens_host)))
        prepare(self, batch)

    def note_launch(self: DecodeGraphs, rows: DecodeRows) -> Outputs:
        planned.clear()
        outputs = launch(self, rows)
        launched.append((longest_context(rows), rows.fields.shape[1], *planned[0]))
        return outputs

    expected = serve(MODEL, config, asked(GREEDY), depth=1, apart=0, runner=make_runner(MODEL, config, device=DEVICE))
    runner = make_runner(MODEL, config, "triton", device=DEVICE)
    told: list[Progress] = []
    runner.capture(told.append)
    assert told[-1].done == len(graph_sizes(5)) + len(long_graph_sizes(5))
    if DEVICE.type == "cpu":  # where a graph is its computation
        monkeypatch.setattr(TritonPagedAttention, "prepare", note)
        monkeypatch.setattr(DecodeGraphs, "launch", note_launch)
    served = serve(MODEL, config, asked(GREEDY), depth=1, apart=0, runner=runner)
    assert served.ids == expected.ids
    if DEVICE.type == "cpu":
        for context, num_rows, planned_context, size in launched:
            assert planned_context == (16 if context <= 16 else config.max_model_len)
            assert size == min(n for n in (graph_sizes(5) if context <= 16 else long_graph_sizes(5)) if n >= num_rows)
        assert {context <= 16 for context, *_ in launched} == {True, False}


def test_rows_of_nobody_leave_no_trace() -> None:
    runner = with_graphs(settings(max_num_seqs=8))
    tensors = [*runner._kv_cache._keys.values(), *runner._kv_cache._values.values(), runner._last_ids[:8]]
    for tensor in tensors:
        tensor.fill_(3)
    with torch.inference_mode():
        runner._graphs._sets[0].replays[8]()
    assert all(bool((tensor == 3).all()) for tensor in tensors)


def test_a_table_that_found_no_memory_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is taken back comes again."""
    tables, table = RowTables(settings()), (5, 3, 1)
    inputs = DecodeInputs(settings(), DEVICE, tables)
    row = RowStart(0, 0, 8, SamplingParams(max_tokens=1), 0, (0,) * 9, (table,))
    plan = StepPlan(0, slots=(0,), positions=(8,), rows=(row,))
    slices, changes = Rows().follow(plan), tables.follow(plan)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(decode_graphs, "to_device", fail)
        with pytest.raises(torch.OutOfMemoryError):
            inputs.send(inputs.prepare(slices, changes))
    inputs.send(inputs.prepare(slices, changes))
    batch, _, _ = inputs.compute(1, 64, torch.zeros(9, dtype=torch.int64, device=DEVICE))
    assert batch.block_tables[0, :3].tolist() == [*table]


def test_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(300)[-4:] == [256, 272, 288, 300]
    assert long_graph_sizes(1) == [1]
    assert long_graph_sizes(5) == [1, 2, 4, 5]
    assert long_graph_sizes(256) == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_no_graph_knows_adapters() -> None:
    class Other:
        name, digest = "other", b""

    graphs = DecodeGraphs.__new__(DecodeGraphs)
    for adapter in (None, Other()):
        params = SamplingParams(max_tokens=1, adapter=adapter)
        piece = SequenceSlice(0, 0, 1, params, [1], (Sample(0, 0),), 0, 1)
        assert graphs.takes([piece]) == (adapter is None)
