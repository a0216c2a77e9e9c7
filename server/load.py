"""Loads a model that is served: its engine, its tokenizer, and what prepares images.

At the start, or when a request names it, on the loader's thread. Torch stays behind build_engine.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.arbiter import Arbiter
from engine.core.errors import NotWantedError
from engine.core.types import Progress
from engine.sources.draft_source import fetch_models
from engine.sources.model_source import fetch, local_path
from engine.startup.ahead import WeightMemory, begin_weights
from engine.startup.model_check import check_model
from engine.text.requests.default_sampling import default_sampling
from server.plan import Plan

if TYPE_CHECKING:
    from engine.handle import EngineHandle
    from engine.text.tokenizer import TextTokenizer
    from server.answers.models import LoadedModel

log = logging.getLogger("quire.serve")

_TURN_S = 0.0002  # with the usual 5 ms a load of 300 matrices waits a second for the GIL
_SMALL_POOL = 1024  # tokens; a smaller pool is usually a mistyped --kv-cache-memory-bytes


def load_model(
    plan: Plan,
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
        num_tokens = engine.config.num_blocks * engine.config.block_size
        if num_tokens < _SMALL_POOL and num_tokens <= engine.config.max_model_len:
            log.warning("the KV pool holds %d tokens; longer requests are refused: give it more memory", num_tokens)
        loaded = _with_images(plan, engine, tokenizer)
        undo.pop_all()
        takes = None if arbiter is None else plan.memory  # of files that are here now
        return loaded._replace(load_s=time.monotonic() - begun_s, memory=takes)


def _with_images(plan: Plan, engine: EngineHandle, tokenizer: TextTokenizer) -> LoadedModel:
    """Return a loaded model with what prepares images, if it takes some."""
    from server.answers.models import LoadedModel

    if not engine.facts.takes_images:
        return LoadedModel(engine, tokenizer)
    from engine.text.images.preprocessor import ImagePreprocessor  # transformers' part for images

    model, wishes = Path(plan.engine.model), (plan.app.mm_processor_kwargs, plan.app.limit_mm_per_prompt)
    return LoadedModel(engine, tokenizer, ImagePreprocessor.of(model, tokenizer, *wishes, plan.engine.mmproj))


def _load_beside(
    plan: Plan,
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


def _fetch(plan: Plan, report: Callable[[Progress], None]) -> Plan:
    """Return the plan with local paths for models of the hub, checked again with all their files. Raises QuireError."""
    engine, serve_config = fetch_models(plan.engine, report), plan.serve
    revision = serve_config.tokenizer_revision
    tokenizer = serve_config.tokenizer or (plan.engine.model if revision not in (None, plan.engine.revision) else None)
    if tokenizer is not None:
        path = fetch(tokenizer, revision, engine.download_dir, report, weights=False)
        serve_config = replace(serve_config, tokenizer=str(path))
    model = plan.model if engine is plan.engine else check_model(engine, has_tokenizer=True)
    return plan._replace(engine=engine, serve=serve_config, model=model)


def _load_tokenizer(plan: Plan) -> TextTokenizer:
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
