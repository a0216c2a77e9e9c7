"""Structured outputs on the real model: whatever is drawn, an answer that has finished is valid."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import torch

from engine.core.errors import InvalidRequestError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import FinishReason, Grammar, GrammarKey, Request
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.load import load_model
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from engine.text.grammars.compiler import GrammarCompiler
from engine.text.grammars.spec import GrammarKind, GrammarSpec
from engine.text.tokenizer import TextTokenizer
from engine.text.tokenizer_files import load_tokenizer
from tests.cpu.model_driver import make_runner, request, serve, settings
from tests.cpu.test_speculation import Prophet

NUM_SEEDS = 20
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "color": {"enum": ["red", "green", "bleu clair é"]},
    },
    "required": ["ok", "n", "color"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,8} \d{1,4}"
CHOICES = ["yes", "no", "perhaps", "no way"]
LARK = 'start: n ("+" n){0,3}\nn: /[0-9]{1,3}/ | "(" n "-" n ")"'
SPECS = {
    "json": GrammarSpec.of_json_schema(SCHEMA, whitespace=" ?"),
    "regex": GrammarSpec(GrammarKind.REGEX, REGEX),
    "choice": GrammarSpec(GrammarKind.CHOICE, json.dumps(CHOICES)),
    "grammar": GrammarSpec.of_lark(LARK),
}


def check(kind: str, text: str) -> None:
    """Raise if a text is not what was asked for, by another library's judgement or a simple one."""
    if kind == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "regex":
        assert re.fullmatch(REGEX, text)
    elif kind == "choice":
        assert text in CHOICES
    else:
        inner = re.compile(r"\((\d{1,3})-(\d{1,3})\)")
        while inner.search(text):
            text = inner.sub("1", text)
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){0,3}", text)


class Real:
    """The model in its own four bits, and the four grammars."""

    def __init__(self) -> None:
        path = find_model(None).path
        self.tokenizer: TextTokenizer = load_tokenizer(path)
        config = EngineConfig(model=path)
        self.model: CausalLM = load_model(config, torch.device("cpu"), torch.bfloat16, lambda progress: None)
        self.prompt = self.tokenizer.encode("Answer as you were asked.\nAnswer: ", add_special_tokens=False)
        self.grammars = self._compile()

    def _compile(self) -> dict[str, Grammar]:
        compiler = GrammarCompiler()
        compiler.use(self.tokenizer.vocabulary(self.model.vocab_size))
        try:
            return {kind: made_by(compiler, spec) for kind, spec in SPECS.items()}
        finally:
            compiler.close()

    def ask(self, kind: str, seed: int, **sampling: Any) -> Request:
        wanted = {
            "max_tokens": 40,
            "temperature": 1.0,
            "seed": seed,
            "grammar": self.grammars[kind],
            "eos_token_ids": self.tokenizer.eos_token_ids,
        }
        return request(f"{kind} {seed}", self.prompt, **(wanted | sampling))

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def real() -> Real:
    return Real()


def test_every_finished_answer_is_valid(real: Real) -> None:
    requests = [real.ask(kind, seed) for seed in range(NUM_SEEDS) for kind in SPECS]
    served = serve(real.model, settings(max_num_seqs=64, num_blocks=1000), requests)
    num_valid = dict.fromkeys(SPECS, 0)
    for (request_id, _), events in served.events.items():
        kind = request_id.split()[0]
        if events[-1].finish_reason is FinishReason.STOP:
            check(kind, real.text(served.ids[request_id, 0]))
            num_valid[kind] += 1
        else:
            assert events[-1].finish_reason is FinishReason.LENGTH
    assert all(num > 0.8 * NUM_SEEDS for num in num_valid.values()), num_valid
    assert len({tuple(ids) for ids in served.ids.values()}) > NUM_SEEDS  # and they are not all the same


def test_overlap_preemption_and_choices_change_nothing(real: Real) -> None:
    requests = [real.ask(kind, 7, n=2) for kind in SPECS]
    roomy = serve(real.model, settings(), requests).ids
    tight = settings(num_blocks=24, max_num_batched_tokens=24)
    assert serve(real.model, tight, requests, depth=1, apart=2).ids == roomy
    for (request_id, _), ids in roomy.items():
        check(request_id.split()[0], real.text(ids))


def test_drafts_change_nothing(real: Real) -> None:
    """Right and wrong ones, taken in and given back by the library's own matchers; a right one is never lost."""
    requests = [real.ask(kind, seed, logprobs=1) for kind in SPECS for seed in range(3)]
    plain = serve(real.model, settings(), requests)
    futures = [[*real.prompt, *ids] for ids in plain.ids.values()]
    config = settings(num_speculative_tokens=4)
    for is_wrong_at in (range(0), range(4, 1000, 5)):
        runner, scheduler = make_runner(real.model, config), Scheduler(config)
        runner.speculate(Prophet(futures, is_wrong_at))
        served = serve(real.model, config, requests, runner=runner, scheduler=scheduler)
        assert served.ids == plain.ids
        for key, events in plain.events.items():
            assert served.events[key][-1].finish_reason == events[-1].finish_reason
        stats = scheduler.stats
        assert stats.spec_accepted_tokens > 50
        # Two answers may begin alike, and then the future of one is drafted for the other.
        assert stats.spec_accepted_tokens > 0.7 * stats.spec_draft_tokens or is_wrong_at


def test_nothing_is_left_to_be_made_for_the_first_grammar(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    def made_anew(*_: object) -> None:
        raise AssertionError("it was there already")

    def ask() -> None:
        compiler = GrammarCompiler()
        compiler.observe = times.append
        try:
            compiler.use(real.tokenizer.vocabulary(real.model.vocab_size), warms_up=True)
            compiler._quick.pool.submit(lambda: None).result()  # behind it
            monkeypatch.setattr("engine.text.grammars.guidance.GuidanceVocabulary", made_anew)
            compiler.compile(SPECS["regex"], "structured_outputs").result()
        finally:
            compiler.close()

    times: list[float] = []
    ask()
    assert len(times) == 1  # the warming up is nobody's request


def test_a_special_token_cannot_be_spelled(real: Real) -> None:
    """Text that calls for one must not end the model's turn."""
    for spec in (
        GrammarSpec(GrammarKind.CHOICE, json.dumps(["<|im_end|>"])),
        GrammarSpec(GrammarKind.REGEX, r"<\|im_end\|>"),
    ):
        with pytest.raises(InvalidRequestError, match="special token"):
            compile_one(real, spec)


def test_what_fails_on_the_way_fails_alone(real: Real) -> None:
    """Behind more digits than a trial draws; the client's fault, as it would have been before."""
    special = compile_one(real, GrammarSpec(GrammarKind.REGEX, r"\d{30}<\|im_end\|>"))
    explodes = compile_one(real, GrammarSpec(GrammarKind.REGEX, r"\d{30}(x|((a{1000}){1000}){1000})"))
    called_for = compile_one(real, GrammarSpec.of_lark('start: "a" <|im_start|> "b"'))
    requests = [
        real.ask("choice", 0, grammar=special),
        real.ask("choice", 1, grammar=called_for),
        real.ask(
            "choice", 2, grammar=explodes, logit_bias=((real.tokenizer.encode("a", add_special_tokens=False)[0], 50.0),)
        ),
        real.ask("json", 0),
    ]
    served = serve(real.model, settings(), requests)
    for request_id in ("choice 0", "choice 2"):
        last = served.events[request_id, 0][-1]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error.code == "InvalidRequestError"
    assert "spells a special token" in str(served.events["choice 0", 0][-1].error)
    check("json", real.text(served.ids["json 0", 0]))
    assert real.tokenizer.decode(served.ids["choice 1", 0], skip_special_tokens=False) == "a<|im_start|>b"


def made_by(compiler: GrammarCompiler, spec: GrammarSpec) -> Grammar:
    """Compile a grammar, and find it by its name."""
    compiler.compile(spec, "structured_outputs").result()
    return compiler.hold(GrammarKey(spec.digest))


def compile_one(real: Real, spec: GrammarSpec) -> Grammar:
    compiler = GrammarCompiler()
    compiler.use(real.tokenizer.vocabulary(real.model.vocab_size))
    try:
        return made_by(compiler, spec)
    finally:
        compiler.close()
