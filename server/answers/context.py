"""The application's parts, and how routes read a request's body."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, TypeVar
from uuid import uuid4

from fastapi import Depends, Request

from engine.core.errors import shorten
from engine.core.types import Adapter
from engine.handle import EngineHandle
from engine.system.similar import closest
from engine.text.chat.limits import ModelLimits
from engine.text.fields.body import RequestBody
from engine.text.fields.chat import Conversation
from engine.text.requests.chat_preprocessor import ChatPreprocessor
from engine.text.tokenizer import TextTokenizer
from server.answers.body import KVTransferParams
from server.answers.client import EngineClient
from server.answers.grammars import Grammars
from server.answers.handoff import Receiver, Sender
from server.answers.stored_responses import ResponseStore
from server.batches.service import BatchService
from server.http.bodies import BodyReader, is_large, limited
from server.http.request_state import RequestState, state_of
from server.http.threads import run_slowly
from server.protocol.errors import STATE, ApiError
from server.settings.app_config import AppConfig
from server.telemetry.events import FieldIgnored, Telemetry
from server.telemetry.live import LiveView
from server.telemetry.metrics import Metrics
from server.telemetry.recent_requests import RecentRequests
from server.telemetry.request_log import RequestLog
from server.tenancy.public_prefixes import PublicPrefixes
from server.tenancy.tenancy import Tenancy
from server.tenancy.tenant_file import DEFAULT

if TYPE_CHECKING:
    from server.telemetry.otlp import Otlp
    from server.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

MAX_INLINE_CHARS = 2048  # about 1 ms; more is encoded on a worker thread
MAX_NAMED_FIELDS = 20
_MAX_EXPLAINED = 3  # unknown fields for which a declared one is suggested

Body = TypeVar("Body", bound=RequestBody)
Result = TypeVar("Result")

_RENDERING = ThreadPoolExecutor(1, "quire-rendering")  # waits for the process that renders chat templates
_IS_LARGE: ContextVar[bool] = ContextVar("is_large", default=False)  # the body of this request


@dataclass(frozen=True, slots=True)
class Context:
    """The application's parts, made once by create_app. Event loop."""

    engine: EngineHandle
    client: EngineClient
    tokenizer: TextTokenizer
    config: AppConfig
    preprocessor: ChatPreprocessor
    metrics: Metrics
    telemetry: Telemetry
    tenancy: Tenancy
    live: LiveView
    grammars: Grammars
    request_log: RequestLog
    recent: RecentRequests
    responses: ResponseStore
    bodies: BodyReader
    started_s: int  # Unix time
    batches: BatchService | None = None  # None without --data-dir
    otlp: Otlp | None = None  # sends traces and metrics to a collector
    tracing: Tracing | None = None
    sender: Sender | None = None  # of a prefill daemon
    receiver: Receiver | None = None  # of a decode daemon
    public_prefixes: PublicPrefixes = field(default_factory=PublicPrefixes)
    adapter_turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # adapters are read one at a time
    instance_id: str = field(default_factory=lambda: uuid4().hex)  # of this process, for routers
    is_background: bool = False  # its requests run while the engine is otherwise idle

    @property
    def limits(self) -> ModelLimits:
        """The limits of the served model."""
        return self.preprocessor.limits

    def check_model(self, name: str | None) -> str:
        """Return the name to report. Raises a 404 for an unknown model."""
        self.adapter(name)
        return self.config.served_model_names[0] if name is None else name

    def adapter(self, name: str | None) -> Adapter | None:
        """Return a name's adapter, None for the model itself; 404 for an unknown name."""
        names = self.config.served_model_names
        if name is None or name in names:
            return None
        loaded = self.engine.adapters.get(name)
        if loaded is not None:
            return loaded.adapter
        if any(fnmatchcase(name, pattern) for pattern in self.config.model_aliases):
            return None
        names += self.config.model_aliases + tuple(self.engine.adapters)
        message = f"The model {shorten(name)!r} is not served here; use {' or '.join(names)}."
        raise ApiError(404, "model_not_found", message, "model")

    def dropped_transfer(self, body: RequestBody) -> list[str]:
        """Return the field that a daemon of another role would follow, if the body has it."""
        transfer = getattr(body, "kv_transfer_params", None)
        if not isinstance(transfer, KVTransferParams):
            return []
        is_dropped = (transfer.do_remote_decode and self.sender is None) or (
            transfer.do_remote_prefill and self.receiver is None
        )
        return ["kv_transfer_params"] if is_dropped else []

    def enter(self, state: RequestState) -> None:
        """Count a request on its account until it ends, once. Raises OverloadedError at a limit."""
        state.enter(self.engine.stats.e2e_s.mean)

    async def render(self, body: Conversation) -> str:
        """Return a conversation's prompt; threads prepare a long one, and wait for the process that renders it.

        Raises InvalidRequestError.
        """
        is_long = body.is_long or _IS_LARGE.get()
        begun = await run_slowly(lambda: self.preprocessor.begin(body)) if is_long else self.preprocessor.begin(body)
        return begun if isinstance(begun, str) else await asyncio.get_running_loop().run_in_executor(_RENDERING, begun)

    async def encode(self, texts: Sequence[str], param: str, *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text. Raises ContextLengthError."""
        for text in texts:
            self.limits.check_length(len(text), param)

        def encode_all() -> list[list[int]]:
            return [self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        return await aside(encode_all, sum(map(len, texts)))


async def _context(request: Request) -> Context:  # async, as FastAPI runs plain functions on a thread
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


InContext = Annotated[Context, Depends(_context)]


async def _owner(request: Request) -> str:
    return state_of(request.scope).owner


InOwner = Annotated[str, Depends(_owner)]  # the owner of stored things, see server/tenancy/tenancy.py


def check_operator(owner: str, what: str) -> None:
    """Raise a 403 for a tenant of --tenants; `what` is for keys of --api-key."""
    if owner != DEFAULT:
        message = f"{what} takes a key of --api-key; a tenant's key does not allow it."
        raise ApiError(403, "not_allowed", message, type="permission_error")


def json_body(model: type[Body], *, spends: bool = False) -> Callable[[Request, Context], Awaitable[Body]]:
    """Return a dependency that reads and checks a JSON body.

    With `spends` the request runs the engine, and its account's limits are checked before the body is read. Unknown fields
    and dropped hints are named in a header, or refused with --strict-fields.
    """

    async def read(request: Request, context: InContext) -> Body:
        if spends:
            state: RequestState = request.scope[STATE]
            if state.account is not None:
                context.enter(state)
        most = context.config.max_body_bytes
        too_large = f"The request body is larger than {most} bytes; send less (--max-body-bytes)."
        pieces = limited(request, most, too_large)
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            shown = shorten(media_type) or "absent"
            message = f"The Content-Type is {shown}; send application/json."
            raise ApiError(400, "unsupported_media_type", message)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            message = f"The Content-Encoding is {shorten(encoding)}; send the body as it is."
            raise ApiError(400, "unsupported_media_type", message)
        body = await _read(pieces, context, model)
        names = await aside(lambda: [*body.ignored_fields(), *body.dropped_hints(context.limits)])
        names += context.dropped_transfer(body)
        if names and context.config.strict_fields:
            message = f"Fields without effect: {', '.join(names[:MAX_NAMED_FIELDS])}; remove them (--strict-fields)."
            raise ApiError(400, "unknown_parameter", message + _meant(model, names), names[0])
        if names:
            _report_ignored(request, context, names, _meant(model, names))
        return body

    return read


async def _read(pieces: AsyncIterator[bytes], context: Context, model: type[Body]) -> Body:
    """Return the body; a large one is read in a child process."""
    bodies = context.bodies
    async with bodies.receive(pieces) as raw:
        await bodies.turns.take()
        _IS_LARGE.set(is_large(raw))
        return await bodies.read(model, raw) if _IS_LARGE.get() else bodies.read_small(model, raw)


async def aside(function: Callable[[], Result], num_chars: int = 0) -> Result:
    """Run work on the body, or on so many characters; on another thread if that takes long."""
    if _IS_LARGE.get():
        return await run_slowly(function)
    return function() if num_chars <= MAX_INLINE_CHARS else await asyncio.to_thread(function)


def _meant(model: type[Body], names: list[str]) -> str:
    """Return a hint at the declared fields that unknown ones were meant to be, or ""."""
    hints = [f"{meant} for {name}" for name in names[:_MAX_EXPLAINED] if (meant := _close_field(model, name))]
    return f" Did you mean {', '.join(hints)}?" if hints else ""


@lru_cache(maxsize=256)  # clients send the same unknown fields with every request
def _close_field(model: type[RequestBody], name: str) -> str:
    fields = [each for each in model.model_fields if each != name]
    return closest(name, fields)


def _report_ignored(request: Request, context: Context, names: list[str], hint: str) -> None:
    state_of(request.scope).ignored_fields = names[:MAX_NAMED_FIELDS]
    logger.warning("ignored fields: %s.%s", ", ".join(names[:MAX_NAMED_FIELDS]), hint)
    for name in names[:MAX_NAMED_FIELDS]:
        context.telemetry.emit(FieldIgnored(name))
