"""What every route works with, and how a request's body is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from engine.core.adapter import Adapter
from engine.loop import Engine
from server.app_config import AppConfig
from server.batches.service import BatchService
from server.client import EngineClient
from server.errors import ApiError, shorten
from server.handoff import Receiver, Sender
from server.ledger import Ledger
from server.live import LiveView
from server.metrics import Metrics
from server.middleware import IGNORED_FIELDS
from server.protocol.base import RequestBody
from server.protocol.limits import Limits
from server.response_store import ResponseStore
from server.standing import Standing
from server.structured.compiler import GrammarCompiler
from server.tenancy import Tenancy
from server.text import Tokenizer

logger = logging.getLogger(__name__)

MAX_INLINE_CHARS = 2048  # about 1 ms; more is encoded on a worker thread, so that other requests are not held up
MAX_TOLD_FIELDS = 20

Body = TypeVar("Body", bound=RequestBody)


@dataclass(frozen=True, slots=True)
class Context:
    """The application's parts. Made once by create_app, read by routes on the event loop."""

    engine: Engine
    client: EngineClient
    tokenizer: Tokenizer
    config: AppConfig
    limits: Limits
    metrics: Metrics
    tenancy: Tenancy
    live: LiveView
    grammars: GrammarCompiler
    standing: Standing
    ledger: Ledger
    responses: ResponseStore
    started_s: int  # Unix time
    batches: BatchService | None = None  # without --data-dir there are none
    sender: Sender | None = None  # of a prefill daemon
    receiver: Receiver | None = None  # of a decode daemon
    adapter_turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # adapters are read one at a time
    is_background: bool = False  # what is asked here runs when nobody else needs the engine

    def batch_service(self) -> BatchService:
        """Files and batches. Raises a 501 where there are none."""
        if self.batches is None:
            message = "Files and batches are off, for they are kept on disk; start the server with --data-dir FOLDER."
            raise ApiError(501, "not_enabled", message, type="not_implemented_error")
        return self.batches

    def check_model(self, name: str | None) -> str:
        """The name to report. Raises a 404 for a model that is not served here."""
        self.adapter(name)
        return self.config.served_model_names[0] if name is None else name

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter of that name, None where it is the model's own. Raises a 404 for a name that nothing has."""
        names = self.config.served_model_names
        if name is None or name in names:
            return None
        loaded = self.engine.adapters.find(name)
        if loaded is not None:
            return loaded.adapter
        if any(fnmatchcase(name, pattern) for pattern in self.config.model_aliases):
            return None
        names += self.config.model_aliases + tuple(other.adapter.name for other in self.engine.adapters.all())
        message = f"The model {shorten(name)!r} is not served here; use {' or '.join(names)}."
        raise ApiError(404, "model_not_found", message, "model")

    async def encode(self, texts: Sequence[str], param: str, *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text, without holding up the event loop. Raises ContextLengthError for a hopeless one."""
        for text in texts:
            self.limits.check_length(text, param)

        def encode_all() -> list[list[int]]:
            return [self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        if sum(map(len, texts)) <= MAX_INLINE_CHARS:
            return encode_all()
        return await asyncio.to_thread(encode_all)


async def _context(request: Request) -> Context:  # not plain: FastAPI runs plain ones on a thread of their own
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


InContext = Annotated[Context, Depends(_context)]


def json_body(model: type[Body]) -> Callable[[Request, Context], Awaitable[Body]]:
    """A dependency that reads, checks and returns a JSON body; unknown fields and dropped hints are named in a header, or refused."""

    async def read(request: Request, context: InContext) -> Body:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            shown = shorten(media_type) or "absent"
            message = f"The Content-Type is {shown}; send application/json."
            raise ApiError(400, "unsupported_media_type", message)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            message = f"The Content-Encoding is {shorten(encoding)}; send the body as it is."
            raise ApiError(400, "unsupported_media_type", message)
        body = model.model_validate_json(await request.body())
        names = [*body.ignored_fields(), *body.dropped_hints(context.limits)]
        if names and context.config.strict_fields:
            message = f"Fields without effect: {', '.join(names[:MAX_TOLD_FIELDS])}; remove them (--strict-fields)."
            raise ApiError(400, "unknown_parameter", message, names[0])
        if names:
            _tell_ignored(request, context, names)
        return body

    return read


def _tell_ignored(request: Request, context: Context, names: list[str]) -> None:
    setattr(request.state, IGNORED_FIELDS, names[:MAX_TOLD_FIELDS])
    logger.warning("ignored fields: %s", ", ".join(names[:MAX_TOLD_FIELDS]))
    for name in names[:MAX_TOLD_FIELDS]:
        context.metrics.ignored_field(name)
