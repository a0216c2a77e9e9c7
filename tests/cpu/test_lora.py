"""Adapters against the models they come to when they are merged in float32, and against what they must leave alone."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_attention import NUM_BLOCKS, make_batch, make_tables
from test_native_decoder import Piecewise

from engine.core.errors import AdapterLoadError, AdapterNotFoundError, ConfigError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import PreemptionKind
from engine.runtime.attention.table import load_backend
from engine.runtime.lora.loader import AdapterRows, LoraAdapter, LoraLoader
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.load import load_model
from engine.runtime.native.library import Library, native
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.speculation.text_drafter import TextDrafter
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from tests.cpu import test_models_families as families
from tests.cpu import test_weights_gguf as gguf
from tests.cpu.dense_attention import DenseAttention
from tests.cpu.lora_folders import load_adapter, merge, save_adapter
from tests.cpu.model_driver import make_runner, request, serve, settings, state_blocks

CPU = torch.device("cpu")
NAMES = (
    "llama",
    "llama-tied-biased",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3n",
    "gemma4",
    "gemma4-shared",
    "olmo2",
    "phi3",
    "granite",
    "qwen3-moe",
    "deepseek_v2-lite",
    "deepseek_v3-halves-biased",
)
LENGTH = 12


def forward(
    model: Decoder,
    prompts: Sequence[tuple[torch.Tensor, LoraAdapter | None]],
    *,
    in_one_call: bool = True,
    last_rows: bool = False,
) -> list[torch.Tensor]:
    """Logits of prompts that are one batch over one pool: of all positions, or of each prompt's last three, twice."""
    backend = load_backend("auto", CPU)
    cache = KVCache(model.states, backend, num_blocks=NUM_BLOCKS, block_size=4, dtype=model.dtype, device=CPU)
    steps = [(0, len(ids)) for ids, _ in prompts]
    batch = make_batch(steps, make_tables(steps, 4, is_scattered=True), 4)
    batch.ids = torch.cat([ids for ids, _ in prompts])
    backend.prepare(batch)
    rows = torch.arange(len(batch.ids)).split([length for _, length in steps])
    wanted = [own[-3:].repeat(2) if last_rows else own for own in rows]
    adapters = {adapter for _, adapter in prompts if adapter is not None}
    groups = [
        AdapterRows(each, torch.cat([own for own, (_, adapter) in zip(rows, prompts, strict=True) if adapter is each]))
        for each in adapters
    ]
    with torch.inference_mode():
        hidden = model.forward(
            batch.ids,
            batch.positions,
            cache if in_one_call else Piecewise(cache),
            torch.cat(wanted) if last_rows else None,
            groups,
        )
        return list(model.logits(hidden).split([len(own) for own in wanted]))


def prompts_of(adapters: Sequence[LoraAdapter | None]) -> list[tuple[torch.Tensor, LoraAdapter | None]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(3, 128, (LENGTH - i,), generator=generator), own) for i, own in enumerate(adapters)]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_added_is_what_merged_weights_have_more(name: str, tmp_path: Path) -> None:
    """Several adapters and the base model in one batch, in one native call and operation by operation."""
    theirs = families.save_tiny(families.CASES[name], tmp_path / "model")
    folders = [
        save_adapter(theirs, tmp_path / "all", seed=1),
        save_adapter(
            theirs, tmp_path / "some", rank=3, seed=2, targets=("v_proj", "o_proj", "qkv_proj", "up_proj", "q_b_proj")
        ),
    ]
    model = families.load(tmp_path / "model")
    first, second = (load_adapter(model, folder) for folder in folders)
    prompts = prompts_of([first, None, second, first, None, second])
    merged = [deepcopy(theirs) for _ in folders]
    for each, folder in zip(merged, folders, strict=True):
        merge(each, folder)
    oracle = {first: merged[0], None: theirs, second: merged[1]}
    for in_one_call in (True, False):
        for last_rows in (False, True):
            found = forward(model, prompts, in_one_call=in_one_call, last_rows=last_rows)
            for (ids, adapter), ours in zip(prompts, found, strict=True):
                with torch.no_grad():
                    expected = oracle[adapter](ids[None], use_cache=False).logits[0]
                if last_rows:
                    expected = expected[-3:].repeat(2, 1)
                torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)
    with torch.no_grad():
        apart = [each(prompts[0][0][None]).logits for each in (theirs, *merged)]
    assert min((apart[i] - apart[j]).abs().max() for i, j in ((0, 1), (0, 2), (1, 2))) > 0.05


DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")
MAMBA = ("in_proj", "out_proj", "q_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3_5", DELTA),
        ("lfm2", ("in_proj", "out_proj", "w1", "w2")),
        ("granitemoehybrid-mamba", MAMBA),
        ("nemotron_h", MAMBA),
        ("falcon_h1", (*MAMBA, "o_proj", "gate_proj")),
        ("mamba2", MAMBA),
        ("lfm3", ("in_proj", "out_proj", "g_proj", "v_proj", "w1", "w2")),
        ("gguf/qwen35", DELTA),
        ("gguf/qwen3next", (*DELTA, "in_proj_ba")),
        ("gguf/granitehybrid", MAMBA),
        ("gguf/lfm2", ("in_proj", "out_proj", "w1", "w2")),
    ],
)
def test_adapters_change_layers_with_recurrent_state(name: str, targets: Sequence[str], tmp_path: Path) -> None:
    """Of checkpoints, and of files, in which some heads are in another order."""
    arch = name.removeprefix("gguf/")
    case, names, extra = gguf.ARCHITECTURES[arch] if arch != name else (families.CASES[name], {}, {})
    theirs = families.save_tiny(case, tmp_path / "model")
    folder = save_adapter(theirs, tmp_path / "all", targets=targets)
    path = tmp_path / "model"
    if arch != name:
        path = gguf.write(tmp_path / "a.gguf", arch, theirs.config, gguf.convert(theirs, arch, names), **extra)
    model = families.load(path)
    adapter, ids = load_adapter(model, folder), torch.arange(3, 3 + LENGTH)
    with torch.inference_mode():
        plain = theirs(ids[None], use_cache=False).logits[0]
        merge(theirs, folder)
        expected = theirs(ids[None], use_cache=False).logits[0]
        rows, attention = [AdapterRows(adapter, torch.arange(LENGTH))], DenseAttention(model.states)
        found = model.logits(model.forward(ids, torch.arange(LENGTH), attention, adapters=rows))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert (found - plain).abs().max() > 0.1
    size = state_blocks(model, 4)
    config = settings(num_blocks=60 + 4 * size, max_model_len=64, state_blocks=size)
    asked = [request(of, ids.tolist(), adapter=adapter if of else None, logprobs=1) for of in ("", "all")]
    answers = serve(model, config, asked)  # in the native library, beside a row without an adapter
    answer = answers.ids["all", 0]
    with torch.inference_mode():
        rows = (
            theirs(torch.tensor([[*ids.tolist(), *answer]]), use_cache=False).logits[0, LENGTH - 1 : -1].log_softmax(-1)
        )
    told = [each.logprob for event in answers.events["all", 0] for each in event.logprobs or ()]
    torch.testing.assert_close(
        torch.tensor(told), rows.gather(1, torch.tensor(answer)[:, None])[:, 0], atol=2e-4, rtol=0
    )


def test_a_file_with_the_models_multipliers_in_its_matrices_takes_no_adapters(tmp_path: Path) -> None:
    case, names, extra = gguf.ARCHITECTURES["falcon-h1"]
    theirs = families.save_tiny(case, tmp_path / "model")
    path = gguf.write(
        tmp_path / "a.gguf", "falcon-h1", theirs.config, gguf.convert(theirs, "falcon-h1", names), **extra
    )
    with pytest.raises(ConfigError, match="multipliers in its matrices, which adapters come before"):
        families.load(path, allow_runtime_lora_updating=True)


def test_an_adapter_of_a_model_inside_another_is_the_same(tmp_path: Path) -> None:
    theirs = families.save_tiny(families.CASES["qwen3_5"], tmp_path / "model")
    folder, model = save_adapter(theirs, tmp_path / "adapter"), families.load(tmp_path / "model")
    first = load_adapter(model, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    inside = {name.replace(".layers.", ".language_model.layers."): tensor for name, tensor in tensors.items()}
    save_file(inside, folder / "adapter_model.safetensors")
    ids, positions = torch.arange(3, 3 + LENGTH), torch.arange(LENGTH)
    with torch.inference_mode():
        hidden = [
            model.forward(ids, positions, DenseAttention(model.states), adapters=[AdapterRows(adapter, positions)])
            for adapter in (first, load_adapter(model, folder))
        ]
    assert torch.equal(*hidden)


SCALES = [
    {"lora_alpha": 3},
    {"use_rslora": True},
    {"rank_pattern": {"up_proj": 7, "layers.0.self_attn.k_proj": 4}, "alpha_pattern": {"v_proj": 1.5, "proj": 9.0}},
]


@pytest.mark.parametrize("config", SCALES, ids=["alpha", "rslora", "patterns"])
def test_scales_are_what_the_config_says(config: dict[str, Any], tmp_path: Path) -> None:
    theirs = families.save_tiny(families.CASES["llama"], tmp_path / "model")
    folder = save_adapter(theirs, tmp_path / "adapter", **config)
    model = families.load(tmp_path / "model")
    [(ids, adapter)] = prompts_of([load_adapter(model, folder)])
    merge(theirs, folder)
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(forward(model, [(ids, adapter)])[0], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "int8")],
    ids=["float32", "bfloat16", "int8"],
)
def test_company_changes_no_bit(library: Library, dtype: torch.dtype, quantization: str, tmp_path: Path) -> None:
    """Of a row with an adapter, nor of one without: those say what they say where no adapter was ever heard of."""
    theirs = families.save_tiny(families.CASES["llama-tied-biased"], tmp_path / "model")
    config = EngineConfig(model=str(tmp_path / "model"), quantization=quantization)
    model = load_model(config, CPU, dtype, lambda progress: None)
    assert isinstance(model, Decoder)
    first, second = (
        load_adapter(model, save_adapter(theirs, tmp_path / str(rank), rank=rank, seed=rank)) for rank in (3, 8)
    )
    prompts = prompts_of([first, None, second, first, None, second, second])
    alone = [forward(model, [each])[0] for each in prompts]
    for num_threads in (1, 3):
        library.use_threads(num_threads)
        for ours, own in zip(forward(model, prompts), alone, strict=True):
            assert torch.equal(ours, own)
    ids, _ = prompts[0]
    assert not torch.equal(forward(model, [(ids, None)])[0], alone[0])


def test_without_the_library_torch_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = families.save_tiny(families.CASES["qwen2"], tmp_path / "model")
    folders = [save_adapter(theirs, tmp_path / str(seed), seed=seed, rank=3) for seed in (1, 2)]

    def answers() -> list[torch.Tensor]:
        model = families.load(tmp_path / "model")
        first, second = (load_adapter(model, folder) for folder in folders)
        return forward(model, prompts_of([first, None, second, first]))

    ours = answers()
    monkeypatch.setattr("engine.runtime.schemes.linear.native", lambda: None)
    monkeypatch.setattr("engine.runtime.schemes.linear.native", lambda: None)
    monkeypatch.setattr("engine.runtime.models.decoder.native", lambda: None)
    for found, expected in zip(answers(), ours, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_text_is_the_same_alone_busy_chunked_preempted_swapped_and_drafted(tmp_path: Path) -> None:
    """The default model in bfloat16; one prompt for all, so that a block of K/V lent to another's adapter would show."""
    if native() is None:
        pytest.skip("no native library and no C compiler")
    model = load_model(EngineConfig(model=str(find_model(None).path)), CPU, torch.bfloat16, lambda progress: None)
    assert isinstance(model, Decoder)
    adapters = [
        load_adapter(model, save_adapter(model, tmp_path / str(seed), rank=8, seed=seed, size=0.15), f"adapter {seed}")
        for seed in (1, 2)
    ]
    prompt = [504, 3575, 282, 4649, 314, *range(1000, 1008), *range(1000, 1012)]
    asked = [
        request(f"{i}-{n}", prompt, max_tokens=8, seed=i, temperature=float(i % 2), n=n, adapter=adapter)
        for i, adapter in enumerate([*adapters, None] * 2)
        for n in range(1, 1 + i % 2 + 1)
    ]
    uncached = settings(enable_prefix_caching=False)
    alone = {}
    for one in asked:
        alone |= serve(model, uncached, [one]).ids
    told = {own: alone[f"{i}-1", 0] for i, own in ((0, "first"), (4, "second"), (2, "none"))}
    assert len({tuple(ids) for ids in told.values()}) == 3
    regimes = {
        "busy": settings(max_num_seqs=18),
        "chunked": settings(max_num_batched_tokens=16),
        "preempting": settings(num_blocks=18, max_num_seqs=18, max_num_batched_tokens=32),
        "swapping": settings(num_blocks=18, max_num_seqs=18, max_num_batched_tokens=32, num_host_blocks=80),
        "drafting": settings(max_num_seqs=18, num_speculative_tokens=3),
    }
    for depth, (name, config) in enumerate(regimes.items()):
        scheduler, runner = Scheduler(config), make_runner(model, config)
        if config.num_speculative_tokens:
            runner.speculate(TextDrafter(1, 4))
        served = serve(model, config, asked, depth=depth % 2, apart=1, scheduler=scheduler, runner=runner)
        assert served.ids == alone, name
        assert scheduler.stats.prefix_hit_tokens > 0, "requests of one adapter do share"
        preempted = scheduler.stats.preempted
        assert (preempted[PreemptionKind.RECOMPUTE] > 0) == (name == "preempting")
        assert (preempted[PreemptionKind.SWAP] > 0) == (name == "swapping")
        assert (scheduler.stats.spec_draft_tokens > 0) == (name == "drafting")


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("tiny")
    families.write_tiny(families.CASES["llama"], folder)
    return families.load(folder)


def test_an_adapter_is_gone_with_its_last_holder(tiny: Decoder, tmp_path: Path) -> None:
    adapter = load_adapter(tiny, save_adapter(tiny, tmp_path))
    forward(tiny, prompts_of([adapter]))
    memory = weakref.ref(adapter)
    del adapter
    gc.collect()
    assert memory() is None


def test_the_digest_is_of_what_is_in_it(tiny: Decoder, tmp_path: Path) -> None:
    first = load_adapter(tiny, save_adapter(tiny, tmp_path / "1"), "first")
    again = load_adapter(tiny, save_adapter(tiny, tmp_path / "2"), "second")
    scaled = load_adapter(tiny, save_adapter(tiny, tmp_path / "3", lora_alpha=9))
    other = load_adapter(tiny, save_adapter(tiny, tmp_path / "4", seed=2))
    assert first.digest == again.digest
    assert len({first.digest, scaled.digest, other.digest}) == 3
    assert len(first.digest) == 32


REFUSED = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA is supported"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"use_dora": True}, "use_dora is True, which is not supported"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which has changed the base"),
    ({"r": 0}, "r is 0; it must be a number above 0"),
    ({"r": 2.5}, "r is 2.5"),
    ({"r": True}, "r is True"),
    ({"r": "4"}, "r is '4'"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ({"alpha_pattern": {"(a+)+": 1}}, r"alpha_pattern has '\(a\+\)\+'; only names"),
    ({"alpha_pattern": [1]}, "alpha_pattern is \\[1\\]; it must be an object"),
    ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern is 1.5"),
    ({"lora_alpha": 10**400}, "lora_alpha is 10+; it must be a number above 0"),
    ({"r": 10**400}, "r is 10+; it must be a number above 0"),
    ({"r": 5}, r"layers.0.mlp.down_proj.lora_A.weight has shape \[4, 96\], and a rank of 5 .* \[5, 96\]"),
    ({"r": 65}, "the rank of model.layers.0.mlp.down_proj is 65, more than --max-lora-rank 64"),
]


@pytest.mark.parametrize(("config", "sentence"), REFUSED, ids=[str(config)[:40] for config, _ in REFUSED])
def test_what_is_not_understood_is_refused_by_its_key(
    tiny: Decoder, config: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    save_adapter(tiny, tmp_path)
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(values | config))
    with pytest.raises(AdapterLoadError, match=sentence):
        load_adapter(tiny, tmp_path)


def test_an_adapter_of_the_expansion_of_latents_is_refused(tmp_path: Path) -> None:
    """Queries are multiplied by kv_b's rows for keys transposed, to which no low-rank term can be added."""
    theirs = families.save_tiny(families.CASES["deepseek_v2-lite"], tmp_path / "model")
    folder = save_adapter(theirs, tmp_path / "adapter", targets=("kv_b_proj", "q_proj"))
    with pytest.raises(
        AdapterLoadError, match=r"it changes .*kv_b_proj, which this model cannot have changed; .*q_proj"
    ):
        load_adapter(families.load(tmp_path / "model"), folder)


def test_other_models_adapters_are_refused(tiny: Decoder, tmp_path: Path) -> None:
    wide = families.save_tiny(families.CASES["llama-wide-heads"], tmp_path / "wide")
    with pytest.raises(AdapterLoadError, match="it may be another model's adapter"):
        load_adapter(tiny, save_adapter(wide, tmp_path / "a"))
    merged = families.save_tiny(families.CASES["phi3"], tmp_path / "phi3")
    with pytest.raises(
        AdapterLoadError, match=r"qkv_proj, which this model cannot have changed; down_proj, gate_proj, "
    ):
        load_adapter(tiny, save_adapter(merged, tmp_path / "b", targets=("qkv_proj",)))
    with pytest.raises(AdapterLoadError, match="it changes lm_head, which"):
        load_adapter(tiny, save_adapter(wide, tmp_path / "c", targets=("lm_head",)))


@pytest.mark.parametrize(
    ("place", "error", "sentence"),
    [
        ("_check", SafetensorError("cut"), r"cannot be read \(cut\)"),
        ("_check", OSError(5, "Input/output error"), "cannot be read .*Input/output error"),
        ("_merge", MemoryError("33554432 bytes"), r"cannot be loaded \(MemoryError: 33554432 bytes\)"),
        ("_merge", RuntimeError("out of memory"), "cannot be loaded .*out of memory.*unload another"),
    ],
)
def test_what_goes_wrong_in_reading_and_packing_is_a_fault_of_the_adapter(
    tiny: Decoder, place: str, error: Exception, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraLoader, place, Mock(side_effect=error))
    with pytest.raises(AdapterLoadError, match=sentence):
        load_adapter(tiny, save_adapter(tiny, tmp_path))


def test_folders_that_hold_no_adapter_are_refused(tiny: Decoder, tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match="There is no folder"):
        load_adapter(tiny, tmp_path / "nowhere")
    with pytest.raises(AdapterLoadError, match=r"has no adapter_config\.json"):
        load_adapter(tiny, tmp_path)
    folder = save_adapter(tiny, tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content, sentence in ((whole[:-8], "truncated"), (b"", "truncated"), (b"{" * 100, "not a safetensors file")):
        weights.write_bytes(content)
        with pytest.raises(AdapterLoadError, match=sentence):
            load_adapter(tiny, folder)
    weights.unlink()
    with pytest.raises(AdapterLoadError, match=r"has no adapter_model\.safetensors"):
        load_adapter(tiny, folder)
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterLoadError, match="holds only pickled weights"):
        load_adapter(tiny, folder)
    for config in ("[]", "{", "[" * 100_000):
        (folder / "adapter_config.json").write_text(config)
        with pytest.raises(AdapterLoadError, match="adapter_config"):
            load_adapter(tiny, folder)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({}, "holds no LoRA weights"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (4, 64)}, "lacks .*up_proj.lora_B.weight"),
        ({"base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector": (4,)}, "is not a LoRA weight"),
        (
            {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": (4, 64)},
            "layers.9.mlp.up_proj, which this model",
        ),
    ],
)
def test_files_that_hold_something_else_are_refused(
    tiny: Decoder, tensors: dict[str, tuple[int, ...]], sentence: str, tmp_path: Path
) -> None:
    save_adapter(tiny, tmp_path)
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterLoadError, match=sentence):
        load_adapter(tiny, tmp_path)
