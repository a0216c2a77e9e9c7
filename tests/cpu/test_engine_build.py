"""The wiring: what is decided where the user left it open, what is refused, and an engine that answers."""

from __future__ import annotations

import json
import queue
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.arbiter import Arbiter
from engine.core.config import DraftCosts, SchedulerConfig
from engine.core.errors import AdapterConflictError, ConfigError, MemoryBudgetError, ModelLoadError
from engine.core.page_table import blocks_for
from engine.core.types import FinishReason, Progress, Request, SamplingParams, StepEvents
from engine.loop import Engine
from engine.overload import QueueLimits
from engine.runtime.attention.torch_paged import TorchPagedAttention
from engine.runtime.execution.device_memory import CudaMemory, full_steps, other_steps
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.models.load import load_model
from engine.runtime.native.build import tiles_fit
from engine.runtime.native.library import Library, native
from engine.runtime.pool.pool_size import PoolSize, fit_pool
from engine.settings.engine_config import EngineConfig, LoraModule
from engine.startup import build as build_module
from engine.startup import speculation
from engine.startup.build import build_engine
from engine.startup.parts import Parts
from engine.startup.sizes import pool_budget
from tests.cpu import test_models_families
from tests.cpu.lora_folders import save_adapter
from tests.free_drafts import FREE_DRAFTS
from tests.patience import PATIENCE_S

in_blocks = partial(blocks_for, block_size=16)

GIB = 1 << 30
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, KV heads, head size, tokens, float32


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A config.json alone, which is all that dummy weights need."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_load_beside_steps_leaves_the_team_to_them(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another caller of the library would compute alone while the team packs."""
    if native() is None:
        pytest.skip("no native library and no C compiler")
    said: list[bool] = []
    monkeypatch.setattr(Library, "stay_aside", lambda _, stays: said.append(stays))
    for is_alive in (False, True):
        monkeypatch.setattr(Arbiter, "is_alive", is_alive)
        config = EngineConfig(model=folder, load_format="dummy", device="cpu", num_threads=1)
        build_engine(config, lambda _: None, arbiter=Arbiter()).stop(0.0)
    assert said == [False, True]


@pytest.mark.parametrize(("numa", "num_times"), [("distribute", 1), ("numactl", 0)])
def test_pages_are_on_all_nodes_unless_another_program_says_where(
    numa: str, num_times: int, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, told = list[int](), list[Progress]()
    monkeypatch.setattr(build_module, "spread_pages", lambda: asked.append(0) or 2)
    build(folder, told, numa=numa)
    assert len(asked) == num_times
    assert [each.detail for each in told].count("pages in turns on 2 nodes") == num_times


def build(folder: str, report: list[Progress] | None = None, **changes: object) -> Engine:
    fields = {"model": folder, "load_format": "dummy", "dtype": "float32", "device": "cpu", "num_threads": 1} | changes
    told: list[Progress] = [] if report is None else report
    return build_engine(EngineConfig(**fields), told.append)  # type: ignore[arg-type]  # mixed value types


def test_what_was_left_open_is_decided(folder: str) -> None:
    report: list[Progress] = []
    engine = build(folder, report)
    config = engine.config
    tokens = 1024 if tiles_fit() else 512
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (128, tokens, 512)
    assert config.num_blocks == 128 * 512 // 16  # no more than all sequences could ever need
    assert engine.facts.vocab_size == 96
    stages = list(dict.fromkeys(progress.stage for progress in report))
    assert stages[-2:] == ["kv_pool", "warm_up"]
    (pool,) = [progress.detail for progress in report if progress.stage == "kv_pool"]
    assert re.match(r"4096 blocks of 16 tokens, [\d.]+ [KMG]iB; ", pool)
    assert pool.endswith("contexts up to 512 tokens (--max-model-len auto: the model's own limit)")


def test_what_was_asked_for_is_done(folder: str) -> None:
    before, library = torch.get_num_threads(), native()
    try:
        engine = build(
            folder,
            block_size=32,
            max_model_len=256,
            max_num_seqs=3,
            max_num_batched_tokens=9,
            enable_prefix_caching=False,
            scheduling_policy="priority",
            kv_cache_memory_bytes=10 * 2 * BLOCK_BYTES,
            attention_backend="torch",
            async_scheduling=True,
            num_threads=before + 1,
            max_num_queued_reqs=5,
            max_num_queued_tokens=77,
        )
        assert (torch.get_num_threads() if library is None else library.num_threads) == before + 1
    finally:
        torch.set_num_threads(before)
        if library is not None:
            library.use_threads(before)
    assert engine.config == SchedulerConfig(
        num_blocks=10,
        block_size=32,
        max_model_len=256,
        max_num_seqs=3,
        max_num_batched_tokens=9,
        enable_prefix_caching=False,
        policy="priority",
    )
    assert (engine._depth, engine._overload._limits) == (1, QueueLimits(5, 77))
    assert isinstance(engine._runner, ModelRunner)
    assert isinstance(engine._runner._kv_cache._backends[0], TorchPagedAttention)


def test_one_batch_limit_yields_to_the_other(folder: str) -> None:
    few = build(folder, max_num_batched_tokens=16).config
    assert (few.max_num_seqs, few.max_num_batched_tokens) == (16, 16)
    many = build(folder, max_num_seqs=1100).config
    assert (many.max_num_seqs, many.max_num_batched_tokens) == (1100, 1100)


def test_a_small_pool_shortens_the_context_and_says_so(folder: str) -> None:
    report: list[Progress] = []
    engine = build(folder, report, kv_cache_memory_bytes=5 * BLOCK_BYTES + 7)
    assert (engine.config.num_blocks, engine.config.max_model_len) == (5, 80)
    told = "up to 80 tokens (--max-model-len auto: as many as the pool holds; the model's own limit is 512)"
    assert any(told in progress.detail for progress in report)


def test_layers_with_windows_alone_serve_contexts_that_the_pool_does_not_hold(folder: str) -> None:
    """Unless what is below the pool, or a draft model, needs every position."""
    config = Path(folder) / "config.json"
    values = json.loads(config.read_text()) | {"model_type": "mistral", "sliding_window": 8}
    config.write_text(json.dumps(values))
    report: list[Progress] = []
    engine = build(folder, report, kv_cache_memory_bytes=20 * BLOCK_BYTES, max_num_seqs=4, max_num_batched_tokens=64)
    assert (engine.config.num_blocks, engine.config.max_model_len) == (20, 512)
    assert any("20 blocks of 16 tokens of the layers' window (0% of" in progress.detail for progress in report)
    assert list(engine.stats.findable_blocks) == ["window 135"]
    asked = Request(
        request_id="r",
        prompt=tuple(position % 90 for position in range(470)),
        params=SamplingParams(max_tokens=30, temperature=0.0),
        arrival_s=0.0,
    )
    answers = answer(engine, asked)
    for below in ({"swap_space": 0.001}, {"kv_offload_gib": 0.001}):
        whole = build(folder, **below)
        assert whole.config.has_full
        assert answer(whole, asked) == answers


@pytest.mark.parametrize(
    ("name", "kinds", "told"),
    [
        ("gemma3", ["full", "window 135", "window 135"], " in one of 3 groups of layers (0% of their bytes unused), "),
        ("qwen3_5", ["full", "recurrent"], "; a recurrent state is 4 blocks, 32.0 KiB"),
    ],
)
def test_the_start_says_which_groups_share_the_pool(name: str, kinds: list[str], told: str, tmp_path: Path) -> None:
    case = test_models_families.CASES[name]
    replace(case, settings=case.settings | {"max_position_embeddings": 512}).build().save_pretrained(tmp_path)
    report: list[Progress] = []
    engine = build(str(tmp_path), report, kv_cache_memory_bytes=1 << 21)
    assert [group.name for group in engine.config.groups] == kinds
    (pool,) = [progress.detail for progress in report if progress.stage == "kv_pool"]
    assert told in pool


def test_int8_kv_holds_more_blocks_in_the_same_memory(folder: str) -> None:
    num_blocks = [
        build(folder, kv_cache_dtype=kind, kv_cache_memory_bytes=64 * BLOCK_BYTES).config.num_blocks
        for kind in ("auto", "int8")
    ]
    assert 2.5 < num_blocks[1] / num_blocks[0] < 4.0
    with pytest.raises(ConfigError, match="--kv-cache-dtype is 'fp8'; choose one of auto, int8"):
        build(folder, kv_cache_dtype="fp8")


def test_what_cannot_be_is_refused_in_a_sentence(folder: str) -> None:
    with pytest.raises(MemoryBudgetError, match=r"--max-model-len is 81, .* set it to at most 80"):
        build(folder, kv_cache_memory_bytes=5 * BLOCK_BYTES, max_model_len=81)
    with pytest.raises(MemoryBudgetError, match=r"set it to at most 80, .* or raise --num-gpu-blocks-override"):
        build(folder, num_gpu_blocks_override=5, max_model_len=81)
    with pytest.raises(MemoryBudgetError, match="one block of 16 tokens needs"):
        build(folder, kv_cache_memory_bytes=BLOCK_BYTES - 1)
    with pytest.raises(ConfigError, match="--max-model-len is 513, but the model was made for 512 positions"):
        build(folder, max_model_len=513)
    with pytest.raises(ConfigError, match="--attention-backend is 'flashy'"):
        build(folder, attention_backend="flashy")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"--device is 'cuda', but (this )?torch .*; use 'cpu' or 'auto'"):
            build(folder, device="cuda")


def test_the_steps_that_memory_is_measured_on_can_be_computed(folder: str) -> None:
    engine = build(folder, max_num_seqs=5, max_num_batched_tokens=64)
    crowd, scored = [engine._runner.run(plan).wait() for plan in full_steps(engine.config, engine.facts.vocab_size)]
    assert (len(crowd.token_ids), len(crowd.logprobs), crowd.errors) == (5, 5, {})
    assert {len(entry.top) for entry in crowd.logprobs.values()} == {20}
    assert [len(entries) for entries in scored.prompt_logprobs.values()] == [63]
    for config in (engine.config, replace(engine.config, max_model_len=5)):
        few, more = other_steps(config)
        assert [plan.num_tokens for plan in (few, more)] == [
            min(8, config.max_model_len),
            min(64, config.max_model_len),
        ]
        for plan in (few, more):
            assert len(engine._runner.run(plan).wait().token_ids) == 1


def test_on_a_gpu_the_pool_is_what_was_measured_and_a_refusal_says_where_the_rest_went(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(folder, max_num_seqs=5, max_num_batched_tokens=64)
    memory = CudaMemory(GIB, GIB // 2, GIB // 8, GIB // 8, GIB // 8, GIB // 16, 0)

    def measure(make_runner: object, settings: SchedulerConfig, device: torch.device, **how: object) -> CudaMemory:
        assert settings == engine.config
        assert how == {"share": 0.5, "num_tensors": 4, "vocab_size": 96, "captures": True}
        return memory

    monkeypatch.setattr("engine.startup.sizes.measure_memory", measure)
    monkeypatch.setattr("engine.startup.sizes.free_share", lambda device, share: GIB)
    config = EngineConfig(model=folder, gpu_memory_utilization=0.5)
    model, device = engine._runner._model, torch.device("cuda")
    budget = pool_budget(Parts(config, lambda _: None, device, model, captures=True), engine.config, 0)  # type: ignore[arg-type]
    assert budget.num_bytes == GIB // 16
    assert fit_pool(budget, GIB // 64, 16, in_blocks, model_len=512, asked_len=None) == PoolSize(4, 64)
    with pytest.raises(MemoryBudgetError) as refused:
        fit_pool(budget, GIB // 64, 16, in_blocks, model_len=512, asked_len=100)
    assert str(refused.value) == (
        "--max-model-len is 100, which needs 7 blocks of K/V (112.0 MiB), and the KV pool's 4 blocks hold 64 tokens (of 1.00 "
        "GiB, 0.50 may be used: weights 0.12, a full step 0.12, CUDA graphs 0.06, other processes and CUDA itself 0.12, which "
        "leaves 0.06 for K/V); set it to at most 64, or to auto for as much as fits, or raise --gpu-memory-utilization, or "
        "lower --max-num-batched-tokens or --max-num-seqs."
    )


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_engine_answers_on_its_own_thread(folder: str, async_scheduling: bool) -> None:
    engine = build(folder, async_scheduling=async_scheduling)
    heard: queue.Queue[StepEvents] = queue.Queue()
    engine.start(heard.put)
    try:
        for i in range(6):
            params = SamplingParams(max_tokens=7 + i, temperature=0.7, seed=i)
            prompt = tuple(range(1, 20 + i))
            engine.submit(Request(request_id=f"r{i}", prompt=prompt, params=params, arrival_s=engine.clock()))
        num_tokens: dict[str, int] = {}
        ends: dict[str, FinishReason] = {}
        while len(ends) < 6:
            for event in heard.get(timeout=PATIENCE_S):
                num_tokens[event.request_id] = num_tokens.get(event.request_id, 0) + len(event.token_ids)
                if event.finish_reason is not None:
                    ends[event.request_id] = event.finish_reason
    finally:
        engine.stop(0)
    assert num_tokens == {f"r{i}": 7 + i for i in range(6)}
    assert set(ends.values()) == {FinishReason.LENGTH}
    assert engine.health().error is None


def answer(engine: Engine, request: Request) -> list[int]:
    events: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
    engine.start(events.put)
    engine.submit(request)
    token_ids: list[int] = []
    while True:
        for event in events.get(timeout=PATIENCE_S):
            token_ids += event.token_ids
            if event.finish_reason is not None:
                engine.stop(0.0)
                return token_ids


def measure_and_forget(monkeypatch: pytest.MonkeyPatch) -> list[DraftCosts]:
    """Let drafts cost nothing, since in so small a model none pays; what is measured comes into the list."""
    measured, measure = list[DraftCosts](), speculation.measure_draft_costs

    def free(*args: Any, **settings: Any) -> DraftCosts:
        measured.append(measure(*args, **settings))
        return FREE_DRAFTS

    monkeypatch.setattr(speculation, "measure_draft_costs", free)
    return measured


def test_drafts_from_the_text_change_no_answer(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report, measured = list[Progress](), measure_and_forget(monkeypatch)
    drafting = build(folder, report, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    assert any(progress.stage == "speculation" and "ngram, up to 4 tokens" in progress.detail for progress in report)
    assert drafting.config.num_speculative_tokens == 4
    assert min(len(measured[0].plain), len(measured[0].checking)) >= 2
    request = Request(
        request_id="r", prompt=(1, 2, 3) * 5, params=SamplingParams(max_tokens=40, temperature=0.0), arrival_s=0.0
    )
    plain = build(folder)
    assert drafting._depth == plain._depth == 0
    assert answer(drafting, request) == answer(plain, request)
    assert drafting.stats.spec_accepted_tokens > 0


def test_an_mtp_head_is_a_layer_of_the_pool_and_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = test_models_families.CASES["glm4-moe-air"].build()
    config.save_pretrained(tmp_path)
    request = Request(request_id="r", prompt=(1, 2, 3) * 5, params=SamplingParams(max_tokens=20, seed=5), arrival_s=0.0)
    memory = {"kv_cache_memory_bytes": 396 * BLOCK_BYTES}
    plain, report = build(str(tmp_path), **memory), list[Progress]()
    asked = {"method": "glm4_moe_mtp", "model": str(tmp_path), "num_speculative_tokens": 3}
    measured = measure_and_forget(monkeypatch)
    drafting = build(str(tmp_path), report, speculative_config=asked, **memory)
    num_layers = config.num_hidden_layers
    assert drafting.config.num_blocks == plain.config.num_blocks * num_layers // (num_layers + 1)
    assert any("mtp, up to 3 tokens at a time" in progress.detail for progress in report)
    assert measured[0].drafting[0][1] > 0
    assert answer(drafting, request) == answer(plain, request)
    assert drafting.stats.spec_draft_tokens > 0


def test_a_draft_model_shares_the_memory_and_changes_no_answer(
    folder: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own weights as a draft, of which every token is right; and with others, of which hardly any is."""
    monkeypatch.setattr("engine.startup.speculation.measure_draft_costs", lambda *_, **__: FREE_DRAFTS)
    request = Request(request_id="r", prompt=(1, 2, 3) * 5, params=SamplingParams(max_tokens=40, seed=5), arrival_s=0.0)
    memory = {"kv_cache_memory_bytes": 100 * BLOCK_BYTES}
    plain = build(folder, **memory)
    assert plain.config.num_blocks == 100
    drafting = build(folder, speculative_config={"model": folder, "num_speculative_tokens": 3}, **memory)
    assert drafting.config.num_blocks == 50
    expected = answer(plain, request)
    assert answer(drafting, request) == expected
    assert drafting.stats.spec_accepted_tokens == drafting.stats.spec_draft_tokens > 0

    other = tmp_path_factory.mktemp("other")
    settings = json.loads((Path(folder) / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 1}))
    assert answer(build(folder, speculative_config={"model": str(other)}), request) == expected

    (other / "config.json").write_text(json.dumps({**settings, "vocab_size": 97}))
    with pytest.raises(ConfigError, match="has 97 tokens and the model 96"):
        build(folder, speculative_config={"model": str(other)})
    with pytest.raises(ModelLoadError, match="--speculative-config: the draft model could not be loaded"):
        build(folder, speculative_config={"model": "./nowhere"})


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize(("limit", "flag"), [("max_num_batched_tokens", "--max-num-batched-tokens"),
                                             ("max_model_len", "--max-model-len")])  # fmt: skip
def test_drafts_that_have_no_room_are_refused(folder: str, method: str, limit: str, flag: str) -> None:
    asked = {"method": method, "num_speculative_tokens": 3} | ({} if method == "ngram" else {"model": folder})
    build(folder, speculative_config=asked, block_size=1, **{limit: 4})
    with pytest.raises(
        ConfigError, match=f"num_speculative_tokens is 3, and {flag} is 3; a token and its drafts need 4"
    ):
        build(folder, speculative_config=asked, block_size=1, **{limit: 3})


def test_a_draft_model_has_no_adapters(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And may be one that cannot have any."""
    loaded = []

    def load(config: EngineConfig, *others: Any) -> Any:
        loaded.append(config)
        return load_model(config, *others)

    monkeypatch.setattr("engine.startup.speculation.load_model", load)
    monkeypatch.setattr("engine.startup.speculation.measure_draft_costs", lambda *_, **__: FREE_DRAFTS)
    build(folder, speculative_config={"model": folder}, allow_runtime_lora_updating=True, max_loras=2)
    assert [config.num_loras for config in loaded] == [0]


# -- adapters ----------------------------------------------------------------------------------------------------------


def lora_folder(engine: Engine, folder: Path) -> LoraModule:
    """An adapter of the model that an engine runs."""
    model = engine._runner._model  # type: ignore[attr-defined]  # a ModelRunner's
    return LoraModule(folder.name, str(save_adapter(model, folder)))


def test_adapters_are_there_from_the_start_and_others_may_come(folder: str, tmp_path: Path) -> None:
    plain = build(folder)
    modules = [lora_folder(plain, tmp_path / name) for name in ("first", "second", "third")]
    assert not plain.adapters
    report: list[Progress] = []
    engine = build(
        folder, report, lora_modules=tuple(modules[:2]), allow_runtime_lora_updating=True, max_loras=3, max_lora_rank=4
    )
    (told,) = [progress.detail for progress in report if progress.stage == "adapters"]
    assert told == "first, second; at most 3 at a time, of ranks up to 4"
    assert [loaded.path for loaded in engine.adapters.values()] == [module.path for module in modules[:2]]
    engine._resources.adapters.load(*modules[2])
    with pytest.raises(AdapterConflictError, match="3 adapters are held"):
        engine._resources.adapters.load("fourth", modules[2].path)


def test_what_an_adapter_cannot_be_is_told_before_anything_is_loaded(folder: str, tmp_path: Path) -> None:
    report: list[Progress] = []
    nowhere = LoraModule("a", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"--lora-modules has a=.*nowhere: There is no folder"):
        build(folder, report, lora_modules=(nowhere,))
    module = lora_folder(build(folder), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="transformers' code runs this model, to which they cannot be added"):
        build(folder, report, lora_modules=(module,), model_impl="transformers")
    with pytest.raises(ConfigError, match="--allow-runtime-lora-updating is on, but transformers' code"):
        build(folder, report, allow_runtime_lora_updating=True, model_impl="transformers")
    assert not [progress for progress in report if progress.stage == "weights"]
    with pytest.raises(ConfigError, match=r"--lora-modules has adapter=.*more than --max-lora-rank 3; raise that"):
        build(folder, lora_modules=(module,), max_lora_rank=3)


def test_quantised_weights_in_float16_take_no_adapters(folder: str, library: Library) -> None:
    with pytest.raises(ConfigError, match="cannot be added to quantised weights in float16; set --dtype"):
        build(folder, allow_runtime_lora_updating=True, dtype="float16", quantization="int8")
