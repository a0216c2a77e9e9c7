"""Models and settings that cannot be served: refused in one sentence, from small files, before torch, port and weights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.core.errors import ConfigError, ModelLoadError
from engine.runtime.models import config_file
from engine.settings.engine_config import EngineConfig, LoraModule
from engine.startup.model_check import check_model
from quire import LLM
from tests.cpu.served_models import save_tokenizer
from tests.cpu.test_models_families import CASES, SIZES, Case
from tests.daemon.real_daemon import ROOT, refused
from tests.patience import PATIENCE_S

LLAMA = SIZES | {"model_type": "llama", "rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLM"]}
QWEN3_5 = Case("Qwen3_5TextConfig").build().to_dict()
NEMOTRON = CASES["nemotron_h"].build().to_dict()
FALCON_H1 = CASES["falcon_h1"].build().to_dict()
GRANITE = CASES["granitemoehybrid-mamba"].build().to_dict()
GEMMA3N = CASES["gemma3n"].build().to_dict()

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "albert": (
        Case("AlbertConfig").build().to_dict(),
        "'albert' is an encoder that Quire does not have; for embeddings serve",
    ),
    "relative bert": (
        Case("BertConfig").build().to_dict() | {"position_embedding_type": "relative_key"},
        "'position_embedding_type' is 'relative_key'; Quire needs 'absolute'",
    ),
    "t5": (transformers.T5Config(d_model=64, num_layers=2).to_dict(), "'t5' is an encoder-decoder; serve a decoder"),
    "bart": (transformers.BartConfig(d_model=64).to_dict(), "'bart' is an encoder-decoder"),
    "paligemma": (transformers.PaliGemmaConfig().to_dict(), "'paligemma' takes images or sound beside text"),
    "llava": (
        transformers.LlavaConfig(text_config={"model_type": "gpt_neox"}).to_dict(),
        "'llava' takes images or sound beside text",
    ),
    **{
        kind: ({"model_type": kind, "num_hidden_layers": 4}, f"{kind!r} has {layers} layers, which Quire does not have")
        for kind, layers in (("mamba", "Mamba"), ("jamba", "Mamba"), ("kimi_linear", "Kimi Delta Attention"))
    },
    "olmo_hybrid": (Case("OlmoHybridConfig").build().to_dict(), "'olmo_hybrid' has Gated DeltaNet layers"),
    "minimax": (Case("MiniMaxConfig").build().to_dict(), "'minimax' has lightning attention layers"),
    "deepseek_v32": (LLAMA | {"model_type": "deepseek_v32"}, "'deepseek_v32' attends to tokens that an index chooses"),
    "no-method": (
        LLAMA | {"quantization_config": {"bits_per_weight": 4}},
        "quantization_config: 'quant_method' is missing; serve the checkpoint",
    ),
    "other-layers": (LLAMA | {"model_type": "granitemoehybrid", "layer_types": ["rwkv"]}, "layers of type rwkv"),
    "falcon": (transformers.FalconConfig().to_dict(), "'falcon' has attention that transformers cannot exchange"),
    "bloom": (transformers.BloomConfig().to_dict(), "'bloom' has attention that transformers cannot exchange"),
    "big_bird": (transformers.BigBirdConfig().to_dict(), "'big_bird' has attention that transformers cannot exchange"),
    "diffllama": (
        Case("DiffLlamaConfig").build().to_dict(),
        "'diffllama' takes the difference of two attentions a layer",
    ),
    "doge": (Case("DogeConfig").build().to_dict(), "'doge' adds a bias of its own to attention"),
    "nemotron": (Case("NemotronConfig").build().to_dict(), "'nemotron' does not pass to its attention"),
    "muse_glimmer": (transformers.MuseGlimmerConfig().to_dict(), "'muse_glimmer' normalises embeddings"),
    "hrm_text": (LLAMA | {"model_type": "hrm_text"}, "'hrm_text' runs each layer more than once a token"),
    "fuyu": (LLAMA | {"model_type": "fuyu", "text_config": {}}, "'fuyu' has its language model inside another model"),
    "llama4": (Case("Llama4TextConfig").build().to_dict(), "layers of type chunked_attention"),
    "classifier": (
        LLAMA | {"architectures": ["BertForTokenClassification"]},
        "BertForTokenClassification answers for each token, or with more than a score; serve a model whose class ends in",
    ),
    **{
        method: (
            LLAMA | {"quantization_config": {"quant_method": method}},
            f"quantization_config: the weights are quantized by '{method}', which cannot be read; serve the checkpoint",
        )
        for method in ("hqq", "aqlm", "quark", "eetq")
    },
    "ungated": (QWEN3_5 | {"attn_output_gate": False}, "'attn_output_gate' is False; Quire needs true"),
    "gelu": (QWEN3_5 | {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; Quire needs silu"),
    "no-tail": (QWEN3_5 | {"linear_conv_kernel_dim": 1}, "'linear_conv_kernel_dim' is 1; Quire needs 2 or more"),
    "no-step": (GRANITE | {"time_step_limit": [0.1]}, "'time_step_limit' is [0.1]; Quire needs two numbers"),
    "nan-step": (GRANITE | {"time_step_limit": [0.0, math.nan]}, "'time_step_limit' is [0.0, nan]; Quire needs two"),
    "endless-step": (GRANITE | {"time_step_limit": [math.inf, math.inf]}, "; Quire needs two numbers"),
    "vast-step": (GRANITE | {"time_step_limit": [0, 10**400]}, "; Quire needs two numbers"),
    "backward-step": (GRANITE | {"time_step_limit": [-2.0, -1.0]}, "of which the second is 0 or more"),
    "no-group": (
        GRANITE | {"mamba_n_groups": 3},
        "'mamba_n_groups' is 3; Quire needs a number that divides mamba_n_heads, 8",
    ),
    **{
        f"nemotron-{key}": (NEMOTRON | {key: value}, f"{key!r} is {value!r}")
        for key, value in {
            "mlp_hidden_act": "silu",
            "mamba_hidden_act": "gelu",
            "attention_bias": True,
            "sliding_window": 8,
            "n_groups": 3,
            "n_shared_experts": 2,
            "layers_block_type": ["mlp", "mlp"],
            "conv_kernel": 1,
            "time_step_limit": [0.0, 0.1],
        }.items()
    },
    "one-stream": (GEMMA3N | {"altup_num_inputs": 1}, "'altup_num_inputs' is 1; Quire needs 2 to 16"),
    "many-streams": (GEMMA3N | {"altup_num_inputs": 17}, "'altup_num_inputs' is 17; Quire needs 2 to 16"),
    "negative-widths": (
        GEMMA3N | {"intermediate_size": [64.5, -1, 64, 64, 64]},
        "'intermediate_size' is [64.5, -1, 64, 64, 64]; Quire needs integers of at least 1",
    ),
    **{
        f"falcon-{key}": (FALCON_H1 | {key: value}, f"{key!r} is {value!r}")
        for key, value in {
            "projectors_bias": True,
            "mlp_multipliers": [1.0, 0.0],
            "ssm_multipliers": [1.0],
            "key_multiplier": -1.0,
        }.items()
    },
    "vast-multipliers": (FALCON_H1 | {"mlp_multipliers": [5e-324, 1.0]}, "'mlp_multipliers' is [5e-324, 1.0]"),
    "vast-head": (LLAMA | {"head_dim": 1 << 17}, "'head_dim' is 131072; Quire needs at most 65536"),
    "vast-latent": (CASES["deepseek_v3"].build().to_dict() | {"kv_lora_rank": 1 << 17}, "'kv_lora_rank' is 131072"),
    "vast-row": (
        CASES["qwen3_next"].build().to_dict() | {"linear_value_head_dim": 1 << 30},
        "'linear_num_value_heads' is",
    ),
    "norm-before-gate": (FALCON_H1 | {"mamba_rms_norm": True}, "'mamba_norm_before_gate' is True; Quire needs false"),
    "one-norm": (CASES["lfm3"].build().to_dict() | {"use_sandwich_norm": False}, "'use_sandwich_norm' is False"),
    "no-kind": ({key: value for key, value in LLAMA.items() if key != "model_type"}, "'model_type' is missing"),
}


def write(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return folder


@pytest.mark.parametrize("kind", config_file._OWN_ATTENTION)
def test_what_transformers_could_exchange_is_not_refused(kind: str) -> None:
    """The table is older than the installed transformers, which may have learned it."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[kind]]
    assert not model._supports_attention_backend


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_that_cannot_be_served_is_refused_from_its_config(name: str, tmp_path: Path) -> None:
    values, sentence = KINDS[name]
    with pytest.raises(ModelLoadError) as error:
        check_model(EngineConfig(model=str(write(tmp_path, values))))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


REFUSE_ALL = """
import json, os, sys
from server.serve import main
for written, argv in json.load(sys.stdin):
    if os.fork() == 0:
        os.dup2(os.open(written, os.O_WRONLY | os.O_CREAT), 2)
        assert main(argv), "it was served"
        sys.stderr.write(str([name for name in ("torch", "transformers") if name in sys.modules]))
        sys.stderr.flush()
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `quire serve` writes as it refuses to start with each of SETTINGS. A fork for each: importing takes longest."""
    cases = {name: tmp_path_factory.mktemp("refused") for name in SETTINGS}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
    # The address is not this machine's: the value is reported, so it was checked before the port.
    argvs = [
        (str(folder / "written"), [*SETTINGS[name][0](folder), "--host", "192.0.2.1", "--port", "0"])
        for name, folder in cases.items()
    ]
    subprocess.run(
        [sys.executable, "-c", REFUSE_ALL],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        input=json.dumps(argvs),
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return {name: (folder / "written").read_text() for name, folder in cases.items()}


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def adapter(folder: Path, weights: Callable[[Path], object]) -> Path:
    """A folder of an adapter whose weights are something else."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    weights(folder / "adapter_model.safetensors")
    return folder


SETTINGS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "dtype": (lambda at: ["--dtype", "float8"], "--dtype is 'float8'; choose one of"),
    "backend": (lambda at: ["--attention-backend", "flashy"], "--attention-backend is 'flashy'; choose one of auto"),
    "length": (lambda at: ["--max-model-len", "100000"], "--max-model-len is 100000, but the model was made for 8192"),
    "length-folder": (
        lambda at: [str(write(at / "m", LLAMA)), "--load-format", "dummy", "--max-model-len", "65"],
        "--max-model-len is 65, but the model was made for 64 positions; set it to at most 64.",
    ),
    "draft": (
        lambda at: ["--speculative-config", json.dumps({"model": str(write(at / "d", KINDS["mamba"][0]))})],
        "--speculative-config: the draft model could not be loaded: ",
    ),
    "draft-vocabulary": (
        lambda at: [
            str(write(at / "m", LLAMA)),
            "--load-format",
            "dummy",
            "--speculative-config",
            json.dumps({"model": str(write(at / "d", LLAMA | {"vocab_size": 127}))}),
        ],
        "has 127 tokens and the model 128; choose one of the same family",
    ),
    "gguf-impl": (lambda at: ["--model-impl", "transformers"], "is a GGUF file, which Quire's own models alone serve"),
    "few-tokens": (
        lambda at: ["--max-num-batched-tokens", "4", "--max-num-seqs", "8"],
        "--max-num-batched-tokens is 4, less than --max-num-seqs (8)",
    ),
    "many-drafts": (
        lambda at: [
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 8}',
            "--max-model-len",
            "4",
        ],
        "num_speculative_tokens is 8, and --max-model-len is 4; a token and its drafts need 9",
    ),
    "offload-file": (
        lambda at: ["--kv-offload-config", '{"host_gib": 1, "folder": "/dev/null"}'],
        "--kv-offload-config: folder is '/dev/null', which cannot be used: /dev/null is no folder",
    ),
    "connector-file": (
        lambda at: ["--kv-transfer-config", '{"role": "prefill", "folder": "/dev/null/a"}'],
        "--kv-transfer-config: folder is '/dev/null/a', which cannot be used: /dev/null is no folder",
    ),
    "model-name-too-long": (lambda at: ["a" * 5000], "File name too long"),
    "model-null": (lambda at: ["./\udcff" + "b" * 3], "does not exist"),
    "draft-name-too-long": (lambda at: ["--speculative-config", json.dumps({"model": "/" + "a" * 5000})], "too long"),
    "adapter-name-too-long": (lambda at: ["--lora-modules", "a=/" + "a" * 5000], "too long"),
    "draft-absent": (
        lambda at: ["--speculative-config", json.dumps({"model": str(at / "none")})],
        "--speculative-config: the draft model could not be loaded: ",
    ),
    "weights": (lambda at: [str(write(at / "m", LLAMA))], "holds no .safetensors file"),
    "config-fifo": (lambda at: [str(fifo(write(at / "m", LLAMA) / "tokenizer.json").parent)], "it is a FIFO"),
    "model-fifo": (lambda at: [str(fifo(at / "m.gguf"))], "it is a FIFO, not a regular file"),
    "model-device": (lambda at: ["/dev/zero"], "it is a device, not a regular file"),
    "template-fifo": (lambda at: ["--chat-template", str(fifo(at / "t"))], "--chat-template is"),
    "template-device": (lambda at: ["--chat-template", "/dev/zero"], "it is a device, not a regular file"),
    "template-syntax": (
        lambda at: ["--chat-template", str(at / "t" if (at / "t").write_text("{% for %}") else "")],
        "The chat template cannot be read",
    ),
    "tokenizer-fifo": (lambda at: ["--tokenizer", str(fifo(at / "t.gguf"))], "it is a FIFO"),
    "tokenizer-absent": (lambda at: ["--tokenizer", str(at / "none")], "does not exist"),
    "tenants-fifo": (lambda at: ["--tenants", str(fifo(at / "t"))], "which cannot be read: it is a FIFO"),
    "tenants-device": (lambda at: ["--tenants", "/dev/zero"], "it is a device, not a regular file"),
    "data-dir-fifo": (
        lambda at: ["--data-dir", str(fifo(at / "lock").parent)],
        "which cannot be used: it is a FIFO",
    ),
    "adapter-fifo": (lambda at: ["--lora-modules", f"a={adapter(at / 'a', fifo)}"], "it is a FIFO, not a regular"),
    "adapter-link-to-device": (
        lambda at: ["--lora-modules", f"a={adapter(at / 'a', lambda path: path.symlink_to('/dev/zero'))}"],
        "it is a device, not a regular file",
    ),
    "adapter-config": (
        lambda at: ["--lora-modules", f"a={fifo_config(at / 'a')}"],
        "adapter_config.json cannot be read: it is a FIFO",
    ),
    "adapter-loop": (
        lambda at: ["--lora-modules", f"a={adapter(at / 'a', lambda path: path.symlink_to(path))}"],
        "Too many levels of symbolic links",
    ),
}


def fifo_config(folder: Path) -> Path:
    folder.mkdir()
    os.mkfifo(folder / "adapter_config.json")
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_value_is_refused_before_torch_and_port(name: str, refusals: dict[str, str]) -> None:
    sentence, modules = refusals[name].splitlines()
    assert SETTINGS[name][1] in sentence
    assert modules == "[]"


def test_a_config_file_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    status, written = refused("--config", str(fifo(tmp_path / "c")))
    assert status == 2
    assert "--config is" in written
    assert "it is a FIFO, not a regular file" in written


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", LLAMA | {"vocab_size": 5})
    save_tokenizer(folder)
    backend = json.loads((folder / "tokenizer.json").read_text())
    backend["model"]["unk_token"] = "w100"  # what any other text becomes
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    with pytest.raises(ConfigError, match="'w100', the tokenizer's id 100, and the model has 5 tokens"):
        LLM(str(folder), load_format="dummy", kv_cache_memory_bytes=4 << 20)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="--attention-backend is 'flashy'; choose one of auto"):
        EngineConfig(model="", attention_backend="flashy")


def test_an_adapter_may_be_reached_by_a_link(tmp_path: Path) -> None:
    def link(path: Path) -> None:
        (tmp_path / "weights").write_bytes(b"")
        path.symlink_to(tmp_path / "weights")

    module = LoraModule("a", str(adapter(tmp_path / "a", link)))
    check_model(EngineConfig(model=str(write(tmp_path / "m", LLAMA)), load_format="dummy", lora_modules=(module,)))
