"""Names of vLLM's offline API: those that exist here work alike, and others are refused with what to do instead."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_llm import Workshop, workshop  # noqa: F401 - a fixture

import quire
from engine.core.errors import ConfigError, InvalidRequestError
from engine.text.types import SamplingDefaults
from quire import LLM, SamplingParams, StructuredOutputsParams, TokensPrompt


@pytest.fixture
def llm(workshop: Workshop) -> Iterator[LLM]:  # noqa: F811 - the fixture
    with LLM() as made:
        yield made
        workshop.check_idle()


def test_arguments_mean_what_the_flags_mean(
    workshop: Workshop,  # noqa: F811 - the fixture
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        LLM(
            pipeline_parallel_size=1, trust_remote_code=True, quantization=None, swap_space=1, kv_offloading_size=0.5
        ).close()
    assert "no effect here: pipeline_parallel_size 1 (one daemon runs" in caplog.text
    assert workshop.config.kv_offload_gib == 0.5
    assert workshop.config.quantization == "auto"
    caplog.clear()
    with caplog.at_level(logging.INFO):
        LLM(quantization="awq").close()
    assert "no effect here: quantization awq (a checkpoint's own format is recognised" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"enable_sleep_mode": True}, "enable_sleep_mode is not served: the weights stay"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2 is not served"),
        ({"host": "localhost"}, "host is a setting of `quire serve`"),
        ({"pooler_config": {"pooling_type": "MEAN"}}, r"pooling is an argument of LLM\.embed"),
        ({"generation_config": "/nowhere"}, "it must be auto, vllm or a folder"),
        ({"max_model_lenn": 4}, "did you mean max_model_len"),
        ({"nonsense": 4}, "nonsense is not a setting of the engine; docs/reference/settings.md"),
    ],
)
def test_arguments_that_cannot_be_followed(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(**arguments)


def test_a_model_recommends_its_sampling(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    given: list[SamplingDefaults] = []

    def load(*_: object, sampling: SamplingDefaults, **__: object) -> Any:
        given.append(sampling)
        made = loaded()
        made.sampling_defaults = sampling
        return made

    from engine.llm import offline

    loaded = offline.load_tokenizer
    monkeypatch.setattr(offline, "load_tokenizer", load)
    with LLM(override_generation_config={"temperature": 0.5, "max_new_tokens": 7}) as llm:
        recommended = llm.get_default_sampling_params()
        assert (recommended.temperature, recommended.top_k, recommended.max_tokens) == (0.5, 0, 7)
        [output] = llm.generate("no bar", SamplingParams(max_tokens=50))
        assert len(output.outputs[0].token_ids) == 7
    assert given == [SamplingDefaults(temperature=0.5, top_p=0.9, max_tokens=1024, max_new_tokens=7)]


def test_a_folder_recommends_its_sampling(
    workshop: Workshop,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    given: list[Any] = []
    from engine.llm import offline

    loaded = offline.load_tokenizer
    monkeypatch.setattr(offline, "load_tokenizer", lambda *_, sampling, **__: given.append(sampling) or loaded())
    LLM(generation_config=str(tmp_path)).close()
    LLM(generation_config="vllm").close()
    assert [each.temperature for each in given] == [0.25, 1.0]


def test_prompts_as_dicts(llm: LLM) -> None:
    prompts = [TokensPrompt(prompt_token_ids=list(b"ids|"), prompt="shown"), {"prompt": "hi|", "cache_salt": "a"}]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=9), use_tqdm=False, lora_request=None, priority=[1, 2])
    assert [(output.prompt, output.outputs[0].text) for output in outputs] == [("shown", "ids"), ("hi|", "hi")]
    assert outputs[0].finished
    assert outputs[0].request_id != outputs[1].request_id
    [one] = llm.generate({"prompt": "x|"})
    assert one.outputs[0].text == "x"
    assert llm.generate({"prompt": "x|", "multi_modal_data": {}})[0].outputs[0].text == "x"
    for wrong, sentence in (
        ({"prompt": "x", "multi_modal_data": {"video": 1}}, "multi_modal_data must be"),
        ({"prompt": "x", "multi_modal_data": {"image": __file__}}, "takes text alone"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": __file__}}, "must be a text"),
        ({"prompt": "x", "mm_data": {}}, "'mm_data'"),
        ({}, "needs prompt"),
    ):
        with pytest.raises(InvalidRequestError, match=sentence):
            llm.generate(wrong)
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 priorities"):
        llm.generate(["a", "b"], priority=[1])


def test_vectors_and_scores(llm: LLM) -> None:
    vectors = [output.outputs.embedding for output in llm.embed(["one", "two"], pooling="mean", use_tqdm=False)]
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1, 1])
    assert vectors[0] != vectors[1]
    assert len(llm.embed("one", dimensions=2)[0].outputs.embedding) == 2
    with pytest.raises(InvalidRequestError, match="dimensions is 0"):
        llm.embed("one", dimensions=0)
    scores = [output.outputs.score for output in llm.score("ab|", ["a", "b"])]
    assert len(scores) == 2
    with pytest.raises(InvalidRequestError, match="text_1 has 3 texts and text_2 2"):
        llm.score(["a", "b", "c"], ["a", "b"])
    for arguments, sentence in (
        ({"text_1": "a", "text_2": ""}, "text_2 has an empty text, which has no likelihood"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported"),
        ({"text_1": "a", "text_2": 3}, "text_2 is 3; it must be a string or a list"),
        ({"text_1": ["a", 3], "text_2": "b"}, "text_1 must be a text or a list of texts"),
    ):
        with pytest.raises(InvalidRequestError, match=sentence):
            llm.score(**arguments)
    for params in ("x", 3, [3]):
        with pytest.raises(InvalidRequestError, match="give SamplingParams, one for all or one each"):
            llm.generate(["a"], params)


def test_the_tokenizer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("hi") == tokenizer("hi")["input_ids"] == list(b"hi")
    assert tokenizer.decode([*b"hi"]) == "hi"
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == tokenizer.encode(str(text))
    assert llm.chat(messages)[0].prompt == text


def test_parameters_that_ask_for_nothing_are_accepted_and_can_change() -> None:
    params = SamplingParams(detokenize=True, output_kind=1, best_of=1, extra_args={}, max_tokens=None, stop="x")
    params.temperature = 0
    copy = params.clone()
    copy.max_tokens = 3
    assert (params.max_tokens, params.temperature, params.stop, copy.max_tokens) == (None, 0, ["x"], 3)
    with pytest.raises(InvalidRequestError, match="temperature: "):
        params.temperature = 9
    assert SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"])).constraints()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"best_of": 3}, "best_of is not a parameter here; give n"),
        ({"guided_decoding": {}}, "write structured_outputs="),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logits_processors": [len]}, "use logit_bias"),
    ],
)
def test_parameters_that_cannot_be_followed(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        SamplingParams(**fields)


def test_names_that_do_not_exist(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="'sleep': the weights stay on the device"):
        llm.sleep()
    with pytest.raises(AttributeError, match=r"'metrics': the times of an answer are in its outputs\[0\]\.timings"):
        _ = llm.generate("a|")[0].metrics
    with pytest.raises(InvalidRequestError, match=r"give it to LLM\(chat_template="):
        llm.chat([{"role": "user", "content": "a"}], chat_template="x")
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        llm.generate("a", nonsense=1)
    assert all(hasattr(quire, name) for name in quire.__all__)
