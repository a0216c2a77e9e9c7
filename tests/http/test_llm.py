"""The offline API over the fake runner: the daemon's rules without a daemon."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import CONFIG, END, VOCAB_SIZE, Gate, byte_tokenizer, eventually, parrot

from engine.core.errors import (
    ComputeError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ShuttingDownError,
)
from engine.core.rows import SequenceSlice
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import PendingStep, StepPlan
from engine.core.types import Request
from engine.handle import EngineFacts
from engine.loop import Engine
from engine.overload import QueueLimits
from engine.settings.engine_config import EngineConfig
from loadtest.fake_runner import CostModel, FakeRunner
from quire import LLM, SamplingParams


class Workshop:
    """What stands in for loading a model: engines over the parrot, the last of which tests may look into."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.config: EngineConfig
        self.engine: Engine
        self.dies = False
        self.num_closed = 0

    def build_engine(self, config: EngineConfig, report: object, _memory: object = None) -> Engine:
        workshop = self

        class Runner(FakeRunner):
            def run(self, plan: StepPlan) -> PendingStep:
                if workshop.dies:
                    raise RuntimeError("the device fell off the bus")
                return super().run(plan)

            def close(self) -> None:
                workshop.num_closed += 1

        def fail(piece: SequenceSlice) -> str | None:
            return "made to fail" if getattr(piece.params, "top_k", 0) == 13 else None

        cost = CostModel(step_s=0.0, token_s=0.0)
        runner = Runner(CONFIG, vocab_size=VOCAB_SIZE, choose=parrot, cost=cost, sleep=self.gate, fail=fail)
        self.config = config
        self.engine = Engine(Scheduler(CONFIG), runner, EngineFacts(VOCAB_SIZE), limits=QueueLimits(8, 10_000))
        return self.engine

    def check_idle(self) -> None:
        eventually(lambda: not self.engine.health().busy)
        assert self.engine.stats.blocks_held == 0
        assert self.engine.stats.integrity_failures == 0


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop()
    stand_in = types.ModuleType("engine.startup.build")
    stand_in.build_engine = made.build_engine  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "engine.startup.build", stand_in)
    monkeypatch.setattr("engine.llm.offline.load_tokenizer", lambda *_, **__: byte_tokenizer())
    return made


@pytest.fixture
def llm(workshop: Workshop) -> Iterator[LLM]:
    with LLM() as made:
        yield made
        workshop.check_idle()


def texts(llm: LLM, prompts: Any, *params: Any, **fields: Any) -> list[list[str]]:
    outputs = llm.generate(prompts, *params or [SamplingParams(**{"max_tokens": 50, **fields})])
    return [[choice.text for choice in output.outputs] for output in outputs]


def test_results_come_in_the_prompts_order_with_all_that_belongs_to_them(llm: LLM) -> None:
    prompts = ["a longer one|", list(b"ids|"), "hi|"]
    params = SamplingParams(max_tokens=8, n=2, logprobs=1, prompt_logprobs=0)
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == ["a longer one|", None, "hi|"]
    assert [output.outputs[1].text for output in outputs] == ["a longer", "ids", "hi"]
    last = outputs[-1]
    assert last.prompt_token_ids == list(b"hi|")
    assert last.prompt_logprobs is not None
    assert [entry and list(entry) for entry in last.prompt_logprobs] == [None, [ord("i")], [ord("|")]]
    first = last.outputs[0]
    assert (first.index, first.token_ids, first.finish_reason, first.stop_reason) == (0, [*b"hi", END], "stop", None)
    assert first.logprobs is not None
    assert [list(entry or ()) for entry in first.logprobs] == [[ord("h")], [ord("i")], [END]]
    assert first.cumulative_logprob == -1.5
    assert first.timings is not None
    assert first.timings.num_preemptions == 0
    assert outputs[0].outputs[0].finish_reason == "length"
    assert llm.generate("hi|")[0].outputs[0].logprobs is None


def test_more_prompts_than_the_queue_takes(llm: LLM, workshop: Workshop) -> None:
    prompts = [f"{i}|" for i in range(200)]
    assert texts(llm, prompts) == [[str(i)] for i in range(200)]
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=None, stop="l"), SamplingParams(max_tokens=None)]
    assert texts(llm, ["hello|", "hello|", "hello|"], each) == [["he"], ["he"], ["hello"]]
    with pytest.raises(InvalidRequestError, match="3 prompts and 2 sampling_params"):
        llm.generate(["a", "b", "c"], each[:2])


def test_stopping_is_the_daemons(llm: LLM, workshop: Workshop) -> None:
    assert texts(llm, "hello world|", stop=("zz", "o w"), include_stop_str_in_output=True, n=2) == [["hello w"] * 2]
    [output] = llm.generate("hello|", SamplingParams(stop_token_ids=[ord("l")]))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("he", ord("l"))
    assert texts(llm, "hi|", ignore_eos=True, max_tokens=3, skip_special_tokens=False) == [["hi<end>"]]
    assert texts(llm, "hi|", logit_bias={5: 1.0}) == [["hi"]]


def test_a_beam_search_gives_distinct_answers_best_first(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="use generate with SamplingParams"):
        llm.beam_search("hi|", None)
    params = SamplingParams(use_beam_search=True, n=3, length_penalty=0.0, early_stopping="never", logprobs=0)
    for [output] in (llm.generate("hi|", params), llm.chat([{"role": "user", "content": "hi"}], params)):
        totals = [one.cumulative_logprob for one in output.outputs]
        assert None not in totals
        assert totals == sorted(totals, reverse=True)  # type: ignore[type-var]  # there is none of None
        assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    with pytest.raises(InvalidRequestError, match=r"temperature is 0\.7"):
        SamplingParams(use_beam_search=True, temperature=0.7)


def test_conversations(llm: LLM) -> None:
    one = [{"role": "user", "content": "hello"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "there"}]}]
    params = SamplingParams(max_tokens=None)
    assert [output.outputs[0].text for output in llm.chat(one, params)] == ["hello"]
    assert [output.outputs[0].text for output in llm.chat([one, parts], params)] == ["hello", "there"]
    begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yz|"}]
    [output] = llm.chat(begun, params, continue_final_message=True)
    assert (output.prompt, output.outputs[0].text) == ("xyz|", "xyz")
    with pytest.raises(InvalidRequestError, match="role"):
        llm.chat([{"role": "nobody", "content": "x"}])


TALKS = "{% if tools %}{% set a = '<tool_call>' %}{% endif %}{% set b = '</think>' %}{{ messages[-1].content }}|"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def talker(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LLM]:
    """Its template, which is in a file, knows tools and thoughts."""
    monkeypatch.setattr(
        "engine.llm.offline.load_tokenizer", lambda *_, chat_template=None, **__: byte_tokenizer(chat_template or TALKS)
    )
    file = tmp_path / "template.jinja"
    file.write_text(TALKS)
    with LLM(chat_template=str(file)) as made:
        yield made
        workshop.check_idle()


def test_thoughts_and_calls_are_told_apart(talker: LLM) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    said = [{"role": "user", "content": f"<think>hm</think>Well. {call}{call}"}]
    params = SamplingParams(max_tokens=None)
    [output] = talker.chat(said, params, tools=[WEATHER])
    [answer] = output.outputs
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Well.", "hm", "tool_calls")
    assert [(made.name, made.arguments) for made in answer.tool_calls] == [("weather", '{"city": "Rome"}')] * 2
    ids = [made.id for made in answer.tool_calls]
    assert len(set(ids)) == 2
    assert answer.message["reasoning_content"] == "hm"
    assert [made["id"] for made in answer.message["tool_calls"]] == ids
    results = [{"role": "tool", "tool_call_id": ids[0], "content": "sunny"}, {"role": "user", "content": "so?"}]
    assert talker.chat([*said, answer.message, *results], params)[0].outputs[0].text == "so?"
    [one] = talker.chat(said, params, tools=[WEATHER], parallel_tool_calls=False)[0].outputs[0].tool_calls
    assert one.name == "weather"
    plain = talker.chat(said, params)[0].outputs[0]
    assert (plain.text, plain.tool_calls) == (f"Well. {call}{call}", [])
    with LLM(reasoning_parser="none") as llm:
        assert llm.chat(said, params)[0].outputs[0].text.startswith("<think>")


@pytest.mark.parametrize(
    ("fields", "asked", "param", "sentence"),
    [
        ({"structured_outputs": {"regex": "("}}, {}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, {}, "structured_outputs", "regex and choice"),
        ({"response_format": {"type": "xml"}}, {}, "response_format.type", "json_object"),
        ({"logprobs": 21}, {}, "logprobs", "at most 20"),
        ({}, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({}, {"tools": [WEATHER, WEATHER]}, "tools", "two functions"),
        ({}, {"reasoning_effort": "much"}, "reasoning_effort", "minimal"),
    ],
)
def test_what_a_conversation_cannot_ask(
    talker: LLM, workshop: Workshop, fields: dict[str, Any], asked: dict[str, Any], param: str, sentence: str
) -> None:
    with pytest.raises(InvalidRequestError, match=sentence) as caught:
        talker.chat([{"role": "user", "content": "hi"}], SamplingParams(**fields), **asked)
    assert caught.value.param == param
    assert workshop.engine.stats.steps == 0


def test_a_hint_that_cannot_be_followed_is_logged(talker: LLM, caplog: pytest.LogCaptureFixture) -> None:
    [output] = talker.chat(
        [{"role": "user", "content": "hi"}], SamplingParams(priority=3, max_tokens=2), thinking_token_budget=5
    )
    assert output.outputs[0].token_ids
    assert "without effect here: priority, thinking_token_budget" in caplog.text


def test_a_grammar_that_cannot_be_is_told_of_its_prompt(llm: LLM) -> None:
    each = [SamplingParams(structured_outputs={"choice": ["a"]}), SamplingParams(structured_outputs={"regex": "("})]
    with pytest.raises(
        InvalidRequestError, match=r"Prompt 1 of 2: structured_outputs cannot be used: .*unclosed group"
    ):
        llm.generate(["a|", "b|"], each)
    assert texts(llm, "a|", structured_outputs={"choice": ["a"]}) == [["a"]]  # the parrot heeds no grammar


def test_a_conversation_may_be_scored(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 3


def test_a_conversation_names_where_its_next_turn_begins(
    llm: LLM, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []
    submit = workshop.engine.submit

    def watched(request: Request) -> None:
        asked.append(request)
        submit(request)

    monkeypatch.setattr(workshop.engine, "submit", watched)
    llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2))
    llm.generate("hi|", SamplingParams(max_tokens=2))
    assert [(request.prompt, request.turn_end) for request in asked] == [(tuple(b"hi|"), 2), (tuple(b"hi|"), 0)]


@pytest.mark.parametrize(
    ("prompts", "error", "sentence"),
    [
        ("", InvalidRequestError, "no tokens"),
        (["fine|", []], InvalidRequestError, "Prompt 1 of 2: The prompt has no tokens"),
        (["fine|", "x" * 600], ContextLengthError, "Prompt 1 of 2: .*512"),
        ([[1, 999]], InvalidRequestError, "999"),
        ([1.5], InvalidRequestError, "a text or a list of token ids"),
        (7, InvalidRequestError, "prompts is of type int"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(
    llm: LLM, workshop: Workshop, prompts: Any, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        llm.generate(prompts)
    assert workshop.engine.stats.steps == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9.0}, "temperature"),
        ({"n": 0}, "n"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": [""]}, "stop.0"),
        ({"max_tokens": "many"}, "max_tokens"),
    ],
)
def test_parameters_are_checked_at_once(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_one_that_fails_ends_the_run_and_the_next_is_unharmed(llm: LLM, workshop: Workshop) -> None:
    each = [SamplingParams(max_tokens=400), SamplingParams(top_k=13)]
    with pytest.raises(ComputeError, match="made to fail"):
        llm.generate(["endless", "x|"], each)
    workshop.check_idle()
    assert texts(llm, "hi|") == [["hi"]]


def test_ctrl_c_aborts_and_the_next_run_hears_nothing_of_it(
    llm: LLM, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        """The queue, in the place where Ctrl-C strikes."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.left = 3

        def get(self) -> Any:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return self.inner.get()

    with monkeypatch.context() as patch:
        patch.setattr(llm, "_events", Interrupted(llm._events))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["endless"] * 40, SamplingParams(max_tokens=400))
    workshop.check_idle()
    assert texts(llm, "hi|") == [["hi"]]


def test_what_an_interrupted_run_left_in_the_queue_is_waited_for(
    llm: LLM, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        """Ctrl-C while a step takes its time, and the queue is full."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def get(self) -> Any:
            heard = self.inner.get()
            workshop.gate.close()
            eventually(lambda: workshop.engine.stats.num_waiting > 0)
            raise KeyboardInterrupt(heard)

    with monkeypatch.context() as patch:
        patch.setattr(llm, "_events", Interrupted(llm._events))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["endless"] * 40, SamplingParams(max_tokens=400))
    opener = threading.Timer(0.2, workshop.gate.open)
    opener.start()
    assert texts(llm, "hi|") == [["hi"]]
    opener.join()


def test_a_dead_engine_is_told(workshop: Workshop) -> None:
    with LLM() as llm:
        workshop.dies = True
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="fell off the bus"):
                llm.generate("hi|")


def test_closing_is_final_and_may_be_repeated(workshop: Workshop) -> None:
    llm = LLM()
    llm.close()
    llm.close()
    assert not workshop.engine.health().alive
    with pytest.raises(ShuttingDownError, match="closed"):
        llm.generate("hi|")


@pytest.mark.parametrize("fails", ["load_tokenizer", "check_draft_tokenizer", "ModelLimits.of"])
def test_one_that_cannot_be_made_releases_its_engine(
    fails: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConfigError("made to fail")

    monkeypatch.setattr(f"engine.llm.offline.{fails}", fail)
    with pytest.raises(ConfigError, match="made to fail"):
        LLM()
    assert workshop.num_closed == 1


def test_a_forgotten_one_lets_its_engine_go(workshop: Workshop) -> None:
    llm = LLM()
    engine = workshop.engine
    del llm
    eventually(lambda: not engine.health().alive)


def test_threads_take_turns(llm: LLM) -> None:
    told: dict[int, list[list[str]]] = {}

    def ask(number: int) -> None:
        told[number] = texts(llm, [f"{number}.{i}|" for i in range(20)])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {number: [[f"{number}.{i}"] for i in range(20)] for number in range(4)}


def test_engine_flags_reach_the_engine(workshop: Workshop) -> None:
    LLM(max_num_seqs=3, dtype="float32").close()
    assert (workshop.config.max_num_seqs, workshop.config.dtype) == (3, "float32")
    LLM(kv_cache_memory_bytes="2GiB", image_cache_memory="1k", max_model_len="2K", max_num_seqs="64").close()
    found = workshop.config
    assert (found.kv_cache_memory_bytes, found.image_cache_memory) == (2 << 30, 1000)
    assert (found.max_model_len, found.max_num_seqs) == (2048, 64)
    for flags, sentence in (
        ({"max_num_seq": 3}, "did you mean max_num_seqs"),
        ({"dtype": "int3"}, "--dtype is 'int3'"),
        ({"num_threads": "two"}, "--num-threads is 'two'; it must be a whole number"),
        ({"kv_cache_memory_bytes": "2 gigs"}, "--kv-cache-memory-bytes is '2 gigs'; it must be a size such as 2GiB"),
        ({"kv_cache_memory_bytes": 2.5e9}, r"--kv-cache-memory-bytes is 2.5e\+09; it must be a size such as 2GiB"),
        ({"image_cache_memory": "-1MiB"}, "--image-cache-memory is '-1MiB'; it must be a size such as 2GiB"),
        ({"max_model_len": "32x"}, "--max-model-len is '32x'; it must be a whole number"),
        ({"swap_space": "4GiB"}, "--swap-space is '4GiB'; it must be a number"),
        ({"max_num_seqs": 1.5}, "--max-num-seqs is 1.5; it must be a whole number"),
        ({"num_threads": True}, "--num-threads is True; it must be a whole number"),
        ({"gpu_memory_utilization": "x"}, "--gpu-memory-utilization is 'x'; it must be a number"),
        ({"enforce_eager": "no"}, "--enforce-eager is 'no'; it must be true or false"),
        ({"weights_cache": ""}, "--weights-cache is ''; give a value, or leave the setting out"),
        ({"mmproj": ""}, "--mmproj is ''; give a value"),
        ({"tokenizer": ""}, "tokenizer, chat_template or allowed_local_media_path is ''; give a value"),
        ({"chat_template": "/nosuch.jinja"}, "--chat-template is '/nosuch.jinja', which cannot be read"),
        ({"speculative_config": {1: 2}}, "--speculative-config has no key '1'"),
        ({"swap_space": 1e308}, r"--swap-space is 1e\+308; it must be at most 9223372036854775807"),
        ({"hf_overrides": 3}, "--hf-overrides is 3; it must be a JSON object"),
        ({"override_generation_config": 3}, "override_generation_config is 3; it must be a JSON object"),
        ({"lora_modules": ["a=/b"]}, "lora_modules is .*; it must be a JSON object"),
        ({"model": 3}, "model is 3; it must be a string"),
        ({"tokenizer": []}, r"tokenizer is \[\]; it must be a string"),
        ({"max_logprobs": "x"}, "max_logprobs is 'x'; it must be a whole number"),
        ({"max_logprobs": -2}, "max_logprobs is -2; it must be at least 0"),
        ({"limit_mm_per_prompt": {"image": -1}}, "image is -1; it must be a whole number"),
        ({"limit_mm_per_prompt": {"images": 4}}, "has no key 'images'; did you mean 'image'"),
        ({"override_generation_config": {1: 2, "x": 3}}, "has no key 1"),
        ({"tool_call_parser": "hermess"}, "tool_call_parser is 'hermess'"),
        ({"reasoning_parser": "qwen"}, "choose auto, none, .*qwen3"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            LLM(**flags)


def test_a_bar_on_a_terminal(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    llm.generate(["a|", "b|"])
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a|", "b|"], progress=False)
    assert "2/2" not in capsys.readouterr().err


def test_a_prompt_that_cannot_be_in_time_is_dropped_alone(workshop: Workshop) -> None:
    with LLM() as llm:
        workshop.gate.close()
        threading.Timer(0.3, workshop.gate.open).start()
        params = [SamplingParams(max_tokens=3)] * CONFIG.max_num_seqs + [SamplingParams(max_tokens=3, max_queue_ms=50)]
        *fine, late = llm.generate(["hello|"] * len(params), params)
    assert {output.outputs[0].text for output in fine} == {"hel"}
    assert (late.outputs[0].text, late.outputs[0].finish_reason) == ("", "dropped")


def test_an_argument_of_another_type_is_named(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    for call, arguments, sentence in (
        (llm.generate, {"prompts": "a", "priority": 3}, "priority is 3; it must be a list"),
        (llm.generate, {"prompts": "a", "lora": []}, r"lora is \[\]; it must be a string"),
        (llm.generate, {"prompts": "a", "sampling_params": 0}, "sampling_params has a int"),
        (llm.generate, {"prompts": b"abc"}, "A prompt must be a text or a list of token ids"),
        (llm.generate, {"prompts": {1: "a", "x": "b"}}, "the key 1, which is not read"),
        (llm.generate, {"prompts": "a", "lora_request": []}, r"lora is \[\]"),
        (llm.chat, {"messages": 3}, "messages is 3; it must be a list"),
        (llm.chat, {"messages": conversation[0]}, "messages is {.*}; it must be a list"),
        (llm.chat, {"messages": [None]}, "messages is None; it must be a list"),
        (llm.chat, {"messages": [conversation, 3]}, "messages is 3; it must be a list"),
        (llm.chat, {"messages": conversation, "tools": 3}, "tools is 3; it must be a list"),
        (llm.chat, {"messages": conversation, "tools": [3]}, "tools.0: Input should be an object"),
        (llm.chat, {"messages": conversation, "chat_template_kwargs": ["a"]}, "it must be a JSON object"),
        (llm.embed, {"prompts": "a", "dimensions": "x"}, "dimensions is 'x'; it must be a whole number"),
        (
            llm.embed,
            {"prompts": "a", "truncate_prompt_tokens": 1.5},
            r"truncate_prompt_tokens is 1\.5; it must be a whole",
        ),
        (llm.embed, {"prompts": "a", "input_type": {}}, "input_type is {}; it must be a string"),
        (llm.embed, {"prompts": "a", "normalize": "no"}, "normalize is 'no'; it must be true or false"),
        (llm.rerank, {"query": 3, "documents": ["a"]}, "query is 3; it must be a string"),
        (llm.rerank, {"query": "a", "documents": ["a"], "top_n": "x"}, "top_n is 'x'; it must be a whole number"),
        (llm.rerank, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n is 0; give 1 at least"),
    ):
        with pytest.raises(InvalidRequestError, match=sentence):
            call(**arguments)  # type: ignore[operator]
