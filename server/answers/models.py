"""The models that this daemon serves: which of them a request names, and what answers for it. Event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.core.errors import QuireError, shorten
from engine.handle import EngineHandle
from engine.text.tokenizer import TextTokenizer
from server.answers.client import EngineClient
from server.answers.content_guard import Judge
from server.answers.model import ServedModel
from server.answers.respond import Responder
from server.protocol.errors import ApiError
from server.settings.app_config import AppConfig
from server.telemetry.live import LiveView

if TYPE_CHECKING:
    from engine.text.images.preprocessor import ImagePreprocessor


class LoadedModel(NamedTuple):
    """A model's engine, unstarted, and its tokenizer; with `images` where it takes some."""

    engine: EngineHandle
    tokenizer: TextTokenizer
    images: ImagePreprocessor | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ModelParts:
    """What answers requests of one model."""

    config: AppConfig
    engine: EngineHandle
    client: EngineClient
    model: ServedModel
    responder: Responder
    live: LiveView
    judge: Judge | None = None  # of a guard
    adapter_turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # adapters are read one at a time

    @property
    def name(self) -> str:
        """Return the name that is reported."""
        return self.config.served_model_names[0]

    async def close(self) -> None:
        """Close what the engine does not own."""
        if self.responder.receiver is not None:
            await self.responder.receiver.close()
        self.model.tokenizer.close()
        if self.model.images is not None:
            self.model.images.close()


class Models:
    """Finds the parts for a model's name; the first model answers requests without one."""

    def __init__(self) -> None:
        self.loaded: list[ModelParts] = []

    @property
    def first(self) -> ModelParts:
        """Return the parts of the first model."""
        return self.loaded[0]

    def find(self, name: str | None) -> ModelParts:
        """Return the parts of a model, an adapter or an alias. Raises a 404 for an unknown name."""
        if name is None:
            return self.first
        for aliases in (False, True):
            for parts in self.loaded:
                if parts.model.has(name, aliases=aliases):
                    return parts
        served = [
            each
            for parts in self.loaded
            for each in (*parts.model.names, *parts.config.model_aliases, *parts.engine.adapters)
        ]
        message = f"The model {shorten(name)!r} is not served here; use {' or '.join(served)}."
        raise ApiError(404, "model_not_found", message, "model")

    def named(self, name: str) -> ModelParts | None:
        """Return the parts of the loaded model of this first name."""
        return next((parts for parts in self.loaded if parts.name == name), None)

    # -- of all engines ----------------------------------------------------------------------------------------------

    @property
    def engines(self) -> list[EngineHandle]:
        """Return the engines of loaded models."""
        return [parts.engine for parts in self.loaded]

    @property
    def is_draining(self) -> bool:
        """Return whether the engines are being stopped."""
        return all(parts.client.is_draining for parts in self.loaded)

    @property
    def is_abandoned(self) -> bool:
        """Return whether engines did not stop in time."""
        return any(parts.client.is_abandoned for parts in self.loaded)

    @property
    def num_open(self) -> int:
        """Return the number of open requests."""
        return sum(parts.client.num_open for parts in self.loaded)

    @property
    def request_s(self) -> float:
        """Return how long requests take on average."""
        return max(engine.stats.e2e_s.mean for engine in self.engines)

    @property
    def is_dead(self) -> bool:
        """Return whether no engine lives any more."""
        return all(engine.health().error is not None for engine in self.engines)

    def order_stop(self, drain_s: float) -> None:
        """Refuse new work from now on; let open answers finish for `drain_s`, abort the rest."""
        for parts in self.loaded:
            parts.client.order_stop(drain_s)

    async def stop(self, drain_s: float) -> None:
        """Order the stop and return when all engines have stopped."""
        await asyncio.gather(*(parts.client.stop(drain_s) for parts in self.loaded))

    def abandon(self, error: QuireError) -> None:
        """End every open answer on `error`, and ignore the engines from now on."""
        for parts in self.loaded:
            parts.client.abandon(error)
