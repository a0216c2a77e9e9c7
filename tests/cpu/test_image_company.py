"""Images beside all else that an engine does: adapters, drafts, grammars, stores, hand-overs, recordings, aborts."""

from __future__ import annotations

import gc
import json
import queue
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image as Pillow
from safetensors.torch import load_file, save_file

from engine.core.budget import StepTime
from engine.core.config import SchedulerConfig
from engine.core.kv import tiers
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import TransferKind
from engine.core.types import AbortCause, FinishReason, Request, StepEvents
from engine.handover import HandoverConfig
from engine.images import Image
from engine.loop import Engine
from engine.runtime.execution import runner as runner_module
from engine.runtime.execution.image_rows import ImageVectors
from engine.runtime.models.load import load_mtp
from engine.runtime.speculation.text_drafter import TextDrafter
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from engine.text.images.preprocessor import ImagePreprocessor
from engine.text.tokenizer_files import load_tokenizer
from loadtest.simulation.recording import replay_recording
from server.app import create_app
from server.settings.app_config import AppConfig
from tests.cpu import test_image_prompts as prompts
from tests.cpu import test_images as images
from tests.cpu.lora_folders import load_adapter, merge, save_adapter
from tests.cpu.model_driver import CPU, make_runner, serve, settings, state_blocks
from tests.cpu.test_constraint import StepGrammar, follows
from tests.cpu.test_disk_store import engine_on
from tests.cpu.test_handover_bits import daemon
from tests.cpu.test_images import PLACE, PROMPTS, SQUARES, Theirs, Vision, ask, runner_of, said
from tests.cpu.test_speculation import draft_model
from tests.patience import PATIENCE_S, eventually

FIELDS: dict[str, Any] = {"logprobs": 3, "max_tokens": 10}
SIZES = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


def alone(found: Vision, **fields: Any) -> dict[tuple[str, int], Any]:
    """What each prompt's answer is when nothing else runs."""
    config, answers = settings(num_blocks=300, state_blocks=state_blocks(found.model, 4), writes_midway=True), {}
    for i, (ids, _) in enumerate(PROMPTS):
        answers |= said(serve(found.model, config, [ask(f"{i}", ids, **fields)], runner=runner_of(found, config)))
    return answers


def test_an_adapter_changes_the_text_and_has_images_of_its_own(folder: Path, tmp_path: Path) -> None:
    found = images.vision(folder, "Qwen3VLConfig")
    path = save_adapter(found.theirs, tmp_path, size=0.5)
    adapter, merged = load_adapter(found.model, path), deepcopy(found.theirs)
    merge(merged, path)
    plain, adapted = alone(found, **FIELDS), alone(found, **FIELDS, adapter=adapter)
    assert adapted != plain
    config = settings(num_blocks=300, max_num_batched_tokens=9)
    asked = [
        ask(f"{kind}{i}", ids, **FIELDS, **how)
        for i, (ids, _) in enumerate(PROMPTS)
        for kind, how in (("p", {}), ("a", {"adapter": adapter}), ("q", {}), ("b", {"adapter": adapter}))
    ]
    scheduler = Scheduler(config)
    served = serve(found.model, config, asked, runner=runner_of(found, config), scheduler=scheduler, apart=4)
    assert scheduler.stats.prefix_hit_tokens > 0
    for (name, _), answer in said(served).items():
        assert answer == (adapted if name[0] in "ab" else plain)[name[1:], 0]
    for i, (ids, _) in enumerate(PROMPTS):
        context = torch.tensor([[*ids, *served.ids[f"a{i}", 0]]])
        with torch.no_grad():
            logits = Theirs(merged)(context, use_cache=False).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == served.ids[f"a{i}", 0]


def with_head(found: Vision, target: Path) -> Path:
    """The checkpoint with an MTP head, whose layer is its last one's."""
    target.mkdir()
    values, tensors = json.loads((found.path / "config.json").read_text()), load_file(found.path / "model.safetensors")
    prefix = f"model.language_model.layers.{len(found.model.states) - 1}."
    layer = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
    assert "self_attn.q_proj.weight" in layer
    hidden = values["text_config"]["hidden_size"]
    tensors |= {f"mtp.layers.0.{name}": each.clone() for name, each in layer.items()}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(hidden)
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(1)) * 0.15
    values["text_config"]["mtp_num_hidden_layers"] = 1
    (target / "config.json").write_text(json.dumps(values))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def check_drafts(found: Vision, model: Any, config: SchedulerConfig, runner: Any) -> None:
    """Some tokens are drafted behind images, and the answers are those of each request alone."""
    scheduler = Scheduler(config)
    asked = [ask(f"{i}", ids, **FIELDS) for i, (ids, _) in enumerate(PROMPTS)]
    served = serve(model, config, asked, runner=runner, scheduler=scheduler, apart=3)
    assert scheduler.stats.spec_draft_tokens > 0
    wanted = alone(found, **FIELDS)
    for key, entries in said(served).items():
        assert [each for event in entries for each in event] == [each for event in wanted[key] for each in event]


def test_a_head_drafts_behind_images(folder: Path, tmp_path: Path) -> None:
    found = images.vision(folder, "Qwen3_5Config")
    path = with_head(found, tmp_path / "with head")
    model = images.load_on(CPU, path)
    head = load_mtp(EngineConfig(model=str(path), dtype="float32"), model, CPU, lambda progress: None)
    size = state_blocks(model, 4)
    config = settings(
        num_blocks=300, state_blocks=size, writes_midway=True, num_speculative_tokens=3, max_num_batched_tokens=9
    )
    runner = make_runner(model, config, head=head)
    runner.take_images(found.tower, 1 << 20)
    check_drafts(found, model, config, runner)


def test_a_model_of_text_drafts_behind_images(folder: Path) -> None:
    found = images.vision(folder, "Qwen3VLConfig")
    config = settings(num_blocks=300, num_speculative_tokens=3, max_num_batched_tokens=9)
    runner = runner_of(found, config)
    runner.speculate(draft_model(config, found.model))
    check_drafts(found, found.model, config, runner)


def test_no_image_is_drafted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an answer is as the text before an image, the image's id is not expected again."""
    found = images.vision(folder, "Qwen3VLConfig")
    config = settings(num_blocks=300, num_speculative_tokens=4)
    ids, _ = PROMPTS[0]
    before = ids[ids.index(PLACE) - 1]
    drafted: list[list[int]] = []
    draft = TextDrafter.draft

    def note(*given: Any) -> dict[int, list[int]]:
        drafts = draft(*given)
        drafted.extend(drafts.values())
        return drafts

    monkeypatch.setattr(TextDrafter, "draft", note)
    kept: list[int] = []
    with_drafts = runner_module.with_drafts

    def keep(slices: Any, drafts: dict[int, list[int]]) -> Any:
        kept.extend(token for each in drafts.values() for token in each)
        return with_drafts(slices, drafts)

    monkeypatch.setattr(runner_module, "with_drafts", keep)
    runner = runner_of(found, config)
    runner.speculate(TextDrafter(1, 3))
    asked = ask("a", ids, logit_bias=((before, 1000.0),), max_tokens=6)
    assert serve(found.model, config, [asked], runner=runner).ids["a", 0] == [before] * 6
    assert PLACE in {token for each in drafted for token in each}
    assert PLACE not in kept


@pytest.mark.parametrize("name", ["Qwen3VLConfig", "Gemma3Config"])
def test_a_hit_may_end_within_an_image(name: str, folder: Path) -> None:
    """What a request that ended within one has left is found, unless its tokens attend both ways."""
    found, given = images.vision(folder, name), SQUARES if name == "Gemma3Config" else PROMPTS
    config, ids = settings(num_blocks=300, max_num_batched_tokens=16), given[0][0]
    roomy = settings(num_blocks=300)
    plain = said(serve(found.model, roomy, [ask("b", ids, **FIELDS)], runner=runner_of(found, roomy)))
    scheduler, runner = Scheduler(config), runner_of(found, config)
    scheduler.add(ask("a", ids, **FIELDS))
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.commit(plan, runner.run(plan).wait(), 0.0)
    scheduler.abort("a", AbortCause.DISCONNECT, 0.0)
    asked = [ask("b", ids, **FIELDS)]
    assert said(serve(found.model, config, asked, runner=runner, scheduler=scheduler)) == plain
    assert scheduler.stats.prefix_hit_tokens == (8 if name == "Gemma3Config" else 16)


def test_a_row_that_ends_within_an_image_keeps_nothing(folder: Path) -> None:
    found = images.vision(folder, "Qwen3VLConfig")
    config, made = settings(num_blocks=300, max_num_batched_tokens=16), list[weakref.ref[torch.Tensor]]()

    def embed(image: Image) -> torch.Tensor:
        vectors = found.tower(image)
        made.append(weakref.ref(vectors))
        return vectors

    runner, scheduler = make_runner(found.model, config), Scheduler(config)
    vectors = runner.take_images(embed, 1)
    scheduler.add(ask("a", PROMPTS[0][0]))
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.commit(plan, runner.run(plan).wait(), 0.0)
    scheduler.abort("a", AbortCause.DISCONNECT, 0.0)
    vectors(images.SMALL)  # there is room for one
    gc.collect()
    assert [each() is not None for each in made] == [False, True]


# -- whole engines -----------------------------------------------------------------------------------------------------


def test_a_hand_over_brings_images(folder: Path, tmp_path: Path) -> None:
    """Only K/V comes: positions behind an image are found again."""
    path, near = images.vision(folder, "Qwen3VLConfig").path, HandoverConfig(folder=tmp_path)
    asked = [ask(f"{i}", PROMPTS[i][0], **FIELDS) for i in (0, 1)]
    with daemon(path, near, "float32", "auto") as prefill, daemon(path, near, "float32", "auto") as decode:
        expected, _ = prefill.say(asked)
        for each in asked:
            offer = prefill.handover.send(prefill.prefix(each))
            assert offer is not None
            decode.handover.receive(offer.name, decode.prefix(each), None)
        said, num_cached = decode.say(asked)
    assert said == expected
    assert num_cached == 28 + 36


def test_images_are_found_on_the_disk_after_a_restart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "MAX_PARKED_S", PATIENCE_S)
    monkeypatch.setattr(StepTime, "is_known", False)
    path, lives = images.vision(folder, "Qwen3VLConfig").path, []
    for _ in range(2):
        with running(engine_on(path, tmp_path / "kv", dtype="float32")) as (engine, heard):
            lives.append([answer(engine, heard, ask(f"{i}", PROMPTS[i][0], **FIELDS)) for i in (0, 1)])
        assert not engine.stats.failed_transfers[TransferKind.LOAD]
    assert lives[0] == lives[1]
    assert engine.stats.prefix_hits["disk"] == 28 + 36  # type: ignore[index]  # its value is the name


Heard = queue.SimpleQueue[StepEvents]


@contextmanager
def running(engine: Engine) -> Iterator[tuple[Engine, Heard]]:
    heard = Heard()
    engine.start(heard.put)
    yield engine, heard
    engine.stop(0.0)
    assert engine.health().error is None
    assert engine.stats.integrity_failures == 0
    assert engine.stats.blocks_held == 0


def answer(engine: Engine, heard: Heard, request: Request) -> list[Any]:
    """Submit a request and return what its events say."""
    engine.submit(replace(request, arrival_s=engine.clock()))
    events = []
    while not events or events[-1].finish_reason is None:
        events += [event for event in heard.get(timeout=PATIENCE_S) if event.request_id == request.request_id]
    assert events[-1].finish_reason is FinishReason.LENGTH
    return [(event.token_ids, event.logprobs) for event in events if event.token_ids]


def test_a_cache_of_one_image_holds_up_nobody(folder: Path) -> None:
    """Requests take turns at the tower, in chunks smaller than their images."""
    path, lives = str(images.vision(folder, "Qwen3VLConfig").path), list[dict[str, list[Any]]]()
    asked, num_kept = [ask(f"{i}", PROMPTS[i][0], **FIELDS) for i in (0, 1, 4)], list[int]()
    for limits in ({}, {"image_cache_memory": 1, "max_num_batched_tokens": 9}):
        config = EngineConfig(model=path, dtype="float32", **{**SIZES, "max_num_seqs": 3, **limits})
        with running(build_engine(config, lambda progress: None)) as (engine, heard):
            engine.submit(*asked)
            said, num_open = {each.request_id: [] for each in asked}, len(asked)
            while num_open:
                for event in heard.get(timeout=PATIENCE_S):
                    said[event.request_id] += event.logprobs or ()
                    num_open -= event.finish_reason is not None
            vision: Any = engine._vision
            num_kept.append(len(vision._kept))
        lives.append(said)
    assert num_kept == [4, 1], "LARGE is in two of them"
    assert lives[0] == lives[1]
    assert all(map(len, lives[0].values()))


def test_a_client_that_leaves_ends_the_work_of_the_tower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a text goes on, and while nothing else runs; the image is let go."""
    path, turns, has_begun = str(images.vision(folder, "Qwen3VLConfig").path), list[int](), threading.Event()
    advance = ImageVectors.advance

    def begin(vectors: ImageVectors, digests: Any, seconds: float) -> None:
        turns.append(0)
        if len(turns) < 9:  # of some hundred
            advance(vectors, digests, 0.0)
        else:
            has_begun.set()

    monkeypatch.setattr(ImageVectors, "advance", begin)
    config = EngineConfig(model=path, dtype="float32", **SIZES)
    with running(build_engine(config, lambda progress: None)) as (engine, heard):
        for beside in ([ask("text", PROMPTS[3][0], max_tokens=50)], []):
            if beside:
                engine.submit(*beside)
            engine.submit(left := of_new_image("left", b"left"))
            gone = weakref.ref(left.images[0])
            del left
            assert has_begun.wait(PATIENCE_S)
            assert "quire-pieces" in {thread.name for thread in threading.enumerate()}
            engine.abort("left", AbortCause.DISCONNECT)
            eventually(lambda: "quire-pieces" not in {thread.name for thread in threading.enumerate()})
            eventually(lambda gone=gone: gc.collect() >= 0 and gone() is None)
            turns.clear()
            has_begun.clear()
        monkeypatch.setattr(ImageVectors, "advance", advance)
        assert len(answer(engine, heard, of_new_image("again", b"left"))) == 12


def of_new_image(request_id: str, digest: bytes) -> Request:
    """A request whose image nothing else refers to."""
    asked = ask(request_id, PROMPTS[0][0])
    return replace(
        asked, spans=(asked.spans[0]._replace(digest=digest),), images=(replace(images.LARGE, digest=digest),)
    )


def test_text_costs_what_it_costs_without_a_tower(folder: Path) -> None:
    """The same functions run, but for one where a row begins and two where it ends."""
    path, counts = str(images.vision(folder, "Qwen3VLConfig").path), list[Counter[str]]()
    for memory in (0, 1 << 20):
        config = EngineConfig(model=path, dtype="float32", image_cache_memory=memory, **SIZES)
        engine = build_engine(config, lambda progress: None)
        for number in range(2):  # what is cached by functions is then
            counts.append(count_calls(engine, ask(f"{number}", PROMPTS[3][0], max_tokens=12)))
        engine.stop(0.0)
    assert sum(counts[1].values()) > 500
    more = {name.partition(" ")[0]: number for name, number in (counts[3] - counts[1]).items()}
    assert more == {"follow": 1, "has_spans": 1, "close": 1}
    assert not counts[1] - counts[3]


def count_calls(engine: Engine, request: Request) -> Counter[str]:
    """Run a request on this thread, and return how often each function was called."""
    calls = Counter[str]()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            calls[f"{code.co_name} {code.co_filename}"] += 1

    engine.submit(replace(request, arrival_s=engine.clock()))
    sys.setprofile(note)
    try:
        engine._turn()
        while engine._scheduler.has_work:
            engine._turn()
    finally:
        sys.setprofile(None)
    return calls


def test_a_recording_replays_what_waited_for_a_tower(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Towers go on in pieces then, too."""
    advance = ImageVectors.advance
    monkeypatch.setattr(ImageVectors, "advance", lambda vectors, digests, seconds: advance(vectors, digests, 0.0))
    path, file, lives = str(images.vision(folder, "Qwen3VLConfig").path), tmp_path / "recording", []
    for record in (None, str(file)):
        config = EngineConfig(model=path, dtype="float32", record=record, **SIZES)
        with running(build_engine(config, lambda progress: None)) as (engine, heard):
            engine.submit(ask("text", PROMPTS[3][0], max_tokens=50))
            lives.append([answer(engine, heard, ask(f"{i}", PROMPTS[i][0], **FIELDS)) for i in (0, 1, 4)])
    assert lives[0] == lives[1]
    plans = [json.loads(line) for line in file.read_text().splitlines()[1:] if '"plan"' in line]
    assert sum("missing" in plan and "decodes" in plan for plan in plans) > 20
    replayed = replay_recording(file)
    assert not replayed.difference
    assert replayed.num_requests == 4


@contextmanager
def door(folder: Path) -> Iterator[tuple[Engine, prompts.Theirs, TestClient]]:
    """An application over an engine of a tiny Qwen3-VL."""
    theirs = prompts.checkpoint(folder, "qwen3_vl")
    name = str(theirs.folder)
    engine = build_engine(EngineConfig(model=name, dtype="float32", **prompts.POOL), lambda progress: None)
    tokenizer = load_tokenizer(name)
    app = AppConfig(model=name, served_model_names=("tiny",), shutdown_timeout_s=0.0)
    application = create_app(engine, tokenizer, app, ImagePreprocessor.of(theirs.folder, tokenizer))
    with TestClient(application, base_url="http://127.0.0.1") as http:
        yield engine, theirs, http


def asked_of(http: TestClient, parts: prompts.Parts, **fields: Any) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of its answer."""
    return answered(http, [prompts.sent(part) for part in parts], **fields)


def answered(http: TestClient, content: list[Any], **fields: Any) -> tuple[list[int], list[int]]:
    """The same for the parts of a message."""
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "return_token_ids": True, **fields}
    given = http.post("/v1/chat/completions", json=body).json()
    return given["prompt_token_ids"], given["choices"][0]["token_ids"]


def test_a_conversation_that_is_edited_finds_no_more_than_is_equal(folder: Path) -> None:
    """Images of one size change places, come again, and stand behind another text, beside what is cached of them."""
    one, other = prompts.picture(7, 60, 40), prompts.picture(8, 60, 40)
    edits: list[prompts.Parts] = [
        [one, "What?", other, "And that?"],
        [other, "What?", one, "And that?"],
        [one, "Who??", other, "And that?"],
        [one, "What?", one, "And that?"],
        [one, "What?", "And that?", other],
        ["And", one, "What?", other, "And that?"],
        [one, "What?", other, "And that?"],
    ]
    with door(folder) as (engine, theirs, http):
        for parts in edits:
            assert asked_of(http, parts, max_tokens=16) == prompts.answer_of(theirs, parts)
        assert engine.stats.prefix_hit_tokens > 100


def test_an_image_in_little_detail_is_another_one(folder: Path) -> None:
    """What is cached of it is not found for the whole, nor the other way round."""
    whole = prompts.picture(9, 700, 500)
    little = whole.copy()
    little.thumbnail((512, 512), Pillow.Resampling.BICUBIC)
    with door(folder) as (engine, theirs, http):
        wanted = {"auto": prompts.answer_of(theirs, [whole]), "low": prompts.answer_of(theirs, [little])}
        hits = [0]
        for detail in ("auto", "low", "auto", "low"):
            part = prompts.sent(whole)
            part["image_url"]["detail"] = detail
            assert answered(http, [part], max_tokens=16) == wanted[detail]
            hits.append(engine.stats.prefix_hit_tokens)
        assert hits[0] == hits[1] == hits[2] < hits[3] < hits[4]


def test_preempted_answers_follow_their_grammars_behind_images(folder: Path) -> None:
    """In a pool for some of them, each goes on at its image's positions, in the state of its grammar."""
    found, grammar = images.vision(folder, "Qwen3VLConfig"), StepGrammar(length=14, vocab_size=128)
    fields: dict[str, Any] = {**FIELDS, "max_tokens": 14, "grammar": grammar}
    roomy = settings(num_blocks=300)
    lives, num_preemptions = [], []
    for config in (roomy, replace(roomy, num_blocks=22)):
        scheduler = Scheduler(config)
        asked = [ask(f"{i}", ids, **fields) for i, (ids, _) in enumerate(PROMPTS)]
        served = serve(found.model, config, asked, runner=runner_of(found, config), scheduler=scheduler, apart=1)
        assert all(follows(ids, grammar) for ids in served.ids.values())
        lives.append(said(served))
        num_preemptions.append(scheduler.stats.preemptions)
    assert lives[0] == lives[1]
    assert num_preemptions[0] == 0 < num_preemptions[1]


def test_a_grammar_rules_an_answer_about_an_image(folder: Path) -> None:
    with door(folder) as (_, theirs, http):
        parts = prompts.CONVERSATIONS[1]
        letters = theirs.processor.tokenizer.convert_tokens_to_ids(["a", "b", "c"])
        wanted = prompts.answer_of(
            theirs, parts, max_new_tokens=8, prefix_allowed_tokens_fn=lambda batch, context: letters
        )
        for _ in range(2):
            ids, answer = asked_of(http, parts, structured_outputs={"regex": "[abc]{8}"})
            assert (ids, answer[:8]) == wanted
            assert len(answer) <= 9, "nothing but an end comes then"
