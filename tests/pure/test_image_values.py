"""Images that requests name: held while a request lives, refused where a model takes none, waited for while they are made."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Sequence

import numpy as np
import pytest

from engine.core.budget import Allowance
from engine.core.config import SchedulerConfig
from engine.core.errors import InvalidRequestError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.spans import Span
from engine.core.types import Request, SamplingParams
from engine.handle import EngineFacts
from engine.images import Image
from engine.loop import Engine
from engine.resources import EngineResources
from loadtest.fake_runner import FakeRunner
from tests.integrity import check_scheduler


def request_of(image: Image) -> Request:
    span = Span(1, image.num_tokens, image.digest)
    params = SamplingParams(max_tokens=1)
    prompt = (1,) * (2 + image.num_tokens)
    return Request(request_id="", prompt=prompt, params=params, arrival_s=0.0, spans=(span,), images=(image,))


def image() -> Image:
    return Image(b"digest", {"pixel_values": np.ones((4, 3), np.float32)}, 4, (1, 2, 2))


def test_an_image_is_found_as_long_as_a_request_holds_it() -> None:
    resources = EngineResources(check_image=lambda _: None)
    request = pickle.loads(pickle.dumps(request_of(image())))
    held = resources.hold(request)
    del request
    assert resources.find(b"digest") is held[0]
    del held
    gc.collect()
    with pytest.raises(StopIteration):
        resources.find(b"digest")


def test_a_model_without_images_refuses_them() -> None:
    with pytest.raises(InvalidRequestError, match="takes no images"):
        EngineResources().hold(request_of(image()))


@pytest.mark.parametrize("is_atomic", [False, True])
def test_a_prompt_waits_before_vectors_that_are_not_made_and_others_go_on(is_atomic: bool) -> None:
    config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
    scheduler, runner, made = Scheduler(config), FakeRunner(config), set[bytes]()
    scheduler.missing.has = made.__contains__
    spans = (Span(5, 6, b"first", is_atomic), Span(12, 3, b"second", is_atomic))
    params = SamplingParams(max_tokens=2)
    scheduler.add(Request(request_id="seen", prompt=tuple(range(20)), params=params, arrival_s=0.0, spans=spans))
    scheduler.add(Request(request_id="text", prompt=(1, 2, 3), params=params, arrival_s=0.0))
    reached, ended = [], list[str]()
    for step in range(12):
        plan = scheduler.plan(float(step))
        reached.append(
            max([*reached[-1:], *[each.start + each.num_tokens for each in plan.chunks]] if plan else reached)
        )
        if plan is not None:
            events = scheduler.commit(plan, runner.run(plan).wait(), float(step))
            ended += [event.request_id for event in events if event.finish_reason is not None]
        assert list(scheduler.missing.digests) == ([] if step > 7 else [b"first"] if step < 4 else [b"second"])
        made |= {b"first"} if step == 3 else {b"second"} if step == 7 else set()
    assert reached == [5] * 4 + [12] * 4 + [20] * 4
    assert ended == ["text", "seen"]
    check_scheduler(scheduler)


def test_a_long_prompt_goes_on_beside_those_that_wait_for_vectors() -> None:
    """And has the time of one long prompt: what waits is none of those that share it."""
    config = SchedulerConfig(num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
    scheduler, runner, shared = Scheduler(config), FakeRunner(config), list[int]()
    scheduler.missing.has = lambda _: False
    params, ended = SamplingParams(max_tokens=1), list[str]()
    for name, spans in (("one", (Span(0, 20, b"1"),)), ("two", (Span(0, 20, b"2"),)), ("text", ())):
        prompt = tuple(range(60 if name == "text" else 24))
        scheduler.add(Request(request_id=name, prompt=prompt, params=params, arrival_s=0.0, spans=spans))
    with pytest.MonkeyPatch.context() as patch:
        long_s = Allowance.long_s
        patch.setattr(
            Allowance, "long_s", lambda each, long, *rest: (shared.append(len(long)), long_s(each, long, *rest))[1]
        )
        for step in range(4):
            plan = scheduler.plan(float(step))
            assert plan is not None
            events = scheduler.commit(plan, runner.run(plan).wait(), float(step))
            ended += [event.request_id for event in events if event.finish_reason is not None]
    assert ended == ["text"]
    assert set(shared) == {1}
    assert list(scheduler.missing.digests) == [b"1", b"2"]


@pytest.mark.parametrize(
    ("num_streams", "target_itl_s", "piece_s"), [(8, None, 0.06), (4, None, 0.24), (1, None, 0.5), (1, 0.2, 0.08)]
)
def test_a_piece_is_longer_beside_few_streams(num_streams: int, target_itl_s: float | None, piece_s: float) -> None:
    """Steps take 0.1 s of a clock that only they move."""
    config = SchedulerConfig(
        num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=12, max_num_batched_tokens=64,
        target_itl_s=target_itl_s,
    )  # fmt: skip
    now_s, asked = [0.0], list[float]()

    class Maker:
        def has(self, digest: bytes) -> bool:
            return False

        def advance(self, digests: Sequence[bytes], seconds: float) -> None:
            asked.append(seconds)

        def close(self) -> None: ...

    runner = FakeRunner(config, sleep=lambda _: now_s.append(now_s[-1] + 0.1))
    resources = EngineResources(check_image=lambda _: None)
    engine = Engine(
        Scheduler(config), runner, EngineFacts(512), resources=resources, vision=Maker(), clock=lambda: now_s[-1]
    )
    params = SamplingParams(max_tokens=40)
    streams = [Request(request_id=str(i), prompt=(i, 2), params=params, arrival_s=0.0) for i in range(num_streams)]
    engine.submit(*streams, request_of(image()))
    for _ in range(8):
        engine._turn()
    assert asked[-3:] == pytest.approx([piece_s] * 3)
    engine.stop(0.0)
