"""The door of an engine: what the server and the offline LLM hold of it.

Whatever crosses is a frozen value that could be written as bytes: requests and aborts in, the events of a step out in one
call, commands and their replies. Errors are ErrorValues in events; methods raise them. An engine may be in another
process, which tests/http/engine_process.py shows; in one process nothing is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from engine.core.config import SchedulerConfig
from engine.core.stats import Snapshot, Stats
from engine.core.types import AbortCause, Adapter, Request, StepEvents
from engine.files.vector_files import VectorSettings
from engine.settings.kv_events_config import KVEventsConfig
from engine.settings.peer import Peer
from engine.text.grammars.spec import GrammarSpec, VocabularySource

Deliver = Callable[[StepEvents], None]
Reply = TypeVar("Reply")


class Layout(NamedTuple):
    """What two engines have to agree on to exchange blocks."""

    fingerprint: str  # of the weights, the types and the layout of a block
    block_size: int  # tokens
    block_bytes: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while an engine lives, beside the scheduler's configuration."""

    vocab_size: int
    generates: bool = True  # the model has an LM head
    num_ranks: int = 1  # processes that hold the model
    layout: Layout | None = None  # None: its K/V is not handed over
    max_loras: int = 0
    takes_images: bool = False  # of the kinds that its `submit` checks
    kv_events: KVEventsConfig | None = None
    vectors: VectorSettings = field(default_factory=VectorSettings)  # how the model makes vectors, or scores


class EngineHealth(NamedTuple):
    """Whether the engine lives and moves; a busy one that has not stepped for long hangs."""

    alive: bool
    busy: bool
    seconds_since_step: float  # 0 when idle
    error: str | None


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter, its path and the time of loading."""

    adapter: Adapter
    path: str
    loaded_s: int  # Unix time


class Prefix(NamedTuple):
    """What blocks are of: how their chain of names begins (request_names), and the prompt's tokens."""

    names: list[bytes]
    tokens: Sequence[int]
    root: bytes = b""  # of salt, adapter and owner (chain_root) as the daemon that packs a parcel knows them


class Missing(NamedTuple):
    """What an engine would have to compute of a prompt."""

    num_blocks: int
    seconds: float  # that it would take; infinite while that is not known


class Offer(NamedTuple):
    """A parcel that another daemon may take."""

    name: str
    num_blocks: int
    expires_s: float  # Unix time


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverConfig:
    """Where parcels are put, and what takes them to other machines."""

    folder: Path | None = None
    max_bytes: int = 4 << 30
    expiry_s: float = 120.0
    listen: Peer | None = None
    peers: frozenset[Peer] = frozenset()  # whose parcels may be pulled
    key: str = ""


class Command(Generic[Reply]):
    """What a client asks of an engine; the subclasses are all there is, engine/control.py has what they do."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TakeSnapshot(Command[Snapshot]):
    """Take a snapshot before the next step."""


@dataclass(frozen=True, slots=True)
class LoadAdapter(Command[LoadedAdapter]):
    """Read an adapter; requests may then name it. AdapterConflictError, AdapterLoadError, AdapterNotFoundError."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter(Command[None]):
    """Forget an adapter; running requests keep it. AdapterNotFoundError."""

    name: str


@dataclass(frozen=True, slots=True)
class UseVocabulary(Command[None]):
    """Name the vocabulary of all grammars; needed before the first CompileGrammar."""

    source: VocabularySource
    warms_up: bool  # and prepare for the first grammar, without waiting for it


@dataclass(frozen=True, slots=True)
class CompileGrammar(Command[None]):
    """Compile a grammar; requests may then name it by its digest. InvalidRequestError, OverloadedError."""

    spec: GrammarSpec
    param: str  # the field that a refusal names


@dataclass(frozen=True, slots=True)
class OpenHandover(Command[int | None]):
    """Offer K/V to other daemons, and take theirs; returns the port at which it is offered. ConfigError."""

    config: HandoverConfig


@dataclass(frozen=True, slots=True)
class CountMissing(Command[Missing]):
    """Count the full blocks of a prompt that the cache lacks. ParcelError."""

    prefix: Prefix


@dataclass(frozen=True, slots=True)
class SendPrefix(Command[Offer | None]):
    """Pack the cached blocks of a prompt's beginning, for another daemon; None without a full one. ParcelError."""

    prefix: Prefix


@dataclass(frozen=True, slots=True)
class ReceivePrefix(Command[int]):
    """Have the cache hold the blocks of a parcel; returns how many of the prompt's it has. ParcelError, UnreachableError."""

    name: str
    prefix: Prefix
    peer: Peer | None  # None: through shared memory
    timeout_s: float


class EngineHandle(Protocol):
    """Start it once, submit from any thread, stop it once."""

    config: SchedulerConfig
    facts: EngineFacts  # what else does not change
    clock: Callable[[], float]  # of all times that are not Unix times

    @property
    def stats(self) -> Stats:
        """Return the counters and gauges, to be read only."""

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """Return the adapters that requests may name, in the order of loading."""

    @property
    def is_running(self) -> bool:
        """Return whether the engine was started and has not ended, even if it hangs in a step."""

    def start(self, deliver: Deliver, on_end: Callable[[], None] = ...) -> None:
        """Start the engine, whose thread calls `deliver` with events, at most once a step, and last `on_end`."""

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none; events follow through `deliver`, exactly one terminal event a choice.

        Never waits for a step. Raises ClientError if one can never be served, OverloadedError if too much waits already,
        ShuttingDownError or EngineDeadError if nothing is accepted any more.
        """

    def abort(self, request_id: str, cause: AbortCause, choice: int | None = None) -> None:
        """End a request (or one of its choices) early. Idempotent; unknown ids are ignored."""

    def control(self, command: Command[Reply]) -> Future[Reply]:
        """Carry out a command. The reply may be a QuireError; it is cancelled if the engine ends first."""

    def health(self) -> EngineHealth:
        """Return whether the engine lives and moves, without waiting for it."""

    def order_stop(self, drain_s: float) -> None:
        """Refuse new requests; let open ones finish for `drain_s`, then abort them and end."""

    def stop(self, drain_s: float) -> None:
        """Order the engine to end and wait for it, forever if a step hangs; release one that was never started."""
