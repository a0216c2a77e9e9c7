"""Models without code of ours, through transformers' own, against transformers with its own attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core.errors import ModelLoadError
from engine.runtime.models import config_file
from engine.runtime.models.load import load_model
from engine.runtime.models.transformers_adapter import TransformersModel
from engine.settings.engine_config import EngineConfig
from tests.cpu import test_models_families as own
from tests.cpu.dense_attention import DenseAttention
from tests.cpu.test_models_families import Case, rope, save_tiny, write_tiny

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CASES = {
    "phimoe": Case("PhimoeConfig", {"num_local_experts": 4, "sliding_window": 8}),  # its window is in the mask alone
    "modernbert-decoder": Case("ModernBertDecoderConfig", {"local_attention": 16, "layer_types": WINDOWS}),
    "gpt2": Case("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "opt": Case("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_neox": Case("GPTNeoXConfig"),
    "phi": Case("PhiConfig"),
    "starcoder2": Case("Starcoder2Config", {"sliding_window": 8}),
    "cohere": Case("CohereConfig", {"logit_scale": 0.5}),
    "cohere2": Case("Cohere2Config", {"sliding_window": 8, "layer_types": WINDOWS}),
    "olmo": Case("OlmoConfig"),
    "glm4": Case("Glm4Config", {"head_dim": 16}),
    "mixtral": Case("MixtralConfig", EXPERTS | {"sliding_window": 8}),
    "deepseek_v3": Case(
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "gpt_oss": Case("GptOssConfig", EXPERTS | {"head_dim": 16, "sliding_window": 8, "layer_types": WINDOWS}),
    "llama": Case("LlamaConfig"),
    "gemma2": Case("Gemma2Config", {"head_dim": 16, "sliding_window": 8}),
}


def load(folder: Path, **settings: object) -> TransformersModel:
    config = EngineConfig(model=str(folder), model_impl="transformers", **settings)  # type: ignore[arg-type]
    model = load_model(config, torch.device("cpu"), torch.float32, lambda progress: None)
    assert isinstance(model, TransformersModel)
    return model


# Gemma 4 has code of ours, too; its last layers read the keys and values of others.
SHARED = {"gemma4-shared": own.CASES["gemma4-shared"]}


@pytest.mark.parametrize("name", CASES | SHARED)
def test_matches_transformers(name: str, tmp_path: Path) -> None:
    theirs = save_tiny((CASES | SHARED)[name], tmp_path)
    ids = torch.randint(3, 128, (30,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids[None], use_cache=False).logits[0]
    model = load(tmp_path)
    assert model.vocab_size == 128
    assert model.max_model_len == 64
    attention, positions = DenseAttention(model.states), torch.arange(30)
    with torch.inference_mode():
        found = [
            model.logits(model.forward(some, at, attention))
            for some, at in zip(ids.split([17, 11, 1, 1]), positions.split([17, 11, 1, 1]), strict=True)
        ]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.1


REFUSED = {
    "falcon": (Case("FalconConfig"), "attention that transformers cannot exchange"),
    "mamba": (Case("MambaConfig", {"state_size": 8}), "'mamba' has Mamba layers"),
    "llama4": (Case("Llama4TextConfig", {"num_local_experts": 2}), "chunked_attention"),
    "bert": (Case("BertConfig", {"is_encoder_decoder": True}), "'bert' is an encoder"),
    "diffllama": (Case("DiffLlamaConfig"), "takes the difference of two attentions a layer"),
    "doge": (Case("DogeConfig"), "adds a bias of its own to attention"),
    "nemotron": (Case("NemotronConfig"), "does not pass to its attention what a paged cache needs"),
}
UNLISTED = {"diffllama": "attends more than once", "doge": "mask or bias of its own", "nemotron": "keyword arguments"}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_cannot_serve(name: str, tmp_path: Path) -> None:
    case, reason = REFUSED[name]
    case.build().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=reason) as refusal:
        load(tmp_path, load_format="dummy")
    assert str(refusal.value).count("\n") == 0


@pytest.mark.parametrize("name", UNLISTED)
def test_a_first_pass_refuses_what_no_table_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, "_OTHER_ATTENTION", {})
    REFUSED[name][0].build().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=UNLISTED[name]):
        load(tmp_path, load_format="dummy")


def test_a_rotation_by_the_longest_batch_mate_is_refused(tmp_path: Path) -> None:
    """Phi-3.5-MoE scales by the longest sequence of a step, unless its two scales are equal, as published."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16}
    for scales, is_served in (((1.2, 1.2), True), ((1.1, 1.2), False)):
        mscales = dict(zip(("short_mscale", "long_mscale"), scales, strict=True))
        case = Case("PhimoeConfig", {"num_local_experts": 4} | rope("longrope", **factors, **mscales))
        case.build().save_pretrained(tmp_path)
        if is_served:
            load(tmp_path, load_format="dummy")
        else:
            with pytest.raises(ModelLoadError, match="rotates all tokens of a batch by the longest"):
                load(tmp_path, load_format="dummy")


def test_refuses_attention_that_no_table_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, "_OTHER_ATTENTION", {})
    Case("FalconConfig").build().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="attention of FalconForCausalLM"):
        load(tmp_path, load_format="dummy")


def test_length_dependent_ropes_do_not_depend_on_batch_mates(tmp_path: Path) -> None:
    """transformers stretches them by the longest sequence of a batch; here --max-model-len alone decides."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    write_tiny(Case("LlamaConfig", rope("longrope", original_max_position_embeddings=16, **factors)), tmp_path)
    ids = torch.arange(3, 33)

    def last(model: TransformersModel, chunks: list[int]) -> torch.Tensor:
        attention = DenseAttention(model.states)
        with torch.inference_mode():
            parts = zip(ids.split(chunks), torch.arange(30).split(chunks), strict=True)
            return [model.logits(model.forward(some, at, attention)) for some, at in parts][-1][-1]

    long, short = load(tmp_path), load(tmp_path, max_model_len=16)
    torch.testing.assert_close(last(long, [30]), last(long, [8, 22]))
    assert not torch.allclose(last(long, [30]), last(short, [30]), atol=1e-2)
