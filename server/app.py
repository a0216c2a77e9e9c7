"""The HTTP application: its parts, its endpoints, its start and end.

Everything here runs on the event loop. The daemon (server/daemon.py) may drain the engine before the lifespan ends,
through `app.state.models.stop`; the lifespan's stop is then immediate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fastapi import APIRouter, FastAPI
from starlette.datastructures import State
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.handle import EngineHandle
from engine.system.version import VERSION
from engine.text.chat.history import AnswerHistory
from engine.text.chat.limits import ModelLimits
from engine.text.requests.chat_preprocessor import ChatPreprocessor
from engine.text.tokenizer import TextTokenizer
from server.answers.client import EngineClient
from server.answers.content_guard import ContentGuard, Judge
from server.answers.handoff import Receiver, Sender
from server.answers.model import ServedModel
from server.answers.models import Entry, LoadedModel, ModelParts, Models
from server.answers.respond import Responder
from server.answers.stored_responses import ResponseStore
from server.http.bodies import BodyReader, RequestReader
from server.http.guards import MONITORING_PATHS, PROBE_PATHS, Cors, CrossSiteGuard, KeyGuard
from server.http.middleware import AnswerLog, RequestScope, TurnTaker
from server.http.openapi import openapi_router
from server.operations.page import find_files, page_router
from server.protocol import errors
from server.settings.app_config import AppConfig
from server.telemetry.events import PrefillDelegated, TenantRefused, fan_out
from server.telemetry.live import LiveView
from server.telemetry.metrics import Metrics
from server.telemetry.otlp_endpoint import find_endpoint
from server.telemetry.request_log import RequestLog
from server.tenancy.tenancy import Tenancy, read_tenants

if TYPE_CHECKING:
    from engine.text.images.preprocessor import ImagePreprocessor
    from server.answers.images import ImageReader
    from server.batches.worker import BatchService
    from server.telemetry.otlp import Otlp

log = logging.getLogger("quire.startup")

# Imported before the first request; the others when a path of theirs is asked for, or once the daemon is idle.
_FIRST = ("server.openai.completions", "server.openai.chat", "server.operations.health")
# One line an endpoint: its module's `router` is served, and described by /openapi.json and docs/reference/.
ENDPOINTS = [
    "server.openai.completions",
    "server.openai.chat",
    "server.openai.responses.routes",
    "server.anthropic.messages",
    "server.openai.prompt_only",
    "server.openai.scores",
    "server.openai.moderations",
    "server.openai.batches",
    "server.openai.models",
    "server.operations.adapters",
    "server.operations.tokens",
    "server.operations.requests",
    "server.operations.for_routers",
    "server.operations.health",
]
# Headers that scripts of other origins may read.
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-quire-ignored-fields", "server-timing", "traceparent"),
    *("retry-after", "retry-after-ms", "x-should-retry"),
    *(f"x-ratelimit-{kind}-{what}" for kind in ("limit", "remaining") for what in ("requests", "tokens")),
    "x-ratelimit-reset-tokens",
)


def routers() -> list[APIRouter]:
    """Return the router of each endpoint."""
    return _import(ENDPOINTS)


def _import(names: Iterable[str]) -> list[APIRouter]:
    return [import_module(name).router for name in names]


def create_app(
    engine: EngineHandle, tokenizer: TextTokenizer, config: AppConfig, images: ImagePreprocessor | None = None
) -> FastAPI:
    """Return an application that serves one model, with `images` of requests where it takes some."""
    return make_app([(Entry(config=config), LoadedModel(engine, tokenizer, images))])


def make_app(
    served: Sequence[tuple[Entry, LoadedModel | None]],
    memory_limit: int | None = None,
    loader: ThreadPoolExecutor | None = None,
) -> FastAPI:
    """Return an application that serves models, of which those that are loaded at once take so many bytes at most.

    The first one's settings are those that all share. `Models.finish_start` takes those whose loads have begun. `loader` is
    the thread of loads.

    Its lifespan starts the engines and drains them.
    """
    config = served[0][0].config
    parts = _parts(config)
    models: Models = parts["models"]
    models.make_parts = partial(_model_parts, parts)
    models.memory_limit = memory_limit
    models.loader = loader or models.loader
    for each in served:
        models.add(*each)
    if not models.is_starting:
        models.check_guards()
    tenancy: Tenancy = parts["tenancy"]
    page = find_files() if config.page else {}
    open_paths = {*PROBE_PATHS, *page, *(() if config.protect_metrics else MONITORING_PATHS)}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await _start(app.state, partial(_routed, parts, ENDPOINTS))
        yield
        await _stop(app.state)

    def rest() -> Iterator[APIRouter]:
        from server.operations import live, unserved

        yield from _import(name for name in ENDPOINTS if name not in _FIRST)
        if config.openapi:
            yield openapi_router(
                routers(), needs_key=tenancy.needs_key, open_paths=open_paths, root_path=config.root_path
            )
        yield unserved.router
        if page:
            yield from (live.router, page_router(page))

    app = _routed(parts, _FIRST, lifespan=lifespan, middleware=_middleware(parts, open_paths))
    _add_later(app, rest)
    return app


def _add_later(app: FastAPI, rest: Callable[[], Iterable[APIRouter]]) -> None:
    """Have `app.state.add_rest`, or a request to a path that is not served yet, add further routes."""

    def add_rest() -> None:
        if app.router.default == ask_rest:
            app.router.default = app.router.not_found
            for router in rest():
                app.include_router(router)

    async def ask_rest(scope: Scope, receive: Receive, send: Send) -> None:
        add_rest()
        await app.router(scope, receive, send)

    app.router.default, app.state.add_rest = ask_rest, add_rest


def _parts(config: AppConfig) -> dict[str, Any]:
    """Return what models share, by the names under which `app.state` has it."""
    metrics, models = Metrics(compat_vllm=config.metrics_compat == "vllm"), Models(config)
    metrics.add_rows("models", models)
    request_log = RequestLog(time.monotonic)
    otlp = _open_otlp(config, metrics)
    traced = [] if otlp is None else [otlp.tracing.observe]
    logged = [AnswerLog().observe] if config.enable_log_requests else []
    emit = fan_out(*metrics.listeners, *traced, *logged, request_log.observe)
    tenancy = Tenancy(
        config.api_keys,
        None if config.tenants is None else read_tenants(config.tenants, config.api_keys),
        lambda tenant, limit: emit(TenantRefused(tenant, limit)),
        shares_prefixes=config.share_prefix_cache,
    )
    bodies = BodyReader(config.max_json_values, config.max_body_bytes)
    return {
        "batches": _open_batches(config, models, bodies),
        "bodies": bodies,
        "config": config,
        "emit": emit,
        "instance_id": uuid4().hex,
        "metrics": metrics,
        "models": models,
        "otlp": otlp,
        "reader": RequestReader(bodies, models, config, emit),
        "request_log": request_log,
        "responses": ResponseStore(config.max_stored_responses),
        "tenancy": tenancy,
        "tracing": None if otlp is None else otlp.tracing,
    }


def _model_parts(shared: Mapping[str, Any], config: AppConfig, loaded: LoadedModel) -> ModelParts:
    """Return what answers requests of a model, beside what models share."""
    engine, tokenizer, images = loaded[:3]
    emit, limits = shared["emit"], _limits(engine, tokenizer, config)
    history = _history(engine, tokenizer, config)
    preprocessor = ChatPreprocessor(limits, config.default_chat_template_kwargs or {}, history, images)
    model = ServedModel(engine, preprocessor, config, _reader(images, config))
    live = LiveView(engine)
    client = EngineClient(engine)
    judge = Judge.of(model, client, is_strict=config.guard_strict)
    responder = Responder(
        client=client,
        tokenizer=tokenizer,
        live=live,
        emit=emit,
        config=config,
        call_id_length=limits.call_id_length,
        has_tenants=shared["tenancy"].has_file,
        sender=Sender(engine, config) if config.role == "prefill" else None,
        receiver=Receiver(engine, config, lambda outcome: emit(PrefillDelegated(outcome.value)))
        if config.role == "decode"
        else None,
        guard=_guard(config, shared["models"], judge),
    )
    parts = ModelParts(
        config=config,
        engine=engine,
        client=client,
        model=model,
        responder=responder,
        live=live,
        forget=partial(shared["metrics"].remove_model, config.served_model_names[0]),
        judge=judge,
    )
    if tokenizer.chat_template:
        log.info("%s, %s", parts.name, limits.chat_format.describe())
    shared["metrics"].add_model(parts.name, engine, None if history is None else history.counts)
    return parts


def _guard(config: AppConfig, models: Models, judge: Judge | None) -> ContentGuard | None:
    """Return what judges a model's prompts and answers; None for the guard itself, which is the judge."""
    name = config.guard
    if name is None or (judge is not None and name in config.served_model_names):
        return None
    return ContentGuard(name, config.guard_every, partial(models.borrow_judge, name))


def _reader(images: ImagePreprocessor | None, config: AppConfig) -> ImageReader | None:
    """Return what reads images of requests; None, and nothing imported, for a model of text alone."""
    if images is None:
        return None
    from server.answers.images import ImageReader

    return ImageReader(images, config)


def _limits(engine: EngineHandle, tokenizer: TextTokenizer, config: AppConfig) -> ModelLimits:
    return ModelLimits.of(
        engine.config,
        engine.facts.vocab_size,
        tokenizer,
        max_logprobs=config.max_logprobs,
        generates=engine.facts.generates,
        vectors=engine.facts.vectors,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )


def _history(engine: EngineHandle, tokenizer: TextTokenizer, config: AppConfig) -> AnswerHistory | None:
    """Return what remembers answers; None where it is off, or of no use: another daemon has no part in it."""
    if not (config.history_cache and engine.config.enable_prefix_caching and config.role == "both"):
        return None
    return AnswerHistory(tokenizer, config.history_cache, engine.config.block_size)


def _open_batches(config: AppConfig, models: Models, bodies: BodyReader) -> BatchService | None:
    """Return what serves batches; None, and nothing imported, without a folder for them."""
    if config.data_dir is None:
        return None
    from server.batches.worker import BatchService

    return BatchService(config, models, bodies)


def _open_otlp(config: AppConfig, metrics: Metrics) -> Otlp | None:
    """Return what exports over OTLP; None, without importing OpenTelemetry, if no address is given."""
    endpoint = find_endpoint(config)
    if endpoint is None:
        return None
    from server.telemetry.otlp import Otlp

    otlp = Otlp(endpoint)
    metrics.add_rows("spans", otlp.counts)
    return otlp


async def _start(parts: State, make_batch_app: Callable[[], FastAPI]) -> None:
    """Start the engines and what runs beside them; lines of batches go to an application without guards."""
    parts.metrics.loop_lag.start()
    parts.models.start()
    if parts.batches is not None and not parts.models.is_draining:
        from server.batches.dispatch import Dispatcher

        app = make_batch_app()
        background, foreground = (Dispatcher(app, parts.emit, is_background=each) for each in (True, False))
        parts.batches.worker.start(background, foreground, parts.tenancy)


async def _stop(parts: State) -> None:
    if parts.batches is not None:
        await parts.batches.worker.stop()
    await parts.models.stop(parts.config.shutdown_timeout_s)
    for model in parts.models.loaded:
        model.close()
    if parts.batches is not None:
        parts.batches.close()
    parts.bodies.close()
    if parts.otlp is not None:
        await parts.otlp.close()
    parts.metrics.loop_lag.stop()


def _routed(parts: Mapping[str, Any], endpoints: Iterable[str], **options: Any) -> FastAPI:
    """Return an application with endpoints and nothing around them.

    The lines of batches are sent to such applications.
    """
    app = FastAPI(
        title="Quire",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        **options,
    )
    for name, part in parts.items():
        setattr(app.state, name, part)
    errors.install(app, _paths)
    for router in _import(endpoints):
        app.include_router(router)
    return app


def _paths() -> list[str]:
    """Return the paths of all endpoints."""
    return [route.path for router in routers() for route in router.routes if isinstance(route, Route)]


def _middleware(parts: Mapping[str, Any], open_paths: Collection[str]) -> list[Middleware]:
    """Return the middlewares, outermost first.

    They log, refuse foreign web pages, allow origins, check the key, and wait for a turn of the event loop.
    """
    config, tenancy = parts["config"], parts["tenancy"]
    stack = [Middleware(RequestScope, emit=parts["emit"], tracing=parts["tracing"], root_path=config.root_path)]
    allowed_hosts = None if tenancy.needs_key else config.allowed_hosts
    stack.append(Middleware(CrossSiteGuard, allowed_hosts=allowed_hosts, allowed_origins=config.allowed_origins))
    if config.allowed_origins:
        stack.append(
            Middleware(
                Cors,
                allow_origins=config.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                allow_private_network=True,  # a page of a public site asks for this before it calls this machine
                expose_headers=EXPOSED_HEADERS,
            )
        )
    if tenancy.needs_key:
        stack.append(Middleware(KeyGuard, tenancy=tenancy, open_paths=open_paths))
    stack.append(Middleware(TurnTaker, turns=parts["bodies"].turns, open_paths=PROBE_PATHS))
    return stack
