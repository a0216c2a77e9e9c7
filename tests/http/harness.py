"""The real application over the fake runner, served by uvicorn on a free loopback port.

The fake model is a parrot: a prompt that holds a `|` is answered with what stands before it, then the end token; any
other prompt is answered with letters for ever. So every expected text can be read off the request.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.adapters import Adapters
from engine.core.config import SchedulerConfig
from engine.core.rows import SequenceSlice
from engine.core.scheduling.scheduler import Scheduler
from engine.handle import EngineFacts, Layout
from engine.loop import Engine, Outbound
from engine.outbound.kv_events import KVEvents
from engine.overload import QueueLimits
from engine.resources import EngineResources, refuse_image
from engine.text.images.preprocessor import ImagePreprocessor
from engine.text.tokenizer import TextTokenizer, TokenizerConfig
from engine.text.types import SamplingDefaults
from loadtest.fake_runner import CostModel, FakeRunner
from server.app import create_app
from server.http.connection import Connection
from server.settings.app_config import AppConfig
from tests.http.engine_process import EngineProcess
from tests.integrity import check_scheduler
from tests.patience import PATIENCE_S, eventually, hurry_uvicorn

hurry_uvicorn()

PLACE = os.environ.get("ENGINE_PLACE", "thread")  # where engines are; "process" for all of them elsewhere
NOT_SERVED: set[EngineProcess] = set()  # of applications that no test has served to the end
END = 256
VOCAB_SIZE = 258  # 256 bytes, the end token, and one id that the tokenizer does not have
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}|{% endif %}"
    "{{ suffix or '' }}"
)
# Only whole blocks are found: short prompts that tests have in common are nothing to any of them.
CONFIG = SchedulerConfig(
    num_blocks=256,
    block_size=16,
    max_model_len=512,
    max_num_seqs=16,
    max_num_batched_tokens=256,
)
APP = AppConfig(model="some/parrot", served_model_names=("parrot", "bird"), shutdown_timeout_s=0.0)


def byte_tokenizer(
    template: str = TEMPLATE, pairs: Mapping[str, int] = {}, marks: Sequence[str] = (), tags: Sequence[str] = ()
) -> TextTokenizer:
    """One token a byte, in byte order, an end token, `marks`, and `tags`, which are shown.

    `pairs` of letters are tokens in place of other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    ids = {letters[byte]: byte for byte in range(256) if byte not in pairs.values()} | pairs
    backend = Tokenizer(models.BPE(dict(ids), [(pair[0], pair[1]) for pair in pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in ("<end>", *marks)])
    backend.add_tokens([AddedToken(tag, special=False) for tag in tags])
    vocabulary = TokenizerConfig(
        special_tokens={},
        eos_token_ids=frozenset({END}),
        chat_template=template,
        sampling_defaults=SamplingDefaults(),
    )
    return TextTokenizer(backend, vocabulary)


def parrot(history: Sequence[int], seed: int) -> int:
    """The next token."""
    if ord("|") not in history:
        return ord("a") + len(history) % 26
    told = list(history).index(ord("|"))
    position = len(history) - told - 1
    return history[position] if position < told else END


class Gate:
    """Lets the engine step only while it is open; of this process or of a fork."""

    def __init__(self) -> None:
        self._opened = multiprocessing.get_context("fork").Event()
        self.open()

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()

    def __call__(self, seconds: float) -> None:
        assert self._opened.wait(PATIENCE_S), "a test left the gate closed"
        time.sleep(seconds)


def check_ended(scheduler: Scheduler) -> None:
    """Nothing is open, held or out of balance."""
    assert not scheduler.has_work
    check_scheduler(scheduler)


def parts_of(app: FastAPI) -> Any:
    """The parts that models share, and those of the first."""
    first = app.state.models.loaded[0]
    own = {name: getattr(first, name) for name in ("client", "engine", "live", "model", "responder")}
    more = {"tokenizer": first.model.tokenizer, "sender": first.responder.sender, "receiver": first.responder.receiver}
    return SimpleNamespace(**app.state._state, **own, **more)


class Live:
    """A served application and its engine."""

    def __init__(
        self,
        *,
        config: SchedulerConfig = CONFIG,
        limits: QueueLimits = QueueLimits(),  # noqa: B008 - immutable
        fail: Callable[[SequenceSlice], str | None] | None = None,
        step_s: float = 0.0,
        depth: int = 0,
        template: str = TEMPLATE,
        pairs: Mapping[str, int] = {},
        runner: type[FakeRunner] = FakeRunner,
        adapters: Adapters | None = None,
        kv_events: KVEvents | None = None,
        place: str = PLACE,
        images: Callable[[TextTokenizer], ImagePreprocessor] | None = None,
        **app: Any,
    ) -> None:
        """`place` of the engine is "thread" or "process"; KV events have sockets, which no other process can share.

        `images` makes what prepares images; then `<|image_pad|>` is a token.
        """
        self.gate = Gate()

        def make() -> tuple[Scheduler, FakeRunner, Engine]:
            scheduler, cost = Scheduler(config), CostModel(step_s=step_s, token_s=0.0)
            made = runner(config, vocab_size=VOCAB_SIZE, choose=parrot, cost=cost, sleep=self.gate, fail=fail)
            layout = Layout("parrot", config.block_size, 4 * config.block_size)
            facts = EngineFacts(VOCAB_SIZE, layout=layout, takes_images=images is not None)
            check = refuse_image if images is None else lambda _: None
            resources, outbound = EngineResources(adapters, check), Outbound(kv_events=kv_events)
            engine = Engine(scheduler, made, facts, depth=depth, limits=limits, resources=resources, outbound=outbound)
            return scheduler, made, engine

        def make_there() -> tuple[Engine, Callable[[], None]]:
            scheduler, _, engine = make()
            return engine, lambda: check_ended(scheduler)

        self._parts: tuple[Scheduler, FakeRunner] | None = None
        self.engine: Any
        if place == "process" and kv_events is None:
            self.engine = EngineProcess(make_there)
            NOT_SERVED.add(self.engine)
        else:
            *self._parts, self.engine = make()
        tokenizer = byte_tokenizer(template, pairs, [] if images is None else ["<|image_pad|>"])
        prepares = None if images is None else images(tokenizer)
        self.app = create_app(self.engine, tokenizer, replace(APP, **app), prepares)
        self.context = parts_of(self.app)
        self.url = ""

    def require_thread(self) -> None:
        """Skip a test that breaks the engine's code, where the engine is in another process."""
        self._here()

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for a test that looks at it or breaks it."""
        return self._here()[0]

    @property
    def runner(self) -> FakeRunner:
        """The runner, likewise."""
        return self._here()[1]

    def _here(self) -> tuple[Scheduler, FakeRunner]:
        if self._parts is None:
            pytest.skip("the engine is in another process")
        return self._parts

    @contextmanager
    def serving(self) -> Iterator[Live]:
        """Serve until left; then nothing may be open, held or out of balance."""
        # Named TCP, or asyncio leaves Nagle's algorithm on for what it accepts and answers wait for acknowledgements.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(
            uvicorn.Config(self.app, loop="asyncio", http=Connection, ws="none", lifespan="on", log_config=None)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        NOT_SERVED.discard(self.engine)
        try:
            eventually(lambda: server.started)
            yield self
            self.gate.open()
            self.check_idle()
        finally:
            self.gate.open()
            server.should_exit = True
            thread.join(PATIENCE_S)
            listener.close()
        assert not thread.is_alive()
        if self.engine.health().error is None:
            self.engine.check() if self._parts is None else check_ended(self.scheduler)
        if self._parts is None:
            self.engine.close()

    def check_idle(self) -> None:
        """Every request ends, is forgotten, and gives back what it held, without waiting for a shutdown."""
        eventually(lambda: self.context.client.num_open == 0)
        if self.engine.health().error is not None:
            return  # it died in the middle of a step
        eventually(lambda: not self.engine.health().busy)
        eventually(lambda: self.engine.stats.blocks_held == 0)  # counted after the step that ends the work
        assert self.engine.stats.integrity_failures == 0
