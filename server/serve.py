"""Runs `quire serve`, from the settings to the end of the process.

Settings and the files they name are checked first (plan.py), then the port is bound. Torch is imported and weights are read
on a thread (load.py), while the main thread makes the application, which answers 503 until they are there.
Every fault before models are loaded is one sentence and an exit status: 2 for a wrong setting, 1 for anything else; the
traceback is shown at --log-level debug. Torch stays behind build_engine.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import json
import logging
import resource
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

from engine.arbiter import Arbiter
from engine.core.errors import ConfigError, QuireError
from engine.files.gguf_header import forget_headers
from engine.sources.model_source import check_embedded, local_path
from engine.startup.ahead import WeightMemory, begin_weights
from engine.system.cache_folder import foreseen
from server.answers.model_memory import Memory, memory_limit
from server.load import load_model
from server.plan import Plan, prepare_all
from server.settings.flags import load_settings, name_origins
from server.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from fastapi import FastAPI

    from engine.handle import EngineFacts
    from server.answers.models import LoadedModel

log = logging.getLogger("quire.serve")

BACKLOG = 2048  # connections the kernel holds while the event loop is busy


class _PortError(QuireError):
    """The address cannot be listened on."""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal; returns the exit status."""
    try:
        settings = load_settings(argv)
    except ConfigError as error:
        sys.stderr.write(f"quire: {error}\n")
        return 2
    configure_logging(settings.log_level, settings.log_format, settings.uvicorn_log_level)
    if settings.tenants is not None or settings.ssl_certfile is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # it waits for the daemon, which reads them again
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client takes one, and shells allow 1024
    faulthandler.register(signal.SIGUSR1, file=2)  # writes every thread's stack, even if the event loop hangs
    gc.disable()  # objects made at start-up stay: collecting among them took 0.3 s; hide_from_collector enables it
    if settings.remarks:
        log.info("no effect here: %s", "; ".join(settings.remarks))
    try:
        plans = prepare_all(settings)
        with bind(settings.host, settings.port) as listener:
            return _serve(plans, listener)
    except QuireError as error:
        log.error(name_origins(str(error), settings))  # noqa: TRY400 - one sentence for the user
        log.debug("it happened here:", exc_info=True)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        log.warning("Stopped while starting.")
        return 130
    except Exception:  # a bug: one line, and the traceback at debug
        log.exception("Quire failed; run it with --log-level debug to see where")
        return 1
    finally:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)  # Python's end, which takes tenths of a second, keeps the status


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address; the kernel holds connections until the event loop runs."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"--host is {host!r}, which is no address of this machine: {reason}.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _explain(error, host, port) from error
    return listener


def _explain(error: OSError, host: str, port: int) -> QuireError:
    if error.errno == errno.EADDRINUSE:
        return _PortError(f"Port {port} on {host} is in use; stop what listens there, or choose another with --port.")
    if error.errno == errno.EACCES:
        return _PortError(f"Port {port} needs privileges to be bound; choose one from 1024 up with --port.")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"--host is {host!r}, which is no address of this machine; 127.0.0.1 and 0.0.0.0 always are."
        )
    return _PortError(f"{host}:{port} cannot be listened on: {error.strerror}.")


def _serve(plans: Sequence[Plan], listener: socket.socket) -> int:
    plan = plans[0]  # of which all have what models share
    app_config = plan.app
    host, port = listener.getsockname()[:2]
    url = f"{'http' if plan.tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    log.info("listening on %s", url)

    def announce() -> None:
        names = ", ".join(each.app.served_model_names[0] for each in plans)
        forget_headers()
        hide_from_collector()
        log.info("ready in %.1f s: %s serves %s", time.monotonic() - plan.started_s, url, names)
        lines = foreseen()
        for each in plans:
            if each.engine.quantization == "auto" and (line := lines.get(each.serve.model or "")):
                log.info("%s", f"{each.name}, {line}" if len(plans) > 1 else line)
        has_key = bool(app_config.api_keys or app_config.tenants)
        if first := app.state.models.loaded[:1]:
            log.info("try: %s", _curl(_reachable(url), first[0].name, first[0].engine.facts, has_key=has_key))

    arbiter = Arbiter() if len(plans) > 1 else None
    memory = _begin(plans)
    with _loading(plans, arbiter, memory) as (loader, loads):
        from server.daemon import run

        app = _make_app(plans, arbiter, loader, loads)
        return run(app, listener, app_config.shutdown_timeout_s, announce, plan.tls)


def _begin(plans: Sequence[Plan]) -> WeightMemory | None:
    """Import FastAPI and torch, while memory for the weights of the first model gets its pages, which is returned.

    The HTTP side comes after torch, although it would answer sooner: then weights are packed beside its imports.
    Raises ModelLoadError if the embedded model is corrupt.
    """
    first = next(plan for plan in plans if plan.at_start)
    is_here = first.model.is_native and local_path(first.engine.model) is not None
    memory = begin_weights(first.engine) if is_here else None
    import_http()
    with ThreadPoolExecutor(1) as aside:  # only now: torch's libraries have taken another core so far
        checks = [aside.submit(check_embedded, plan.engine.model) for plan in plans if plan.serve.model is None]
        import engine.startup.build  # noqa: F401 - imported for its duration

        for check in checks:
            check.result()
    return memory


@contextmanager
def _loading(
    plans: Sequence[Plan], arbiter: Arbiter | None, memory: WeightMemory | None
) -> Iterator[tuple[ThreadPoolExecutor, list[Future[LoadedModel] | None]]]:
    """Load the models of the start on a thread, one after the other; stop them if the block raises."""
    is_over = Event()
    loader = ThreadPoolExecutor(1, "quire-loader")
    given = iter([memory])
    loads = [
        loader.submit(load_model, plan, arbiter, lambda: not is_over.is_set(), None, next(given, None))
        if plan.at_start
        else None
        for plan in plans
    ]
    try:
        yield loader, loads
    except BaseException:  # any: nothing of the models may stay
        is_over.set()
        loader.shutdown(cancel_futures=True)
        for load in loads:
            if load is not None and not load.cancelled() and load.exception() is None:
                load.result().engine.stop(0.0)
        raise


def _make_app(
    plans: Sequence[Plan],
    arbiter: Arbiter | None,
    loader: ThreadPoolExecutor,
    loads: Sequence[Future[LoadedModel] | None],
) -> FastAPI:
    """Return the application; it waits for the models of which a load has begun."""
    from server.answers.models import Entry
    from server.app import make_app

    limit = memory_limit(plans[0].app.models_memory, [plan.engine for plan in plans])
    served = []
    for plan, load in zip(plans, loads, strict=True):
        entry = Entry(
            config=plan.app,
            load=partial(load_model, plan, arbiter),
            adapters=[module.name for module in plan.engine.lora_modules],
            is_kept=plan.is_kept,
            memory=plan.memory if arbiter else Memory(),
            takes_images=plan.model.takes_images,
            begun=load,
        )
        served.append((entry, None))
    return make_app(served, limit, loader)


def import_http() -> None:
    """Import FastAPI while torch's libraries are loaded. Its models of OpenAPI documents are built on first use.

    pydantic's default for all models is changed meanwhile, so nothing is done once FastAPI is imported. Its check for models
    of pydantic's first version, which would take 0.1 s to import, finds none.
    """
    if "fastapi" in sys.modules:
        return
    from pydantic import BaseModel, ConfigDict

    sys.modules.setdefault("pydantic.v1", None)  # type: ignore[arg-type]
    usual = BaseModel.model_config
    BaseModel.model_config = ConfigDict(defer_build=True)
    try:
        import fastapi  # noqa: F401 - imported for its duration
    finally:
        BaseModel.model_config = usual


def hide_from_collector() -> None:
    """Enable the garbage collector for new objects only.

    The 200,000 objects of libraries made at start-up live as long as the process. A full collection over them stops every
    stream for 0.12 s, and 800 short requests cause two of them; without these objects one takes 4 ms. The few cycles that
    start-up left behind stay as well: looking for them would delay the start by 0.2 s.
    """
    gc.freeze()
    gc.enable()


def _reachable(url: str) -> str:
    """Return the URL for clients of this machine: an address that stands for all of them is none to connect to."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _curl(url: str, name: str, facts: EngineFacts, *, has_key: bool) -> str:
    """Return a command to paste into a shell."""
    body: dict[str, Any] = {"model": name, "input": "Tokyo is the capital of Japan."}
    path = "classify" if facts.vectors.labels else "embeddings"
    if facts.generates:
        path, question = "chat/completions", {"role": "user", "content": "What is the capital of Japan?"}
        body = {"model": name, "messages": [question], "temperature": 0, "max_tokens": 64}
    key = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if has_key else ""
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
