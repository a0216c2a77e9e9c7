"""The models that this daemon serves, loaded or not: which one a request names, and what answers for it. Event loop.

A model is loaded at the start, or when the first request names it. The loads of the start begin before the application is
there, and requests are a 503 until they end. After them one load runs at a time, in the order in which requests came; it
takes its room from models without work, the least useful first. Where all of those work, the least useful one takes no more
requests, which wait for it to be loaded again: so none is unloaded with work, and no load waits forever. A load runs on a
thread outside the native library's team, and ends early if all who asked for it have left.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from engine.core.errors import ModelLoadError, NotWantedError, QuireError, ShuttingDownError
from engine.core.shown import shorten
from engine.handle import EngineHandle
from engine.system.progress import human_bytes
from engine.text.tokenizer import TextTokenizer
from server.answers.client import EngineClient
from server.answers.content_guard import Judge
from server.answers.model import ServedModel
from server.answers.model_memory import Memory
from server.answers.respond import Responder
from server.protocol.errors import ApiError
from server.settings.app_config import AppConfig
from server.telemetry.live import LiveView

if TYPE_CHECKING:
    from engine.text.images.preprocessor import ImagePreprocessor

log = logging.getLogger("quire.models")

RETRY_S = 30.0  # after a load failed, until a request tries again
_FOLDERS = re.compile(r"(?<![\w.~:/])~?/([^/\s'\"]+/)+")  # of a file, which the log names for the operator alone
_LOOK_S = 1.0  # at least, between two looks for models without work


class LoadedModel(NamedTuple):
    """A model's engine, unstarted, and its tokenizer; with `images` where it takes some."""

    engine: EngineHandle
    tokenizer: TextTokenizer
    images: ImagePreprocessor | None = None
    load_s: float = 0.0
    memory: Memory | None = None  # where several models share it


class State(Enum):
    """Whether a model answers; the values are llama-server's words."""

    LOADED = "loaded"
    LOADING = "loading"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True, eq=False)
class ModelParts:
    """What answers requests of one model."""

    config: AppConfig
    engine: EngineHandle
    client: EngineClient
    model: ServedModel
    responder: Responder
    live: LiveView
    forget: Callable[[], None]  # its metrics
    judge: Judge | None = None  # of a guard
    adapter_turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # adapters are read one at a time

    @property
    def name(self) -> str:
        """Return the name that is reported."""
        return self.config.served_model_names[0]

    def close(self) -> None:
        """Close what the engine does not own."""
        self.model.tokenizer.close()
        if self.model.images is not None:
            self.model.images.close()


class Holder(Protocol):
    """A request, which keeps its model loaded until it releases what it holds."""

    held: Any


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A model of the list."""

    config: AppConfig
    load: Callable[[Callable[[], bool]], LoadedModel] | None = None  # asks whether it is wanted; None: never again
    adapters: Sequence[str] = ()  # of the start
    is_kept: bool = True
    memory: Memory = Memory()  # noqa: RUF009 - immutable
    takes_images: bool = False  # as its files say; a loaded one knows
    parts: ModelParts | None = None
    created_s: int = field(default_factory=lambda: int(time.time()))
    load_s: float = 0.0  # that the last load took
    num_loads: int = 0
    asked_s: float = field(default_factory=time.monotonic)  # of the last request
    error: str = ""  # of the last load
    failed_s: float = 0.0
    num_waiting: int = 0  # requests for a load
    num_users: int = 0  # requests that it answers
    is_leaving: bool = False
    loading: asyncio.Task[None] | None = None
    begun: Future[LoadedModel] | None = None  # the load of the start, until it has ended
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set when a request leaves

    @property
    def name(self) -> str:
        """Return the name that is reported."""
        return self.config.served_model_names[0]

    @property
    def names(self) -> list[str]:
        """Return what requests may call it, without patterns."""
        return [*self.config.served_model_names, *(self.parts.engine.adapters if self.parts else self.adapters)]

    @property
    def state(self) -> State:
        """Return whether the model answers."""
        if self.loading is not None or self.begun is not None:
            return State.LOADING
        if self.reason:
            return State.FAILED
        return State.UNLOADED if self.parts is None else State.LOADED

    @property
    def reason(self) -> str:
        """Return why it failed; empty if it did not."""
        return self.error or (self.parts is not None and self.parts.engine.health().error) or ""

    @property
    def is_ready(self) -> bool:
        """Return whether requests may use it."""
        return self.parts is not None and not self.is_leaving

    @property
    def is_used(self) -> bool:
        """Return whether requests use it, or are about to."""
        return self.num_users > 0 or (self.num_waiting > 0 and self.loading is None)

    @property
    def idle_s(self) -> float:
        """Return the seconds since it last had work."""
        last_s = max(self.asked_s, 0.0 if self.parts is None else self.parts.engine.stats.last_step_s)
        return 0.0 if self.is_used else time.monotonic() - last_s

    @property
    def use_of_a_byte(self) -> float:
        """Return the seconds of loading again, against its bytes and the time without work."""
        return self.load_s / (max(self.memory.total, 1) * max(self.idle_s, 1e-3))

    def hold(self, holder: Holder) -> None:
        """Count a request as its user."""
        self.num_users += 1
        holder.held = self

    def release(self) -> None:
        """Count a request as its user no longer."""
        self.num_users -= 1
        self.changed.set()

    def now(self, *, is_asked: bool = False) -> ModelParts:
        """Return its parts. Raises a 503 unless it is loaded, and with `is_asked` if it is to leave."""
        if self.parts is None or (is_asked and self.is_leaving):
            if self.state is State.LOADING:
                message = f"The model {self.name!r} is being loaded; send the request again in a moment."
                raise ApiError(503, "model_loading", message, "model", "server_error")
            hint = ", or ask it something" if self.config.models_autoload else ""
            message = f"The model {self.name!r} is not loaded; POST /v1/models/{self.name}/load{hint}."
            raise ApiError(503, "model_not_loaded", self.error or message, "model", "server_error")
        return self.parts


class Models:
    """Finds the parts for a model's name; the first model answers requests without one."""

    def __init__(self, config: AppConfig) -> None:
        self.entries: list[Entry] = []
        self.memory_limit: int | None = None  # of those that are loaded at once
        self.loader = ThreadPoolExecutor(
            1, "quire-loader"
        )  # whose thread lives as long as the models: ranks die with it
        self.make_parts: Callable[[AppConfig, LoadedModel], ModelParts]  # of the application
        self._config = config
        self._turn = asyncio.Lock()  # of loads and unloads
        self._changed = asyncio.Event()  # a request has left a model
        self._watching: asyncio.Task[None] | None = None
        self.is_draining = False  # the engines are being stopped

    def add(self, entry: Entry, loaded: LoadedModel | None) -> None:
        """Add a model, which is loaded already, is being loaded, or can be."""
        entry.changed = self._changed
        if loaded is not None:
            entry.parts, entry.num_loads, entry.load_s = self.make_parts(entry.config, loaded), 1, loaded.load_s
        self.entries.append(entry)

    @property
    def loaded(self) -> list[ModelParts]:
        """Return the parts of models that are loaded."""
        return [entry.parts for entry in self.entries if entry.parts is not None]

    def find(self, name: str | None) -> Entry:
        """Return the model of a name, an adapter or an alias. Raises a 404 for an unknown name."""
        if name is None:
            return self.entries[0]
        for entry in self.entries:
            if name in entry.names:
                return entry
        for entry in self.entries:
            if entry.config.is_alias(name):
                return entry
        served = [
            each
            for entry in self.entries
            for each in (*entry.names, *entry.config.model_aliases)
            if each in entry.names or "*" in each  # else it is the model's path
        ]
        message = f"The model {shorten(name)!r} is not served here; use {' or '.join(served)}."
        raise ApiError(404, "model_not_found", message, "model")

    def named(self, name: str) -> ModelParts | None:
        """Return the parts of the loaded model of this first name."""
        return next((parts for parts in self.loaded if parts.name == name), None)

    @contextmanager
    def borrow_judge(self, name: str) -> Iterator[Judge | None]:
        """Keep a guard loaded for a verdict. Raises a 503 if it is not loaded, or leaves other than at the end."""
        entry = self.find(name)
        judge = entry.now(is_asked=not self.is_draining).judge
        entry.num_users += 1
        try:
            yield judge
        finally:
            entry.release()

    # -- loads -------------------------------------------------------------------------------------------------------

    async def use(self, entry: Entry, holder: Holder | None = None, *, asks: bool = True) -> ModelParts:
        """Return a model's parts, once it is loaded; `holder` then keeps it.

        Raises a 503 if that failed, and with `asks` if loads are not for requests to ask for.
        """
        entry.asked_s = time.monotonic()
        entry.num_waiting += 1
        try:
            parts, patience_s = None if entry.is_leaving else entry.parts, RETRY_S
            while parts is None:
                self._check(entry, patience_s, asks=asks)
                if entry.loading is None:
                    entry.loading = asyncio.create_task(self._load(entry))
                    entry.changed.set()
                await asyncio.shield(entry.loading)
                parts, patience_s = entry.parts, math.inf  # even if it is to leave next: not before it was used
            if holder is not None:
                entry.hold(holder)
            return parts
        finally:
            entry.num_waiting -= 1
            entry.changed.set()

    def _check(self, entry: Entry, patience_s: float, *, asks: bool) -> None:
        """Raise a 503 if a load is of no use; a failure counts for `patience_s`."""
        if self.is_draining:
            raise ShuttingDownError("The server is shutting down; send the request to another one.")
        if self.is_starting or (asks and entry.loading is None and not entry.config.models_autoload):
            entry.now(is_asked=True)
        if entry.error and (time.monotonic() - entry.failed_s < patience_s or entry.load is None):
            message = f"The model {entry.name!r} could not be loaded: {entry.error}"
            raise ApiError(503, "model_failed", message, "model", "server_error")

    async def _load(self, entry: Entry) -> None:
        """Load a model when its turn has come and there is room; its error is for those who wait."""
        assert entry.load is not None, "one that cannot be loaded again is never unloaded"
        entry.error, loaded, parts = "", None, None
        try:
            async with self._turn:
                if entry.parts is not None:  # it did not leave
                    return
                await self._make_room(entry)
                loop = asyncio.get_running_loop()
                loaded = await loop.run_in_executor(self.loader, entry.load, lambda: self._is_wanted(entry))
                parts = await loop.run_in_executor(self.loader, self.make_parts, entry.config, loaded)
                self._take(entry, parts, loaded)
                loaded = None
                log.info("loaded %s in %.1f s", entry.name, entry.load_s)
        except NotWantedError:
            log.info("gave up loading %s: nobody waits for it", entry.name)
        except Exception as error:  # any: it is this model's alone
            why = str(error) or type(error).__name__
            log.error("%s could not be loaded: %s", entry.name, why)  # noqa: TRY400 - one line
            entry.error, entry.failed_s = _FOLDERS.sub("", why), time.monotonic()
            log.debug("it happened here:", exc_info=True)
            if parts is not None:
                parts.forget()
            if loaded is not None:
                await asyncio.to_thread(loaded.engine.stop, 0.0)
        finally:
            entry.loading = None

    async def finish_start(self) -> None:
        """Take the models whose loads began at the start, in their order. Raises what a load raised."""
        for entry in self.entries:
            if entry.begun is not None:
                loaded, loop = await asyncio.wrap_future(entry.begun), asyncio.get_running_loop()
                parts = await loop.run_in_executor(self.loader, self.make_parts, entry.config, loaded)
                entry.begun = None
                self._take(entry, parts, loaded)
        self.check_guards()

    def check_guards(self) -> None:
        """Raise ConfigError if a model is to be guarded by one that is no guard."""
        for parts in self.loaded:
            if (guard := parts.responder.guard) is not None:
                guard.check()

    def _take(self, entry: Entry, parts: ModelParts, loaded: LoadedModel) -> None:
        """Let a model answer."""
        parts.client.start()
        entry.parts, entry.num_loads, entry.load_s = parts, entry.num_loads + 1, loaded.load_s
        entry.memory = loaded.memory or entry.memory

    def _is_wanted(self, entry: Entry) -> bool:
        """Return whether requests wait for a load. Any thread."""
        return entry.num_waiting > 0 and not self.is_draining

    async def _make_room(self, entry: Entry) -> None:
        """Unload models until another fits beside the rest. Raises ModelLoadError or NotWantedError."""
        while True:
            if not self._is_wanted(entry):
                raise NotWantedError
            others = [each for each in self.entries if each.parts is not None and each is not entry]
            num_bytes = sum(each.memory.total for each in (*others, entry))
            is_small = self.memory_limit is None or num_bytes <= self.memory_limit
            if is_small and (not self._config.models_max or len(others) < self._config.models_max):
                return
            leaving = [each for each in others if not each.is_kept]
            if not leaving:
                raise ModelLoadError(f"it needs {human_bytes(entry.memory.total)} beside the models that stay.")
            least = min(leaving, key=lambda each: (each.is_used, each.use_of_a_byte))
            await self._let_go(least, lambda: self._is_wanted(entry))

    def start(self) -> None:
        """Start the engines that are loaded, and unload those without work from now on."""
        if any(entry.config.idle_unload for entry in self.entries):
            self._watching = asyncio.create_task(self._watch())
        for parts in self.loaded:
            parts.client.start()

    async def unload(self, entry: Entry) -> None:
        """Unload a model, once it has no work; requests that come meanwhile wait for it to be loaded again."""
        async with self._turn:
            await self._let_go(entry)

    async def _let_go(self, entry: Entry, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Unload a model once it has no work, as long as that is wanted."""
        entry.is_leaving = True
        try:
            while entry.is_used and is_wanted():
                self._changed.clear()
                await self._changed.wait()
            if not entry.is_used:
                await asyncio.shield(self._unload(entry))
        finally:
            entry.is_leaving = False

    async def _unload(self, entry: Entry) -> None:
        """End a model's engine, which keeps its cache on disk if there is one, and give its memory back to the system."""
        if (parts := entry.parts) is None:
            return
        entry.parts, entry.error = None, ""
        parts.forget()
        await parts.client.stop(0.0)
        parts.close()
        del parts
        await asyncio.get_running_loop().run_in_executor(self.loader, give_memory_back)
        log.info("unloaded %s", entry.name)

    async def _watch(self) -> None:
        """Unload models that had no work for --idle-unload seconds."""
        patience = [(entry, entry.config.idle_unload) for entry in self.entries if entry.config.idle_unload]
        while True:
            rest_s = min(idle_s for _, idle_s in patience)
            for entry, idle_s in patience:
                if entry.parts is None or entry.is_kept:
                    continue
                if entry.idle_s >= idle_s and not self._turn.locked():
                    await self.unload(entry)
                else:
                    rest_s = min(rest_s, idle_s - entry.idle_s)
            await asyncio.sleep(max(rest_s, _LOOK_S))

    # -- of all engines ----------------------------------------------------------------------------------------------

    @property
    def engines(self) -> list[EngineHandle]:
        """Return the engines of loaded models."""
        return [parts.engine for parts in self.loaded]

    @property
    def is_starting(self) -> bool:
        """Return whether a load of the start has not ended."""
        return any(entry.begun is not None for entry in self.entries)

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
        return max((engine.stats.e2e_s.mean for engine in self.engines), default=0.0)

    @property
    def is_dead(self) -> bool:
        """Return whether no engine lives any more, and none can be loaded."""
        return all(entry.parts and entry.parts.engine.health().error is not None for entry in self.entries)

    def order_stop(self, drain_s: float) -> None:
        """Refuse new work from now on; let open answers finish for `drain_s`, abort the rest."""
        self.is_draining = True
        self._changed.set()
        if self._watching is not None:
            self._watching.cancel()
        guards = [] if not drain_s else [self.find(e.config.guard) for e in self.entries if e.config.guard]
        for entry in self.entries:
            if entry in guards:
                entry.is_leaving = True  # answers that are open need its verdicts
            elif entry.parts is not None:
                entry.parts.engine.order_stop(drain_s)

    async def stop(self, drain_s: float) -> None:
        """Order the stop and return when all engines have stopped."""
        self.order_stop(drain_s)
        end_s = time.monotonic() + drain_s
        await asyncio.gather(*(each.now().client.stop(drain_s) for each in self.entries if each.is_ready))
        async with self._turn:  # of a load, which has been given up, or has just ended
            rest_s = max(end_s - time.monotonic(), 0.0)
            await asyncio.gather(*(parts.client.stop(rest_s) for parts in self.loaded))
        self.loader.shutdown(wait=False)

    def abandon(self, error: QuireError) -> None:
        """End every open answer on `error`, and ignore the engines from now on."""
        for parts in self.loaded:
            parts.client.abandon(error)


def give_memory_back() -> None:
    """Return what an unloaded model had to the system."""
    gc.collect()
    torch = sys.modules.get("torch")  # a model has imported it, unless its engine is in another process
    if torch is not None and torch.cuda.is_initialized():  # it keeps what was a tower's, or an adapter's
        torch.cuda.empty_cache()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what has been freed
        trim(0)
