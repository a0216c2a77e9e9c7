"""A hand-over between two real engines: the answers have the bits of one engine alone."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.kv.prefix_cache import request_names
from engine.core.types import Request, StepEvents, TokenEvent
from engine.handover import Handover, HandoverConfig, Prefix, open_handover
from engine.loop import Engine
from engine.settings.engine_config import EngineConfig
from engine.settings.peer import Peer
from engine.startup.build import build_engine
from tests.cpu.model_driver import request
from tests.cpu.test_disk_store import PROMPTS, tiny
from tests.patience import PATIENCE_S

BLOCK_SIZE = 4
NUM_BLOCKS = (len(PROMPTS[0]) - 1) // BLOCK_SIZE
Said = dict[str, list[tuple[object, ...]]]  # of each request: tokens and their log probabilities


class Daemon:
    """A real engine with one end of the hand-over."""

    def __init__(self, model: Path, transport: HandoverConfig, dtype: str, kv_dtype: str) -> None:
        config = EngineConfig(
            model=str(model),
            load_format="auto",
            device="cpu",
            dtype=dtype,
            kv_cache_dtype=kv_dtype,
            block_size=BLOCK_SIZE,
            max_model_len=64,
            max_num_seqs=2,
            kv_cache_memory_bytes=1 << 20,
        )
        self.engine: Engine = build_engine(config, lambda progress: None, hands_over=True)
        self.handover: Handover = open_handover(self.engine, transport)
        self._heard: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
        self.engine.start(self._heard.put)

    def prefix(self, asked: Request) -> Prefix:
        names = request_names(asked, self.engine.config)
        return Prefix(names, asked.prompt, names[0])

    def say(self, requests: list[Request]) -> tuple[Said, int]:
        """Return the answers, and how many prompt tokens came from the cache."""
        for asked in requests:
            self.engine.submit(replace(asked, arrival_s=self.engine.clock()))
        said: Said = {}
        num_open, num_cached = len(requests), 0
        while num_open:
            for event in self._heard.get(timeout=PATIENCE_S):
                assert isinstance(event, TokenEvent)
                assert event.error is None
                said.setdefault(event.request_id, []).append((tuple(event.token_ids), event.logprobs))
                num_cached += 0 if event.prompt is None else event.prompt.num_cached_tokens
                num_open -= event.finish_reason is not None
        return said, num_cached


@contextmanager
def daemon(model: Path, transport: HandoverConfig, dtype: str, kv_dtype: str) -> Iterator[Daemon]:
    opened = Daemon(model, transport, dtype, kv_dtype)
    yield opened
    opened.handover.close()
    opened.engine.stop(0.0)
    assert opened.engine.stats.integrity_failures == 0


@pytest.mark.parametrize(
    ("kind", "dtype", "kv_dtype", "over_tcp"),
    [
        ("llama", "float32", "auto", True),
        ("llama", "bfloat16", "auto", False),
        ("llama", "float32", "int8", True),
        ("qwen3_5", "bfloat16", "auto", True),
        ("lfm2", "bfloat16", "auto", False),
    ],
)
def test_answers_after_a_hand_over_have_the_bits_of_one_engine(
    tmp_path: Path, kind: str, dtype: str, kv_dtype: str, over_tcp: bool
) -> None:
    """Recurrent state comes with K/V."""
    model, folder = tiny(tmp_path, kind), tmp_path / "parcels"
    near = HandoverConfig(folder=folder)
    listening = HandoverConfig(folder=folder, listen=Peer("127.0.0.1", 0), key="k")
    asked = [request(str(name), prompt, max_tokens=8, logprobs=3) for name, prompt in enumerate(PROMPTS)]
    with daemon(model, listening if over_tcp else near, dtype, kv_dtype) as prefill:
        expected, _ = prefill.say(asked)
        port = prefill.handover.port
        peer = None if port is None else Peer("127.0.0.1", port)
        far = HandoverConfig(folder=tmp_path / "other", peers=frozenset({peer} if peer else ()), key="k")
        with daemon(model, far if over_tcp else near, dtype, kv_dtype) as decode:
            for each in asked:
                offer = prefill.handover.send(prefill.prefix(each))
                assert offer is not None
                assert decode.handover.receive(offer.name, decode.prefix(each), peer) == NUM_BLOCKS
            assert decode.say(asked) == (expected, len(asked) * NUM_BLOCKS * BLOCK_SIZE)
    assert all(logprobs for said in expected.values() for _, logprobs in said)
