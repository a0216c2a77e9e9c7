"""The HTTP application: parts wired together, routes mounted, the engine started and stopped with it.

Everything here runs on the event loop. Whoever runs the application (server/serve.py) may drain it earlier through
`app.state.context.client.stop`; the lifespan's own stop then finds nothing left to do.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import FastAPI
from starlette.middleware import Middleware

from engine.handover import open_handover
from engine.loop import Engine
from engine.text.chat_preprocessor import ChatPreprocessor
from engine.text.grammars.compiler import GrammarCompiler
from engine.text.limits import ModelLimits
from engine.text.types import Tokenizer
from engine.version import VERSION
from server import errors
from server.anthropic import messages
from server.auth import MONITORING_PATHS, PROBE_PATHS, KeyGuard
from server.batches import routes as batches
from server.batches.dispatch import Dispatcher
from server.batches.service import BatchService
from server.client import EngineClient
from server.context import Context
from server.http.bodies import BodyReader
from server.http.cross_site import Cors, CrossSiteGuard
from server.middleware import RequestScope
from server.openai import chat, completions, embeddings, models, score
from server.openai.responses import routes as responses
from server.openai.responses.store import ResponseStore
from server.operations import adapters, health, live, prefill, requests, tokens, unserved
from server.operations.handoff import Receiver, Sender
from server.operations.openapi import openapi_router
from server.operations.page import load_files, page_router
from server.operations.pinned_prefixes import compute_prefixes, read_prefixes
from server.settings.app_config import AppConfig
from server.telemetry.ledger import Ledger
from server.telemetry.live import LiveView
from server.telemetry.metrics import Metrics
from server.telemetry.queue_status import QueueStatus
from server.tenancy.tenancy import Tenancy
from server.tenancy.tenant_file import Tenant, read_tenants

# What /openapi.json and docs/reference.md tell of.
API = (
    completions,
    chat,
    responses,
    messages,
    embeddings,
    score,
    batches,
    models,
    adapters,
    tokens,
    requests,
    prefill,
    health,
)
# What scripts of other origins may read.
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-quire-ignored-fields", "retry-after", "server-timing"),
    *(f"x-ratelimit-{kind}-{what}" for kind in ("limit", "remaining") for what in ("requests", "tokens")),
    "x-ratelimit-reset-tokens",
)
# What lines of a batch may ask for, and who answers it.
BATCH_ENDPOINTS = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/embeddings": embeddings,
}


def create_app(engine: Engine, tokenizer: Tokenizer, config: AppConfig) -> FastAPI:
    """An application that serves one engine; its lifespan starts the engine's thread and drains it."""
    live_view = LiveView(engine)
    handover = None
    if config.role != "both":
        handover = open_handover(engine, config.kv_connector_dir, int(config.kv_connector_gib * (1 << 30)))
    metrics = Metrics(engine, config.served_model_names[0], config.metrics_compat == "vllm")
    bodies = BodyReader(config.max_json_values, config.max_body_bytes)
    limits = ModelLimits.of(
        engine.config,
        engine.vocab_size,
        tokenizer,
        max_logprobs=config.max_logprobs,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    context = Context(
        engine=engine,
        client=EngineClient(engine),
        tokenizer=tokenizer,
        config=config,
        limits=limits,
        preprocessor=ChatPreprocessor(limits),
        metrics=metrics,
        tenancy=Tenancy(config.api_keys, _tenants(config), metrics.tenants, shares_prefixes=config.share_prefix_cache),
        live=live_view,
        queue_status=QueueStatus(live_view),
        ledger=Ledger(),
        responses=ResponseStore(config.max_stored_responses),
        started_s=int(time.time()),
        grammars=GrammarCompiler(tokenizer, engine.vocab_size, metrics.grammar_compiled),
        bodies=bodies,
        batches=_batches(engine, config, bodies),
        sender=Sender(engine, handover) if handover and config.role == "prefill" else None,
        receiver=Receiver(engine, handover, config, metrics.handoff) if handover and config.role == "decode" else None,
    )

    page = load_files() if config.page else {}
    open_paths = {*PROBE_PATHS, *page, *(() if config.protect_metrics else MONITORING_PATHS)}
    service = context.batches
    prefixes = [] if config.pinned_prefixes is None else read_prefixes(config.pinned_prefixes, context)
    context.public_prefixes.add(prefixes, engine.config.block_size)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        context.client.start()
        metrics.loop_lag.start()
        if prefixes:
            await compute_prefixes(prefixes, context)
        if service is not None and not context.client.is_draining:
            service.start(
                Dispatcher(_line_app(replace(context, is_background=True))),
                Dispatcher(_line_app(context)),
                BATCH_ENDPOINTS,
                engine.stats,
                lambda: engine.health().error is not None,
                context.tenancy,
            )
        yield
        if service is not None:
            await service.stop()
        await context.client.stop(config.shutdown_timeout_s)
        if context.receiver is not None:
            await context.receiver.close()
        if service is not None:
            service.close()
        context.grammars.close()
        context.bodies.close()
        metrics.loop_lag.stop()

    app = FastAPI(
        title="Quire",
        version=VERSION,
        lifespan=lifespan,
        middleware=_middleware(context, open_paths),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    errors.install(app)
    routers = [module.router for module in API]
    described = openapi_router(routers, needs_key=context.tenancy.needs_key, open_paths=open_paths)
    for router in (*routers, described, unserved.router):
        app.include_router(router)
    if page:
        app.include_router(live.router)
        app.include_router(page_router(page))
    return app


def _tenants(config: AppConfig) -> tuple[Tenant, ...] | None:
    return None if config.tenants is None else read_tenants(config.tenants, config.api_keys)


def _batches(engine: Engine, config: AppConfig, bodies: BodyReader) -> BatchService | None:
    """Of lines as many run as the engine has slots, so that they can fill it while nothing else does."""
    if config.data_dir is None:
        return None
    max_running = engine.config.max_num_seqs
    return BatchService(config.data_dir, bodies, max_running=max_running, max_line_bytes=config.max_body_bytes)


def _line_app(context: Context) -> FastAPI:
    """What lines of batches are sent to: their endpoints and nothing else."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.context = context
    errors.install(app)
    for module in BATCH_ENDPOINTS.values():
        app.include_router(module.router)
    return app


def _middleware(context: Context, open_paths: Collection[str]) -> list[Middleware]:
    """Return the middlewares, outermost first: log, refuse foreign web pages, allow origins, check the key."""
    config = context.config
    stack = [Middleware(RequestScope, metrics=context.metrics)]
    allowed_hosts = None if context.tenancy.needs_key else config.allowed_hosts
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
    if context.tenancy.needs_key:
        stack.append(Middleware(KeyGuard, tenancy=context.tenancy, open_paths=open_paths))
    return stack
