"""The HTTP application: parts wired together, routes mounted, the engine started and stopped with it.

Everything here runs on the event loop. Whoever runs the application (server/serve.py) may drain it earlier through
`app.state.context.client.stop`; the lifespan's own stop then finds nothing left to do.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from engine.loop import Engine
from server import errors
from server.app_config import AppConfig
from server.auth import KeyGuard
from server.client import EngineClient
from server.ledger import Ledger
from server.live import LiveView
from server.metrics import Metrics
from server.middleware import BodyLimit, RequestScope
from server.protocol.limits import Limits
from server.routes import chat, completions, live, models, operations, requests, tokens
from server.routes.context import Context
from server.routes.page import load_files, page_router
from server.standing import Standing
from server.structured.compiler import GrammarCompiler
from server.text import Tokenizer
from server.version import VERSION


def create_app(engine: Engine, tokenizer: Tokenizer, config: AppConfig) -> FastAPI:
    """An application that serves one engine; its lifespan starts the engine's thread and drains it."""
    live_view = LiveView(engine)
    metrics = Metrics(engine, config.served_model_names[0], config.metrics_compat == "vllm")
    context = Context(
        engine=engine,
        client=EngineClient(engine),
        tokenizer=tokenizer,
        config=config,
        limits=Limits.of(engine.config, engine.vocab_size, tokenizer, config),
        metrics=metrics,
        live=live_view,
        standing=Standing(live_view),
        ledger=Ledger(),
        started_s=int(time.time()),
        grammars=GrammarCompiler(tokenizer, engine.vocab_size, metrics.grammar_compiled),
    )

    page = load_files() if config.page else {}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        context.client.start()
        yield
        await context.client.stop(config.shutdown_timeout_s)
        context.grammars.close()

    app = FastAPI(
        title="Quire",
        version=VERSION,
        lifespan=lifespan,
        middleware=_middleware(context, open_paths=page.keys()),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    errors.install(app)
    for module in (completions, chat, models, tokens, requests, operations):
        app.include_router(module.router)
    if page:
        app.include_router(live.router)
        app.include_router(page_router(page))
    return app


def _middleware(context: Context, open_paths: Collection[str]) -> list[Middleware]:
    """From the outside in. What a client without a key may cost ends at the guard."""
    config = context.config
    stack = [Middleware(RequestScope, metrics=context.metrics)]
    if config.allowed_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "x-quire-ignored-fields", "retry-after", "server-timing"],
            )
        )
    if config.api_keys:
        stack.append(Middleware(KeyGuard, keys=config.api_keys, open_paths=open_paths))
    stack.append(Middleware(BodyLimit, max_bytes=config.max_body_bytes))
    return stack
