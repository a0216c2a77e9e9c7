"""Models that answer with numbers, on tiny random checkpoints: against transformers in float32, alone and in a batch."""

from __future__ import annotations

import json
import re
import struct
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient
from tokenizers import Tokenizer, processors
from torch import Tensor
from typing_extensions import Self

from engine.arbiter import Arbiter
from engine.core.errors import ConfigError, HeadlessModelError, InvalidRequestError, ModelLoadError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.spans import Span
from engine.core.step import PendingStep, StepPlan, StepResult
from engine.core.types import Pooling, PoolingParams, Request
from engine.files.hf_config import HFConfig
from engine.runtime.models.encoder_families import read_encoder
from engine.runtime.native.decoder import NativeDecoder
from engine.runtime.native.library import native
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from engine.startup.model_check import check_model
from engine.text.tokenizer_files import load_tokenizer
from quire import LLM
from server.app import create_app
from server.settings.app_config import AppConfig
from tests.cpu.gguf_rows import written
from tests.cpu.served_models import save_tokenizer
from tests.cpu.test_weights_gguf import SANDWICH, convert
from tests.cpu.test_weights_gguf import write as write_decoder
from tests.integrity import check_scheduler
from tests.patience import eventually

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 70,
    "pad_token_id": 0,
}
OFFSET = SIZES | {"pad_token_id": 1, "max_position_embeddings": 72}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
GEMMA = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 16,
    "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
DISTIL = {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "vocab_size": 128, "max_position_embeddings": 70}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", OFFSET),
    "xlm-roberta": ("XLMRoberta", OFFSET),
    "camembert": ("Camembert", OFFSET),
    "distilbert": ("DistilBert", DISTIL),
    "mpnet": ("MPNet", OFFSET),
    "nomic_bert": ("NomicBert", SIZES),
    "nomic_bert-first": ("NomicBert", SIZES),
    "gte": ("Gte", SIZES),
    "new": ("Gte", SIZES),
    "modernbert": (
        "ModernBert",
        SIZES | ENDS | {"num_hidden_layers": 4, "local_attention": 16, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "eurobert": ("EuroBert", SIZES | ENDS | {"num_key_value_heads": 2, "mask_token_id": 3}),
    "gemma3": ("Gemma3Text", SIZES | ENDS | GEMMA),
}
CLASSIFIERS = {
    **{name: KINDS[name] for name in KINDS if name not in ("camembert", "gemma3")},
    "qwen3": ("Qwen3", SIZES | ENDS | {"num_key_value_heads": 2, "head_dim": 32}),
    "modernbert-mean": ("ModernBert", KINDS["modernbert"][1] | {"classifier_pooling": "mean", "classifier_bias": True}),
    "eurobert-mean": ("EuroBert", KINDS["eurobert"][1] | {"classifier_pooling": "mean"}),
}
LENGTHS = (1, 2, 5, 17, 33, 60, 64, 3)
ENGINE: dict[str, Any] = {"device": "cpu", "num_threads": 1}
_generator = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(4, 128, (length,), generator=_generator) for length in LENGTHS]


def save(folder: Path, kind: tuple[str, dict[str, Any]], ending: str = "Model", **changes: Any) -> Any:
    """A random model with a tokenizer; returned as transformers loads it."""
    name, settings = kind
    torch.manual_seed(1)
    model = getattr(transformers, name + ending)(getattr(transformers, name + "Config")(**settings, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return getattr(transformers, name + ending).from_pretrained(folder, attn_implementation="eager").eval()


def save_published(folder: Path, name: str, ending: str = "Model", **changes: Any) -> Any:
    """The same for a family by its name here, two of which have a config as their authors spell it."""
    model = save(folder, (KINDS if ending == "Model" else CLASSIFIERS)[name], ending, **changes)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    if name == "new":  # https://kexue.fm/archives/9706: a longer base, and all frequencies divided
        rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
        rotary.inv_freq = (500.0 * 2) ** (-torch.arange(0, 16, 2) / 16) / 2 ** (2 / 16)
        names = [each.replace("Gte", "New") for each in values["architectures"]]
        values |= {"model_type": name, "architectures": names, "position_embedding_type": "rope"}
        values |= {"rope_parameters": None, "rope_theta": 500, "rope_scaling": {"type": "ntk", "factor": 2.0}}
    elif name == "nomic_bert-first":
        spelled = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
                   "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
                   "layer_norm_eps": "layer_norm_epsilon"}  # fmt: skip
        values |= {theirs: values.pop(ours) for ours, theirs in spelled.items()}
        rope = values.pop("rope_parameters")
        values |= {"rotary_emb_base": rope["rope_theta"], "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False}
        values |= {"activation_function": "swiglu", "rotary_scaling_factor": 2, "max_trained_positions": 66}
        del values["hidden_act"]
    values["auto_map"] = {"AutoConfig": "configuration.Config", "AutoModel": "modeling.Model"}  # which is never run
    path.write_text(json.dumps(values))
    return model


def speak(folder: Path, *, pair: str = "w5 $A w2 $B w2") -> None:
    """Have the tokenizer put w5 before a text and w2 behind it, as BERT's puts [CLS] and [SEP]."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [("w5", 5), ("</s>", 2)]
    pair = pair.replace("w2", "</s>")
    backend.post_processor = processors.TemplateProcessing("w5 $A </s>", pair, special)
    backend.save(str(folder / "tokenizer.json"))


def states(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids[None]).last_hidden_state[0]


def given(prompts: list[Tensor]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids.tolist()} for ids in prompts]


def numbers(outputs: list[Any]) -> list[list[float]]:
    return [output.outputs.embedding for output in outputs]


def describe(folder: Path, **files: Any) -> None:
    """Write sentence-transformers' files; "__" is a slash."""
    for name, content in files.items():
        path = folder / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))


def modules(*kinds: str) -> list[dict[str, Any]]:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    return [
        {"idx": index, "name": str(index), "path": paths[kind], "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("name", KINDS)
def test_every_family_is_transformers_own(name: str, tmp_path: Path) -> None:
    """And an answer has the same bits alone and in a batch of all lengths, of which no step holds the longest two."""
    model = save_published(tmp_path, name)
    with LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=48, max_num_seqs=8, **ENGINE) as llm:
        found = numbers(llm.embed(given(PROMPTS), progress=False))  # the mean: what an encoder without files has
        for ids, vector in zip(PROMPTS, found, strict=True):
            expected = torch.nn.functional.normalize(states(model, ids).mean(0), dim=0)
            assert vector == pytest.approx(expected.tolist(), abs=1e-5)
        first = numbers(llm.embed(given(PROMPTS), pooling="cls", normalize=False, progress=False))
        for ids, vector in zip(PROMPTS, first, strict=True):
            assert vector == pytest.approx(states(model, ids)[0].tolist(), abs=1e-4)
        if native() is not None:
            alone = [numbers(llm.embed(each, progress=False))[0] for each in given(PROMPTS)]
            assert alone == found


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("name", ["bert", "roberta", "nomic_bert", "modernbert", "mpnet"])
def test_a_pass_is_one_call_of_the_library_or_the_same_in_torch(
    name: str, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native() is None:
        pytest.skip("no native library and no C compiler")
    calls, forward = list[int](), NativeDecoder.forward
    monkeypatch.setattr(NativeDecoder, "forward", lambda *args, **named: calls.append(1) or forward(*args, **named))
    model = save(tmp_path, KINDS[name])
    with LLM(str(tmp_path), dtype="float32", attention_backend=attention, **ENGINE) as llm:
        found = numbers(llm.embed(given(PROMPTS), normalize=False, progress=False))
        for ids, vector in zip(PROMPTS, found, strict=True):
            assert vector == pytest.approx(states(model, ids).mean(0).tolist(), abs=1e-4)
    assert bool(calls) is (attention == "auto" and name != "mpnet")


@pytest.mark.parametrize(("name", "more"), [("bert", {"quantization": "int8"}), ("modernbert", {}), ("mpnet", {})])
def test_fewer_bits_are_close_and_alike_in_every_batch(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    if native() is None:
        pytest.skip("no native library and no C compiler")
    model = save(tmp_path, KINDS[name])
    with LLM(str(tmp_path), dtype="bfloat16", **more, **ENGINE) as llm:
        found = numbers(llm.embed(given(PROMPTS), progress=False))
        for ids, vector in zip(PROMPTS, found, strict=True):
            assert float(torch.tensor(vector) @ torch.nn.functional.normalize(states(model, ids).mean(0), dim=0)) > 0.99
        assert [numbers(llm.embed(each, progress=False))[0] for each in given(PROMPTS)] == found


@pytest.mark.parametrize("name", ["bert", "mpnet", "eurobert"])
def test_a_pass_pauses_within_operations_and_is_the_same(name: str, tmp_path: Path) -> None:
    """And one that is not needed ends where it is. A decoder's pass is one call of the native library."""
    save(tmp_path, KINDS[name])
    config = EngineConfig(model=str(tmp_path), dtype="float32", max_num_seqs=8, **ENGINE)
    engine: Any = build_engine(config, lambda _: None, arbiter=Arbiter())

    def launch() -> PendingStep:
        scheduler = Scheduler(engine.config)
        for index, ids in enumerate(PROMPTS):
            params, spans = PoolingParams(pooling=Pooling.MEAN), (Span(0, len(ids), b"", is_atomic=True),)
            request = Request(
                request_id=str(index), prompt=tuple(ids.tolist()), params=params, arrival_s=0.0, spans=spans
            )
            scheduler.add(request)
        return engine._runner.run(scheduler.plan(0.0))

    def pause(step: PendingStep, most: int) -> int:
        return next((count for count in range(most) if step.advance(0.0)), most)

    whole, paused, left = launch().wait(), launch(), launch()
    assert pause(paused, 10_000) > (30 if native() is not None else 3)
    assert paused.wait() == whole
    assert len(whole.pooled) == len(PROMPTS)
    pause(left, 3)
    left.close()
    assert left.advance(0.0)
    assert left.wait() == StepResult(token_ids=[])
    pause(launch(), 3)
    engine.stop(0.0)  # which was never started, and lets go of its last step
    assert "quire-pieces" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("name", "attention", "pauses_above"),
    [*((name, "auto", most) for name in ("bert", "modernbert", "eurobert") for most in (0, 20)), ("bert", "torch", 0)],
)
def test_short_texts_pass_beside_a_long_one_that_has_paused(
    tmp_path: Path, name: str, attention: str, pauses_above: int
) -> None:
    """Wherever it has, and all have the bits that they have alone; short passes may pause as well."""
    save(tmp_path, KINDS[name])
    config = EngineConfig(
        model=str(tmp_path),
        dtype="float32",
        max_num_batched_tokens=20,
        attention_backend=attention,
        max_num_seqs=8,
        **ENGINE,
    )
    engine: Any = build_engine(config, lambda _: None, arbiter=Arbiter())
    runner, scheduler = engine._runner, Scheduler(engine.config)
    runner.pauses_above = pauses_above
    *shorts, long = sorted(PROMPTS, key=len)

    def add(ids: Tensor, name: str) -> None:
        params, spans = PoolingParams(pooling=Pooling.MEAN), (Span(0, len(ids), b"", is_atomic=True),)
        scheduler.add(Request(request_id=name, prompt=tuple(ids.tolist()), params=params, arrival_s=0.0, spans=spans))

    def finish(plan: StepPlan, step: PendingStep) -> Any:
        step.advance(0.0)
        result = step.wait()
        scheduler.commit(plan, result, 0.0)
        check_scheduler(scheduler)
        return [*result.pooled.values()]

    def alone(*texts: Tensor) -> list[Any]:
        for index, ids in enumerate(texts):
            add(ids, f"alone {index}")
        found = []
        while (plan := scheduler.plan(0.0)) is not None:
            found += finish(plan, runner.run(plan))
        return found

    assert len(long) > 20 >= len(shorts[0])
    wanted, [wanted_long] = alone(*shorts[:3]), alone(long)
    for name in ("long", "next"):  # one as long waits for the other
        add(long, name)
    plan = scheduler.plan(0.0)
    step = runner.run(plan)
    while not step.advance(0.0):
        assert alone(*shorts[:3]) == wanted
    assert finish(plan, step) == [wanted_long]
    assert alone() == [wanted_long]
    for num_pauses in range(1, 40):  # then it goes on to its end: also from within what prepares its attention
        add(long, "long")
        plan = scheduler.plan(0.0)
        step = runner.run(plan)
        for _ in range(num_pauses):
            step.advance(0.0)
        assert alone(shorts[0]) == wanted[:1]
        result = step.wait()
        scheduler.commit(plan, result, 0.0)
        assert [*result.pooled.values()] == [wanted_long], num_pauses
    engine.stop(0.0)


def scored(model: Any, ids: Tensor, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids[None], **inputs).logits[0]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_classifier_is_transformers_own(name: str, tmp_path: Path) -> None:
    model = save_published(tmp_path, name, "ForSequenceClassification", num_labels=3)
    with LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=48, max_num_seqs=8, **ENGINE) as llm:
        found = llm.classify(given(PROMPTS), use_activation=False, progress=False)
        for ids, output in zip(PROMPTS, found, strict=True):
            assert output.outputs.probs == pytest.approx(scored(model, ids).tolist(), abs=1e-5)
        if native() is not None:
            alone = [llm.classify(each, use_activation=False, progress=False)[0] for each in given(PROMPTS)]
            assert [each.outputs for each in alone] == [each.outputs for each in found]
        (probable,) = llm.classify(given(PROMPTS[3:4]), progress=False)
        assert probable.outputs.probs == pytest.approx(scored(model, PROMPTS[3]).softmax(0).tolist(), abs=1e-5)
        for call in (lambda: llm.embed("w7"), lambda: llm.rerank("w7", ["w8"]), lambda: llm.generate("w7")):
            with pytest.raises(InvalidRequestError, match="scores 3 labels alone"):
                call()


@pytest.mark.parametrize(("name", "num"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)])
def test_reward_models_score_the_last_token(name: str, num: int, tmp_path: Path) -> None:
    """Of a whole answer as it is, of a step as a probability; their code is not transformers', the layers are."""
    model = save(tmp_path, ("Qwen2", SIZES | ENDS | {"num_key_value_heads": 2}))
    torch.manual_seed(2)
    score = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, num))
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = {f"model.{key}": value for key, value in load_file(file).items()}
    save_file(tensors | {f"score.{key}": value for key, value in score.state_dict().items()}, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [name]}))
    with LLM(str(tmp_path), dtype="float32", **ENGINE) as llm:
        for ids, output in zip(PROMPTS, llm.classify(given(PROMPTS), progress=False), strict=True):
            with torch.no_grad():
                expected = score(states(model, ids)[-1])
            wanted = expected if num == 1 else expected.softmax(0)
            assert output.outputs.probs == pytest.approx(wanted.tolist(), abs=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# What is served over HTTP


class Served:
    """A model over HTTP, in this process."""

    def __init__(self, folder: Path, data_dir: Path | None = None, **settings: Any) -> None:
        engine = build_engine(EngineConfig(model=str(folder), dtype="float32", **ENGINE, **settings), lambda _: None)
        config = AppConfig(model=str(folder), served_model_names=("model",), shutdown_timeout_s=0.0, data_dir=data_dir)
        self.client = TestClient(create_app(engine, load_tokenizer(str(folder)), config), base_url="http://127.0.0.1")

    def __enter__(self) -> Self:
        self.client.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.client.__exit__(*error)

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, path: str, **fields: Any) -> str:
        answer = self.client.post(path, json=fields)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]["message"]


def ids_of(text: str) -> Tensor:
    return torch.tensor([5, *(int(word[1:]) for word in text.split()), 2])


@pytest.fixture
def embedder(tmp_path: Path) -> Iterator[tuple[Served, Callable[[Tensor], Tensor]]]:
    """A mean, a dense module with tanh, length one; prompts; and what sentence-transformers computes with it."""
    model = save(tmp_path, KINDS["bert"])
    speak(tmp_path)
    dense = {"linear.weight": torch.randn(24, 64) / 8, "linear.bias": torch.randn(24)}
    activation = "torch.nn.modules.activation.Tanh"
    describe(
        tmp_path,
        modules=modules("Transformer", "Pooling", "Dense", "Normalize"),
        config_sentence_transformers={"prompts": {"query": "w9 w8 ", "passage": "w7 "}, "default_prompt_name": None},
        sentence_bert_config={"max_seq_length": 20, "do_lower_case": False},
        **{
            "1_Pooling__config": {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True},
            "2_Dense__config": {
                "in_features": 64,
                "out_features": 24,
                "bias": True,
                "activation_function": activation,
            },
        },
    )
    save_file(dense, tmp_path / "2_Dense" / "model.safetensors")

    def expected(ids: Tensor) -> Tensor:
        pooled = torch.tanh(dense["linear.weight"] @ states(model, ids).mean(0) + dense["linear.bias"])
        return torch.nn.functional.normalize(pooled, dim=0)

    with Served(tmp_path) as served:
        yield served, expected


def test_sentence_transformers_files_decide(embedder: tuple[Served, Callable[[Tensor], Tensor]]) -> None:
    served, expected = embedder
    text = "w20 w30 w40"

    def embedded(**fields: Any) -> list[float]:
        return served.post("/v1/embeddings", **fields)["data"][0]["embedding"]

    assert embedded(input=text) == pytest.approx(expected(ids_of(text)).tolist(), abs=1e-5)
    assert embedded(input=[[20, 30]]) == pytest.approx(expected(torch.tensor([20, 30])).tolist(), abs=1e-5)
    for kind, before in {"query": "w9 w8 ", "document": "w7 ", "search_query": "w9 w8 ", "passage": "w7 "}.items():
        found = embedded(input=text, input_type=kind)
        assert found == pytest.approx(expected(ids_of(before + text)).tolist(), abs=1e-5), kind
    short = expected(ids_of(text))[:7]
    assert embedded(input=text, dimensions=7) == pytest.approx((short / short.norm()).tolist(), abs=1e-5)
    assert "this model's vectors have 24" in served.refusal("/v1/embeddings", input=text, dimensions=25)
    long = " ".join(["w6"] * 24)
    assert "At most 20 tokens" in served.refusal("/v1/embeddings", input=long)
    cut = expected(ids_of(" ".join(["w6"] * 18)))
    assert embedded(input=long, truncate_prompt_tokens=-1) == pytest.approx(cut.tolist(), abs=1e-5)
    assert "2 tokens stand around a text" in served.refusal("/v1/embeddings", input=long, truncate_prompt_tokens=2)
    left = {"input": long, "input_type": "query", "truncate_prompt_tokens": 6, "truncation_side": "left"}
    assert embedded(**left) == pytest.approx(expected(ids_of("w9 w8 w6 w6")).tolist(), abs=1e-5)
    short = {"input": "w6 w6", "input_type": "query", "truncate_prompt_tokens": 4}
    assert "4 tokens stand around a text" in served.refusal("/v1/embeddings", **short), "the prompt alone is no text"
    # An embedder ranks by cosines, with the prompts of both kinds.
    ranked = served.post("/v1/rerank", query="w20", documents=["w30 w31", "w40"], return_documents=False)["results"]
    query = expected(ids_of("w9 w8 w20"))
    wanted = [float(query @ expected(ids_of("w7 " + document))) for document in ("w30 w31", "w40")]
    assert {each["index"]: each["relevance_score"] for each in ranked} == pytest.approx(
        dict(enumerate(wanted)), abs=1e-5
    )
    assert [each["relevance_score"] for each in ranked] == sorted(wanted, reverse=True) or len(ranked) == 2
    assert "document" not in ranked[0]


def test_texts_are_lowered_where_the_files_say_so(tmp_path: Path) -> None:
    save(tmp_path, KINDS["bert"])
    pooling = {"1_Pooling__config": {"pooling_mode": "mean"}}
    for lowers, ids in ((False, [0, 0, 0]), (True, [7, 20, 21])):
        files = {
            "config_sentence_transformers": {"prompts": {"query": "W7 "}},
            "sentence_bert_config": {"do_lower_case": lowers},
        }
        describe(tmp_path, modules=modules("Transformer", "Pooling"), **files, **pooling)
        with LLM(str(tmp_path), dtype="float32", **ENGINE) as llm:
            (output,) = llm.embed("W20 W21", input_type="query", progress=False)
            assert output.prompt_token_ids == ids


def test_dimensions_scale_what_the_files_leave_as_it_is(tmp_path: Path) -> None:
    model = save(tmp_path, KINDS["bert"])
    describe(tmp_path, modules=modules("Transformer", "Pooling"), **{"1_Pooling__config": {"pooling_mode": "mean"}})
    pooled = states(model, torch.tensor([20, 30])).mean(0)
    with Served(tmp_path) as served:

        def embedded(**fields: Any) -> list[float]:
            return served.post("/v1/embeddings", input=[20, 30], **fields)["data"][0]["embedding"]

        cut = pooled[:7]
        assert embedded() == pytest.approx(pooled.tolist(), abs=1e-4)
        assert embedded(dimensions=7) == pytest.approx((cut / cut.norm()).tolist(), abs=1e-5)
        assert embedded(dimensions=7, normalize=False) == pytest.approx(cut.tolist(), abs=1e-4)
        packed = served.post("/v1/embeddings", input=[20, 30], dimensions=7, encoding_format="base64")
        assert struct.unpack("<7f", b64decode(packed["data"][0]["embedding"])) == tuple(embedded(dimensions=7))
        raw = served.post("/pooling", input=[20, 30], dimensions=7, use_activation=False)["data"][0]["data"]
        assert raw == pytest.approx(cut.tolist(), abs=1e-4)


def test_an_embedder_says_what_it_does_not_do(embedder: tuple[Served, Callable[[Tensor], Tensor]]) -> None:
    served, _ = embedder
    chat = {"messages": [{"role": "user", "content": "w5"}]}
    for path, body in {"/v1/chat/completions": chat, "/v1/completions": {"prompt": "w5"}}.items():
        assert served.refusal(path, **body) == str(HeadlessModelError())
    assert "scores no labels: it serves vectors alone" in served.refusal("/v1/classify", input="w5")
    assert "no sum of log probabilities" in served.refusal("/v1/score", text_1="w5", text_2="w6", reduction="sum")
    assert served.client.get("/model_info").json()["is_generation"] is False


def types_of(ids: Tensor) -> Tensor:
    ends = (ids == 2).long()
    return (ends.cumsum(0) - ends > 0).long()


def test_a_cross_encoder_ranks_pairs(tmp_path: Path) -> None:
    """BERT's second text has another type; its score is what sentence-transformers' CrossEncoder gives."""
    model = save(tmp_path, KINDS["bert"], "ForSequenceClassification", num_labels=1)
    speak(tmp_path, pair="w5:0 $A:0 w2:0 $B:1 w2:1")
    path = tmp_path / "tokenizer.json"  # whose end is called as BERT's is
    path.write_text(path.read_text().replace('"content": "</s>"', '"content": "[SEP]"'))
    values = json.loads((tmp_path / "config.json").read_text())
    activation = "torch.nn.modules.linear.Identity"
    (tmp_path / "config.json").write_text(
        json.dumps({**values, "sentence_transformers": {"activation_fn": activation}})
    )
    added = json.loads(path.read_text())["added_tokens"]
    if not any(each["content"] == "[SEP]" for each in added):
        content = json.loads(path.read_text())
        content["added_tokens"].append(
            {
                "id": 2,
                "content": "[SEP]",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
        path.write_text(json.dumps(content).replace("</s>", "[SEP]"))
        config = tmp_path / "tokenizer_config.json"
        config.write_text(config.read_text().replace("</s>", "[SEP]"))
    query, documents = "w20 w21", ["w30 w31 w32", "w40", "w50 w51"]
    both = [torch.cat((ids_of(query), ids_of(each)[1:])) for each in documents]
    wanted = [float(scored(model, ids, token_type_ids=types_of(ids)[None])[0]) for ids in both]
    with Served(tmp_path) as served:
        pooled = served.post("/pooling", input="w30 w31", dimensions=1)["data"][0]["data"]
        assert pooled == pytest.approx(scored(model, ids_of("w30 w31")).sigmoid().tolist(), abs=1e-5), (
            "a score stays one"
        )
        scores = served.post("/v1/score", text_1=query, text_2=documents)["data"]
        assert [each["score"] for each in scores] == pytest.approx(wanted, abs=1e-5)
        for route in ("/v1/rerank", "/rerank", "/v2/rerank"):
            answer = served.post(
                route, query=query, documents=[documents[0], {"text": documents[1]}, documents[2]], top_n=2
            )
            best = sorted(range(3), key=lambda index: -wanted[index])[:2]
            assert [each["index"] for each in answer["results"]] == best
            assert [each["document"]["text"] for each in answer["results"]] == [documents[index] for index in best]
            assert answer["usage"]["total_tokens"] == sum(map(len, both))
        cut = served.post("/v1/score", text_1=query, text_2="w30 w31 w32", truncate_prompt_tokens=6)["data"][0]["score"]
        ids = torch.tensor([*both[0][:5].tolist(), 2])
        assert cut == pytest.approx(float(scored(model, ids, token_type_ids=types_of(ids)[None])[0]), abs=1e-5)
        left = {
            "text_1": query,
            "text_2": "w30 w31 w32",
            "truncate_prompt_tokens": len(both[0]) - 2,
            "truncation_side": "left",
        }
        ids = torch.cat((both[0][:-4], both[0][-2:]))
        found = served.post("/v1/score", **left)["data"][0]["score"]
        assert found == pytest.approx(float(scored(model, ids, token_type_ids=types_of(ids)[None])[0]), abs=1e-5)
        for most in (-1, 5):  # a query that leaves nothing of a document
            refusal = served.refusal("/v1/rerank", query="w5 " * 80, documents=["w6"], truncate_prompt_tokens=most)
            assert "stand around a text, which would be gone" in refusal
        single = served.post("/v1/classify", input="w30 w31")["data"][0]
        assert (single["label"], single["num_classes"]) == (None, 1)
        assert single["probs"] == pytest.approx(scored(model, ids_of("w30 w31")).sigmoid().tolist(), abs=1e-5)
        assert "makes no vectors: it scores texts alone" in served.refusal("/v1/embeddings", input="w5")
        assert "Send pairs to /v1/rerank" in served.refusal("/v1/completions", prompt="w5")
        long = served.refusal("/v1/rerank", query="w5", documents=["w6", "w7 " * 80])
        assert long.startswith("Item 1 of 2: ")
        assert "but documents has 84; shorten it" in long
        for size in (80, 800):  # too many tokens, and so many characters that they are not even read
            for route, first, second in (("/v1/rerank", "query", "documents"), ("/v1/score", "text_1", "text_2")):
                fields = {first: "w7 " * size, second: ["w6"]}
                assert f"{first} has " in served.refusal(route, **fields)
        empty = served.post("/v1/score", text_1="w5", text_2="")["data"][0]["score"]
        ids = torch.tensor([5, 5, 2, 2])
        assert empty == pytest.approx(float(scored(model, ids, token_type_ids=types_of(ids)[None])[0]), abs=1e-5)


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/rerank", {"query": "w20", "documents": ["w30 w31", "w40"]}, "results"),
        ("/v1/score", {"text_1": "w20", "text_2": ["w30 w31", "w40"]}, "data"),
        ("/v1/classify", {"input": ["w30 w31", "w40"]}, "data"),
        ("/pooling", {"input": ["w30 w31", "w40"]}, "data"),
    ],
)
def test_lines_of_batches_are_scored_as_requests_are(
    endpoint: str, body: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    save(tmp_path / "model", KINDS["bert"], "ForSequenceClassification", num_labels=1)
    with Served(tmp_path / "model", tmp_path / "data") as served:
        line = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": body})
        file = served.client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", line)}).json()
        asked = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
        batch = served.post("/v1/batches", **asked)["id"]
        eventually(lambda: served.client.get(f"/v1/batches/{batch}").json()["status"] == "completed")
        output = served.client.get(f"/v1/batches/{batch}").json()["output_file_id"]
        [answer] = map(json.loads, served.client.get(f"/v1/files/{output}/content").text.splitlines())
        assert answer["response"]["body"][kind] == served.post(endpoint, **body)[kind]


def test_a_causal_model_becomes_a_reranker_by_two_tokens(tmp_path: Path) -> None:
    """By its name, or as vLLM's --hf-overrides have it: how much likelier "yes" is than "no" behind Qwen3-Reranker's template."""
    tmp_path = tmp_path / "Qwen3-Reranker-tiny"
    kind = "Qwen3", CLASSIFIERS["qwen3"][1] | {"max_position_embeddings": 200}
    model = save(tmp_path, kind, "ForCausalLM", tie_word_embeddings=True)
    overrides: dict[str, Any] = {"classifier_from_token": ["w30", "w31"]}
    with LLM(str(tmp_path), dtype="float32", hf_overrides=overrides, **ENGINE) as llm:
        (ranked,) = llm.rerank("w20", ["w40 w41"], progress=False)
        (output,) = llm.score("w20", "w40 w41", progress=False)
        ids = torch.tensor(output.prompt_token_ids)
        # Of the template the tokenizer of these tests knows no word; every one is id 0.
        assert [each for each in ids.tolist() if each] == [20, 40, 41]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, -1]
        assert (
            output.outputs.score == ranked.score == pytest.approx(float((logits[31] - logits[30]).sigmoid()), abs=1e-5)
        )
    with Served(tmp_path, hf_overrides=overrides) as served:
        scores = served.post("/v1/score", text_1="w20", text_2="w40 w41", use_activation=False)["data"]
        assert scores[0]["score"] == pytest.approx(float(logits[31] - logits[30]), abs=1e-4)
        answer = served.post("/v1/rerank", query="w20", documents=["w40 w41"], use_activation=False)
        assert answer["results"][0]["relevance_score"] == scores[0]["score"]
    plain = overrides | {"is_original_qwen3_reranker": False}
    with LLM(str(tmp_path), dtype="float32", hf_overrides=plain, **ENGINE) as llm:
        (each,) = llm.classify(given([ids]), use_activation=False, progress=False)
        assert each.outputs.probs == pytest.approx([float(logits[30]), float(logits[31])], abs=1e-4)
    with pytest.raises(ModelLoadError, match="tokens of the model's tokenizer"):
        LLM(str(tmp_path), dtype="float32", hf_overrides={**plain, "classifier_from_token": ["no", "yes"]}, **ENGINE)


@pytest.mark.parametrize(
    ("name", "changes"), [("Qwen3", {"tie_word_embeddings": True}), ("Qwen3", {}), ("Mistral", {"sliding_window": 8})]
)
def test_an_embedder_of_a_decoders_layout_has_no_head(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Qwen3-Embedding, e5-mistral and SFR-Embedding: names without a prefix, the last token behind an end, and prompts."""
    model = save(tmp_path, (name, CLASSIFIERS["qwen3"][1]), **changes)
    assert "layers.0.self_attn.q_proj.weight" in load_file(tmp_path / "model.safetensors")
    speak(tmp_path)
    describe(
        tmp_path,
        modules=modules("Transformer", "Pooling", "Normalize"),
        config_sentence_transformers={"prompts": {"web_search_query": "w30 w31 ", "document": ""}},
        **{"1_Pooling__config": {"pooling_mode_lasttoken": True, "include_prompt": True}},
    )
    with LLM(str(tmp_path), dtype="float32", **ENGINE) as llm:
        text = " ".join(f"w{number}" for number in range(20, 40))
        for kind, before in ((None, ""), ("web_search_query", "w30 w31 ")):
            (output,) = llm.embed(text, input_type=kind, progress=False)
            expected = torch.nn.functional.normalize(states(model, ids_of(before + text))[-1], dim=0)
            assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-5)
        with pytest.raises(HeadlessModelError):
            llm.generate("w20")


def test_older_names_of_tensors_are_read(tmp_path: Path) -> None:
    model = save(tmp_path, KINDS["bert"])
    file = tmp_path / "model.safetensors"
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {"cls.predictions.bias": torch.zeros(128)}
    for name, tensor in load_file(file).items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        tensors["bert." + name] = tensor
    save_file(tensors, file, {"format": "pt"})
    with LLM(str(tmp_path), dtype="float32", **ENGINE) as llm:
        (found,) = numbers(llm.embed(given(PROMPTS[3:4]), normalize=False, progress=False))
        assert found == pytest.approx(states(model, PROMPTS[3]).mean(0).tolist(), abs=1e-5)


GGUF_NAMES = {
    "bert": {
        "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
        "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
        "attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
        "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
        "intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
        "classifier.dense": "cls", "classifier.out_proj": "cls.output", "classifier": "cls.output",
    },
    "nomic-bert": {
        "embeddings.word_embeddings": "token_embd", "embeddings.token_type_embeddings": "token_types",
        "emb_ln": "token_embd_norm", "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "norm1": "attn_output_norm",
        "mlp.fc11": "ffn_up", "mlp.fc12": "ffn_gate", "mlp.fc2": "ffn_down", "norm2": "layer_output_norm",
    },
    "modern-bert": {
        "embeddings.tok_embeddings": "token_embd", "embeddings.norm": "token_embd_norm", "final_norm": "output_norm",
        "attn.Wqkv": "attn_qkv", "attn.Wo": "attn_output", "mlp_norm": "ffn_norm", "mlp.Wi": "ffn_up", "mlp.Wo": "ffn_down",
        "head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output",
    },
}  # fmt: skip
GGUF_SETTINGS: dict[str, dict[str, Any]] = {
    "bert": {},
    "nomic-bert": {"rope.freq_base": 1000.0},
    "modern-bert": {"attention.sliding_window": 16, "attention.sliding_window_pattern": 3, "block_count": 4},
}
_LAYER = re.compile(r"(?:encoder\.layers?|layers)\.(\d+)\.(.+)")


def write_gguf(folder: Path, arch: str, pooling: int, first_position: int = 0, labels: tuple[str, ...] = ()) -> Path:
    """A file with the metadata and names that llama.cpp's converter writes, and its marks in the tokens."""
    path = folder / f"{arch}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    common = {"context_length": 70, "embedding_length": 64, "feed_forward_length": 96, "block_count": 3,
              "attention.head_count": 4, "pooling_type": pooling}  # fmt: skip
    for name, value in (common | GGUF_SETTINGS[arch]).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{arch}.{name}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_epsilon", 1e-5 if arch == "modern-bert" else 1e-12)
    if labels:
        writer.add_classifier_output_labels(labels)
    special = {0: "[UNK]", 2: "[SEP]", 5: "[CLS]"}
    writer.add_tokenizer_model("bert")
    writer.add_token_list([special.get(i, f"▁w{i}") for i in range(128)])
    writer.add_token_types([3 if i in special else 1 for i in range(128)])
    for role, token_id in (("unknown", 0), ("seperator", 2), ("bos", 5)):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token_id)
    names = GGUF_NAMES[arch]
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, end = re.sub(r"^(?:bert|roberta|model)\.", "", name).rpartition(".")
        layer = _LAYER.fullmatch(module)
        if module == "embeddings.position_embeddings":
            tensor = tensor[first_position:].clone()
        place, role = (f"blk.{layer[1]}.", layer[2]) if layer else ("", module)
        if not role.startswith("pooler"):
            writer.add_tensor(f"{place}{names.get(role, role)}.{end}", tensor.numpy())
    return written(writer, path)


@pytest.mark.parametrize("arch", GGUF_NAMES)
def test_encoders_are_read_from_gguf(arch: str, tmp_path: Path) -> None:
    model = save(tmp_path, KINDS[{"nomic-bert": "nomic_bert", "modern-bert": "modernbert"}.get(arch, arch)])
    with LLM(str(write_gguf(tmp_path, arch, pooling=2)), dtype="float32", **ENGINE) as llm:
        found = numbers(llm.embed(given(PROMPTS), progress=False))
        for ids, vector in zip(PROMPTS, found, strict=True):
            expected = torch.nn.functional.normalize(states(model, ids)[0], dim=0)
            assert vector == pytest.approx(expected.tolist(), abs=1e-4)
        (spoken,) = llm.embed("W20 w21!", progress=False)
        assert spoken.prompt_token_ids == [5, 20, 21, 0, 2]


@pytest.mark.parametrize(("name", "arch", "first"), [("roberta", "bert", 2), ("modernbert", "modern-bert", 0)])
def test_classifiers_are_read_from_gguf(name: str, arch: str, first: int, tmp_path: Path) -> None:
    model = save(tmp_path, KINDS[name], "ForSequenceClassification", num_labels=3)
    file = write_gguf(tmp_path, arch, 4, first, ("a", "b", "c"))
    with LLM(str(file), dtype="float32", **ENGINE) as llm:
        found = llm.classify(given(PROMPTS), use_activation=False, progress=False)
        for ids, output in zip(PROMPTS, found, strict=True):
            assert output.outputs.probs == pytest.approx(scored(model, ids).tolist(), abs=1e-4)
        with pytest.raises(InvalidRequestError, match="scores 3 labels alone"):
            llm.embed("w7")


def test_berts_head_in_gguf_has_no_pooler(tmp_path: Path) -> None:
    """Which llama.cpp's converter leaves out: what the file has is computed, as there."""
    model = save(tmp_path, KINDS["bert"], "ForSequenceClassification", num_labels=1)
    with LLM(str(write_gguf(tmp_path, "bert", 4)), dtype="float32", **ENGINE) as llm:
        (output,) = llm.classify(given(PROMPTS[3:4]), use_activation=False, progress=False)
        with torch.no_grad():
            expected = model.classifier(states(model.bert, PROMPTS[3])[0])
        assert output.outputs.probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_qwen3s_reranker_is_read_from_gguf(tmp_path: Path) -> None:
    """Its rows of yes and no are a head, behind its template."""
    kind = "Qwen3", CLASSIFIERS["qwen3"][1] | {"max_position_embeddings": 200}
    model = save(tmp_path, kind, "ForCausalLM", tie_word_embeddings=True)
    tensors = convert(model, "qwen3", {})
    del tensors["output.weight"]
    rows = model.lm_head.weight.detach().numpy()[[31, 30]]  # yes and no
    tensors["cls.output.weight"] = (rows, gguf.GGMLQuantizationType.F32)
    extra = {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
    file = write_decoder(tmp_path / "m.gguf", "qwen3", model.config, tensors, **extra)
    with LLM(str(file), tokenizer=str(tmp_path), dtype="float32", **ENGINE) as llm:
        (output,) = llm.score("w20", "w40 w41", progress=False)
        ids = torch.tensor(output.prompt_token_ids)
        assert [each for each in ids.tolist() if each] == [20, 40, 41]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, -1]
        assert output.outputs.score == pytest.approx(float((logits[31] - logits[30]).sigmoid()), abs=1e-4)


def test_qwen3s_embedder_is_read_from_gguf(tmp_path: Path) -> None:
    """The last token's state, whatever head its file has."""
    model = save(tmp_path, CLASSIFIERS["qwen3"], "ForCausalLM", tie_word_embeddings=True)
    tensors = convert(model, "qwen3", {})
    file = write_decoder(tmp_path / "m.gguf", "qwen3", model.config, tensors, pooling_type=3)
    with LLM(str(file), tokenizer=str(tmp_path), dtype="float32", **ENGINE) as llm:
        for ids, vector in zip(PROMPTS, numbers(llm.embed(given(PROMPTS), progress=False)), strict=True):
            expected = torch.nn.functional.normalize(states(model.model, ids)[-1], dim=0)
            assert vector == pytest.approx(expected.tolist(), abs=1e-4)
        with pytest.raises(HeadlessModelError):
            llm.generate("w5")


def test_embedding_gemma_is_read_from_gguf(tmp_path: Path) -> None:
    """With both of its dense modules."""
    model = save(tmp_path, KINDS["gemma3"], query_pre_attn_scalar=32)
    dense = [torch.randn(shape) / 8 for shape in ((96, 64), (24, 96))]
    whole = torch.nn.Module()
    whole.model, whole.config = model, model.config
    tensors = convert(whole, "gemma-embedding", SANDWICH)
    for number, weight in enumerate(dense, 2):
        tensors[f"dense_{number}.weight"] = (weight.numpy(), gguf.GGMLQuantizationType.F32)
    extra = {"pooling_type": 1, "attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False, True]}
    file = write_decoder(tmp_path / "m.gguf", "gemma-embedding", model.config, tensors, **extra)
    with LLM(str(file), tokenizer=str(tmp_path), dtype="float32", **ENGINE) as llm:
        for ids, vector in zip(PROMPTS, numbers(llm.embed(given(PROMPTS), progress=False)), strict=True):
            expected = torch.nn.functional.normalize(dense[1] @ dense[0] @ states(model, ids).mean(0), dim=0)
            assert vector == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_reranker_without_a_head_is_refused(tmp_path: Path) -> None:
    save(tmp_path, KINDS["bert"])
    with pytest.raises(ModelLoadError, match="is a reranker without a head"):
        check_model(EngineConfig(model=str(write_gguf(tmp_path, "bert", pooling=4))))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sparse": ({"modules": [{"type": "sentence_transformers.sparse_encoder.models.SpladePooling", "path": "1_Pooling"}]}, "sparse vectors are not served"),
    "two poolings": ({"1_Pooling__config": {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}}, "pooled by cls and max"),
    "no pooling": ({"1_Pooling__config": {"pooling_mode": "weightedmean"}}, "pooled by weightedmean"),
    "a folder elsewhere": ({"modules": [{"type": "models.Pooling", "path": "../1_Pooling"}]}, "a folder beside the model"),
    "no list": ({"modules": {}}, "is no list of modules"),
    "a prompt outside": ({"1_Pooling__config": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_ask_for_more_are_refused(name: str, tmp_path: Path) -> None:
    files, sentence = REFUSED[name]
    save(tmp_path, KINDS["bert"])
    describe(tmp_path, **({"modules": modules("Transformer", "Pooling")} | files))
    with pytest.raises(ModelLoadError, match=sentence):
        check_model(EngineConfig(model=str(tmp_path)))


def test_an_encoder_takes_no_adapters_and_drafts_nothing(tmp_path: Path) -> None:
    save(tmp_path, KINDS["bert"])
    ngrams = {"method": "ngram", "num_speculative_tokens": 2}
    for settings, sentence in (
        ({"allow_runtime_lora_updating": True}, "an encoder takes no adapters"),
        ({"speculative_config": ngrams}, "it generates none"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            build_engine(EngineConfig(model=str(tmp_path), **ENGINE, **settings), lambda _: None)
    with (
        LLM(str(tmp_path), dtype="float32", **ENGINE) as llm,
        pytest.raises(ConfigError, match="choose auto, last, mean, cls"),
    ):
        llm.embed("w5", pooling="max")


def test_a_rope_that_depends_on_the_length_bounds_texts() -> None:
    """As NomicBERT's first checkpoints have one; and what their code has beside is refused."""
    values = SIZES | {"model_type": "nomic_bert", "rotary_scaling_factor": 2, "max_trained_positions": 50}
    assert read_encoder(HFConfig(values, "config.json")).max_positions == 50
    for kind, key, value in (("nomic_bert", "rotary_emb_interleaved", True), ("new", "layer_norm_type", "rms_norm")):
        with pytest.raises(ModelLoadError, match=key):
            read_encoder(HFConfig(values | {"model_type": kind, key: value}, "config.json"))


def test_classes_and_kinds_that_are_not_served_are_refused(tmp_path: Path) -> None:
    save(tmp_path, KINDS["bert"], "ForTokenClassification")
    with pytest.raises(ModelLoadError, match="answers for each token"):
        check_model(EngineConfig(model=str(tmp_path)))
    values = {"architectures": ["BertModel"]}
    with pytest.raises(ConfigError, match="which Quire's own code runs"):
        check_model(EngineConfig(model=str(tmp_path), model_impl="transformers", hf_overrides=values))
    with pytest.raises(ModelLoadError, match="an encoder that Quire does not have"):
        check_model(EngineConfig(model=str(tmp_path), hf_overrides={**values, "model_type": "deberta-v2"}))
