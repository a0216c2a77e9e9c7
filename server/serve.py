"""Runs `quire serve`, from the settings to the end of the process.

Settings and the files they name are checked first, then the port is bound. Torch is imported and weights are read on a
thread, while the main thread makes the application, which answers 503 until they are there.
Every fault before models are loaded is one sentence and an exit status: 2 for a wrong setting, 1 for anything else; the
traceback is shown at --log-level debug. Torch stays behind build_engine.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import json
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.arbiter import Arbiter
from engine.core.errors import ConfigError, NotWantedError, QuireError
from engine.core.types import Progress
from engine.files.gguf_header import forget_headers
from engine.settings.engine_config import EngineConfig
from engine.settings.setting import to_flag
from engine.sources.draft_source import fetch_models
from engine.sources.model_source import check_embedded, check_tokenizer_source, fetch, find_model, local_path
from engine.startup.ahead import WeightMemory, begin_weights, runs_on_cpu
from engine.startup.model_check import ModelFacts, check_model
from engine.system.cache_folder import foreseen
from engine.text.requests.default_sampling import check_sampling_source, default_sampling
from server.answers.model_memory import Memory, check_sum, memory_limit, memory_of, pool_share
from server.batches.folder import DataFolder
from server.settings.app_config import AppConfig
from server.settings.files import check_folder, read_setting_file
from server.settings.flags import load_settings, name_origins
from server.settings.serve_config import ServeConfig
from server.settings.settings import Settings
from server.settings.tls import Tls, read_tls
from server.telemetry.logs import configure_logging
from server.telemetry.otlp_endpoint import find_endpoint
from server.tenancy.tenancy import read_tenants

if TYPE_CHECKING:
    from fastapi import FastAPI

    from engine.handle import EngineFacts, EngineHandle
    from engine.text.tokenizer import TextTokenizer
    from server.answers.models import LoadedModel

log = logging.getLogger("quire.serve")

_TURN_S = 0.0002  # with the usual 5 ms a load of 300 matrices waits a second for the GIL
_SMALL_POOL = 1024  # tokens; a smaller pool is usually a mistyped --kv-cache-memory-bytes
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


class _Plan(NamedTuple):
    """Everything that is known before the port is bound."""

    serve: ServeConfig
    engine: EngineConfig
    app: AppConfig
    model: ModelFacts
    chat_template: str | None
    tls: Tls | None
    started_s: float
    is_kept: bool = True
    at_start: bool = True  # it is loaded then

    @property
    def name(self) -> str:
        """Return the name that is reported."""
        return self.app.served_model_names[0]

    @property
    def memory(self) -> Memory:
        """Return what the model takes of the memory."""
        return memory_of(self.engine, takes_images=self.model.takes_images)

    @property
    def hands_over(self) -> bool:
        """Return whether K/V is handed over between daemons."""
        return self.app.role != "both"


def prepare_all(settings: Settings) -> list[_Plan]:
    """Check every setting and the small files that settings name, without slow imports, for each model. Raises QuireError.

    `quire doctor --config FILE` ends here.
    """
    settings.check_together()
    plans = _together([_prepare(each) for each in settings.each or [settings]], settings.keep)
    names = [
        name
        for plan in plans
        for name in (*plan.app.served_model_names, *(each.name for each in plan.engine.lora_modules))
    ]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"Two models have the name {twice!r}; give one another served-model-name.")
    paths = [path for plan in plans for path in (plan.app.model, *(each.path for each in plan.engine.lora_modules))]
    if odd := next((text for text in (*names, *paths) if text.encode(errors="replace").decode() != text), None):
        raise ConfigError(f"{odd!r} is not UTF-8, and answers name it; give the file, or the model, another name.")
    _check_shared(plans)
    guards = [None, *(name for plan in plans for name in plan.app.served_model_names)]
    if missing := [plan.app.guard for plan in plans if plan.app.guard not in guards]:
        raise ConfigError(f"--guard is {missing[0]!r}, which is no model here; serve it beside this one.")
    return plans


def _check_shared(plans: list[_Plan]) -> None:
    """Raise ConfigError if models on the CPU differ in what the process has once: kernels and threads."""
    engines = [plan.engine for plan in plans if runs_on_cpu(plan.engine)]
    for name in ("cpu_kernels", "portable_bits", "num_threads"):
        if len({getattr(engine, name) for engine in engines}) > 1:
            raise ConfigError(
                f"{to_flag(name)} differs between models, but all models of a daemon compute with the same kernels and "
                "threads; set it once, beside models."
            )


def _together(plans: list[_Plan], keep: Sequence[str]) -> list[_Plan]:
    """Return the plans of models, those that are kept first; with their parts of the memory. Raises ConfigError."""
    kept = {name for plan in plans for name in plan.app.keep}
    called = [{*plan.app.served_model_names, plan.serve.model, plan.app.model} for plan in plans]
    if unknown := next((name for name in keep if not any(name in each for each in called)), None):
        known = ", ".join(plan.name for plan in plans)
        raise ConfigError(f"--keep names {unknown!r}, which is no model here; the models are {known}.")
    leave = bool(kept or plans[0].app.models_max or any(plan.app.idle_unload for plan in plans))
    kept |= {plan.app.guard for plan in plans if plan.app.guard is not None}
    stays = [not leave or bool(kept & names) for names in called]
    if len(plans) > 1:
        at_once = min(plans[0].app.models_max or len(plans), len(plans))
        plans = [
            plan._replace(engine=replace(plan.engine, most_pool_bytes=pool_share(at_once)))
            if plan.engine.kv_cache_memory_bytes is None and runs_on_cpu(plan.engine)
            else plan
            for plan in plans
        ]
    plans = [
        plan._replace(is_kept=stay, at_start=stay or not (any(stays) or index))
        for index, (plan, stay) in enumerate(zip(plans, stays, strict=True))
    ]
    _check_memory(plans)
    return plans


def _check_memory(plans: Sequence[_Plan]) -> None:
    """Raise ConfigError if the models that stay do not fit beside the largest of the others."""
    if len(plans) == 1:
        return
    needs = {plan.name: plan.memory for plan in plans}
    leaving = max((plan.name for plan in plans if not plan.is_kept), key=lambda name: needs[name].total, default=None)
    at_once = {name: needs[name] for name in [*[plan.name for plan in plans if plan.is_kept], leaving] if name}
    check_sum(at_once, memory_limit(plans[0].app.models_memory, [plan.engine for plan in plans]))


def _prepare(settings: Settings) -> _Plan:
    """Check the settings of one model."""
    started_s = time.monotonic()
    settings.check_together()
    serve_config = settings.serve_config()
    source = find_model(serve_config.model)
    engine_config = settings.engine_config(source.path)
    app_config = settings.app_config(source.path, source.name)
    for module in engine_config.lora_modules:
        if module.name in app_config.served_model_names:
            raise ConfigError(
                f"--lora-modules has {module.name}={module.path}, but that is the model's own name; choose another name."
            )
    find_endpoint(app_config, log.warning)
    if app_config.tenants is not None:
        read_tenants(app_config.tenants, app_config.api_keys)
    if app_config.data_dir is not None:
        DataFolder(app_config.data_dir).close()
    offload_dir = None if engine_config.kv_offload_dir is None else Path(engine_config.kv_offload_dir)
    check_folder("--kv-offload-config: folder", offload_dir)
    check_folder("--kv-transfer-config: folder", app_config.kv_connector_dir)
    if app_config.allowed_local_media_path is not None and not app_config.allowed_local_media_path.is_dir():
        raise ConfigError(
            f"--allowed-local-media-path is {str(app_config.allowed_local_media_path)!r}, which is no folder."
        )
    if serve_config.tokenizer is not None:
        check_tokenizer_source(serve_config.tokenizer)
    check_sampling_source(serve_config.generation_config, serve_config.override_generation_config)
    if app_config.limit_mm_per_prompt is not None:
        from engine.images import most_images

        most_images(app_config.limit_mm_per_prompt)
    if serve_config.hf_token is not None:
        os.environ["HF_TOKEN"] = serve_config.hf_token  # the hub's library reads it there
    chat_template = None if serve_config.chat_template is None else _read_template(serve_config.chat_template)
    facts = check_model(engine_config, has_tokenizer=serve_config.tokenizer is not None)
    tls = read_tls(serve_config)
    return _Plan(serve_config, engine_config, app_config, facts, chat_template, tls, started_s)


def _read_template(given: str) -> str:
    """Return a chat template: a file's, or the text itself. Raises ConfigError."""
    from engine.text.chat_template import ChatTemplate  # jinja2

    is_text = "{%" in given or "{{" in given
    text = given if is_text else read_setting_file("--chat-template", Path(given))
    ChatTemplate(text, {})  # raises ConfigError for one that cannot be read
    return text


def _serve(plans: Sequence[_Plan], listener: socket.socket) -> int:
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


def open_app(argv: Sequence[str]) -> FastAPI:
    """Return the application that `quire serve` would serve, loaded, for another HTTP server. Raises QuireError."""
    plans = prepare_all(load_settings(argv))
    arbiter = Arbiter() if len(plans) > 1 else None
    with _loading(plans, arbiter, _begin(plans)) as (loader, loads):
        return _make_app(plans, arbiter, loader, [load and load.result() for load in loads])


def _begin(plans: Sequence[_Plan]) -> WeightMemory | None:
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
    plans: Sequence[_Plan], arbiter: Arbiter | None, memory: WeightMemory | None
) -> Iterator[tuple[ThreadPoolExecutor, list[Future[LoadedModel] | None]]]:
    """Load the models of the start on a thread, one after the other; stop them if the block raises."""
    is_over = Event()
    loader = ThreadPoolExecutor(1, "quire-loader")
    given = iter([memory])
    loads = [
        loader.submit(_load, plan, arbiter, lambda: not is_over.is_set(), None, next(given, None))
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
    plans: Sequence[_Plan],
    arbiter: Arbiter | None,
    loader: ThreadPoolExecutor,
    loads: Sequence[LoadedModel | Future[LoadedModel] | None],
) -> FastAPI:
    """Return the application; it has models that are loaded, and waits for those of which a load has begun."""
    from server.answers.models import Entry
    from server.app import make_app

    limit = memory_limit(plans[0].app.models_memory, [plan.engine for plan in plans])
    served = []
    for plan, load in zip(plans, loads, strict=True):
        entry = Entry(
            config=plan.app,
            load=partial(_load, plan, arbiter),
            adapters=[module.name for module in plan.engine.lora_modules],
            is_kept=plan.is_kept,
            memory=plan.memory if arbiter else Memory(),
            begun=load if isinstance(load, Future) else None,
        )
        served.append((entry, None if isinstance(load, Future) else load))
    return make_app(served, limit, loader)


def _load(
    plan: _Plan,
    arbiter: Arbiter | None,
    is_wanted: Callable[[], bool],
    show_bars: bool | None = False,
    memory: WeightMemory | None = None,
) -> LoadedModel:
    """Return the engine, the tokenizer, and what prepares images for a model that takes some.

    `memory` is for the weights, where it has been begun. Raises NotWantedError once it is not wanted.

    Python imports, which hold the GIL, take most of a start, so C code works beside them (engine/startup/ahead.py):

        main thread                         the loader's thread                      other threads, in C
        settings, port, the model's header                                           torch's libraries are loaded
        FastAPI, torch, engine.build                                                 memory for weights gets its pages, the digest
        HTTP side, event loop               build_engine: matrices, pool, warm-up    weights are packed (native/packer.py)
                                            tokenizer, on one more

    Two threads must not use the library transformers at the same time: it imports its modules on first use, and the second
    thread finds them half imported. So a model that needs it is loaded step by step on the loader's thread.
    """
    from engine.system.progress import StartupProgress

    name, path, begun_s = plan.app.served_model_names[0], plan.app.model, time.monotonic()
    log.info("loading %s%s", name, f" from {path}" if local_path(path) is not None or name != path else "")
    with StartupProgress(show_bars=show_bars) as startup, ExitStack() as undo:

        def report(progress: Progress) -> None:
            if not is_wanted():
                raise NotWantedError
            startup.report(progress)

        if plan.model.is_native:
            plan = _fetch(plan, report)
            engine, tokenizer = _load_beside(plan, report, undo, arbiter, memory)
        else:
            from engine.startup.build import build_engine, check_foreign  # torch, seconds

            check_foreign(plan.engine)
            plan = _fetch(plan, report)
            tokenizer = _load_tokenizer(plan)
            engine = build_engine(plan.engine, report, hands_over=plan.hands_over, arbiter=arbiter)
            undo.callback(engine.stop, 0.0)
        tokenizer.hold_to(engine.facts.vocab_size)
        if (num_tokens := engine.config.num_blocks * engine.config.block_size) < _SMALL_POOL:
            log.warning("the KV pool holds %d tokens; longer requests are refused: give it more memory", num_tokens)
        loaded = _with_images(plan, engine, tokenizer)
        undo.pop_all()
        takes = None if arbiter is None else plan.memory  # of files that are here now
        return loaded._replace(load_s=time.monotonic() - begun_s, memory=takes)


def _with_images(plan: _Plan, engine: EngineHandle, tokenizer: TextTokenizer) -> LoadedModel:
    """Return a loaded model with what prepares images, if it takes some."""
    from server.answers.models import LoadedModel

    if not engine.facts.takes_images:
        return LoadedModel(engine, tokenizer)
    from engine.text.images.preprocessor import ImagePreprocessor  # transformers' part for images

    model, wishes = Path(plan.engine.model), (plan.app.mm_processor_kwargs, plan.app.limit_mm_per_prompt)
    return LoadedModel(engine, tokenizer, ImagePreprocessor.of(model, tokenizer, *wishes, plan.engine.mmproj))


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


def _load_beside(
    plan: _Plan,
    tell: Callable[[Progress], None],
    undo: ExitStack,
    arbiter: Arbiter | None,
    memory: WeightMemory | None,
) -> tuple[EngineHandle, TextTokenizer]:
    """Return the engine of a model that needs no transformers, and the tokenizer, which is loaded on a thread."""
    memory = begin_weights(plan.engine) if memory is None else memory
    from engine.startup.build import build_engine  # torch

    with ThreadPoolExecutor(1) as aside, _short_turns():
        front = aside.submit(_load_tokenizer, plan)

        def report(progress: Progress) -> None:
            tell(progress)
            if front.done():
                front.result()  # raises what is wrong with the tokenizer, before minutes of loading

        engine = build_engine(plan.engine, report, memory, hands_over=plan.hands_over, arbiter=arbiter)
        undo.callback(engine.stop, 0.0)
        return engine, front.result()


@contextmanager
def _short_turns() -> Iterator[None]:
    """Make a thread that runs Python hand over the GIL sooner: packing takes it for a moment a thousand times."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _fetch(plan: _Plan, report: Callable[[Progress], None]) -> _Plan:
    """Return the plan with local paths for models of the hub, checked again with all their files. Raises QuireError."""
    engine, serve_config = fetch_models(plan.engine, report), plan.serve
    revision = serve_config.tokenizer_revision
    tokenizer = serve_config.tokenizer or (plan.engine.model if revision not in (None, plan.engine.revision) else None)
    if tokenizer is not None:
        path = fetch(tokenizer, revision, engine.download_dir, report, weights=False)
        serve_config = replace(serve_config, tokenizer=str(path))
    model = plan.model if engine is plan.engine else check_model(engine, has_tokenizer=True)
    return plan._replace(engine=engine, serve=serve_config, model=model)


def _load_tokenizer(plan: _Plan) -> TextTokenizer:
    """Return the tokenizer."""
    from engine.text.tokenizer_files import check_draft_tokenizer, load_tokenizer

    tokenizer = load_tokenizer(
        plan.serve.tokenizer or plan.engine.model,
        chat_template=plan.chat_template,
        sampling=default_sampling(
            plan.serve.generation_config, plan.serve.override_generation_config, Path(plan.engine.model), log
        ),
    )
    if plan.model.config is not None:
        tokenizer.hold_to(plan.model.config.vocab_size)
    check_draft_tokenizer(tokenizer, plan.engine.speculative_config)
    return tokenizer


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
