"""Everything that `quire serve` knows before the port is bound: the settings of each model, and the small files they name.

Each is checked without slow imports, torch among them. `quire doctor --config FILE` ends here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import ConfigError, ModelLoadError
from engine.settings.engine_config import EngineConfig
from engine.settings.setting import to_flag
from engine.sources.model_source import check_tokenizer_source, find_model
from engine.startup.ahead import runs_on_cpu
from engine.startup.model_check import ModelFacts, check_model
from engine.system.regular_file import reason
from engine.text.requests.default_sampling import check_sampling_source
from server.answers.model_memory import Memory, check_sum, memory_limit, memory_of, pool_share
from server.batches.folder import DataFolder
from server.settings.app_config import AppConfig
from server.settings.serve_config import ServeConfig
from server.settings.settings import Settings
from server.settings.tls import Tls, read_tls
from server.telemetry.otlp_endpoint import find_endpoint
from server.tenancy.tenancy import read_tenants

log = logging.getLogger("quire.serve")


class Plan(NamedTuple):
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


def prepare_all(settings: Settings) -> list[Plan]:
    """Check every setting and the small files that settings name, without slow imports, for each model. Raises QuireError."""
    settings.check_together()
    plans = _together(_prepare_each(settings), settings.keep)
    names = [
        name
        for plan in plans
        for name in (*plan.app.served_model_names, *(each.name for each in plan.engine.lora_modules))
    ]
    called = [*names, *(alias for plan in plans for alias in plan.app.model_aliases)]
    if twice := next((name for name in called if called.count(name) > 1), None):
        raise ConfigError(f"The name {twice!r} stands twice; give one model another served-model-name.")
    paths = [path for plan in plans for path in (plan.app.model, *(each.path for each in plan.engine.lora_modules))]
    if odd := next((text for text in (*names, *paths) if text.encode(errors="replace").decode() != text), None):
        raise ConfigError(f"{odd!r} is not UTF-8, and answers name it; give the file, or the model, another name.")
    _check_shared(plans)
    guards = [None, *(name for plan in plans for name in plan.app.served_model_names)]
    if missing := [plan.app.guard for plan in plans if plan.app.guard not in guards]:
        raise ConfigError(f"--guard is {missing[0]!r}, which is no model here; serve it beside this one.")
    return plans


def _prepare_each(settings: Settings) -> list[Plan]:
    """Check the settings of each model."""
    if settings.models_dir is None:
        return [_prepare(each) for each in settings.each or [settings]]
    plans = [plan for each in settings.each if (plan := _prepare_found(each)) is not None]
    if not plans:
        raise ConfigError(f"--models-dir is {str(settings.models_dir)!r}, which has no model that can be served.")
    return plans


def _prepare_found(settings: Settings) -> Plan | None:
    """Check the settings of a model of a folder; None, with a warning, if it cannot be served."""
    try:
        return _prepare(settings)
    except ModelLoadError as error:
        log.warning("%s is left out: %s", settings.served_model_name[0], error)
        return None


def _check_shared(plans: list[Plan]) -> None:
    """Raise ConfigError if models on the CPU differ in what the process has once: kernels and threads."""
    engines = [plan.engine for plan in plans if runs_on_cpu(plan.engine)]
    for name in ("cpu_kernels", "portable_bits", "num_threads"):
        if len({getattr(engine, name) for engine in engines}) > 1:
            raise ConfigError(
                f"{to_flag(name)} differs between models, but all models of a daemon compute with the same kernels and "
                "threads; set it once, beside models."
            )


def _together(plans: list[Plan], keep: Sequence[str]) -> list[Plan]:
    """Return the plans of models with their parts of the memory, and which stay or are loaded at the start. Raises ConfigError."""
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


def _check_memory(plans: Sequence[Plan]) -> None:
    """Raise ConfigError if the models that stay do not fit beside the largest of the others."""
    if len(plans) == 1:
        return
    needs = {plan.name: plan.memory for plan in plans}
    leaving = max((plan.name for plan in plans if not plan.is_kept), key=lambda name: needs[name].total, default=None)
    at_once = {name: needs[name] for name in [*[plan.name for plan in plans if plan.is_kept], leaving] if name}
    check_sum(at_once, memory_limit(plans[0].app.models_memory, [plan.engine for plan in plans]))


def _prepare(settings: Settings) -> Plan:
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
    _check_folder("--kv-offload-config: folder", offload_dir)
    _check_folder("--kv-transfer-config: folder", app_config.kv_connector_dir)
    if app_config.allowed_local_media_path is not None and not app_config.allowed_local_media_path.is_dir():
        raise ConfigError(
            f"--allowed-local-media-path is {str(app_config.allowed_local_media_path)!r}, which is no folder."
        )
    if serve_config.tokenizer is not None:
        check_tokenizer_source(serve_config.tokenizer)
    check_sampling_source(serve_config.generation_config, serve_config.override_generation_config)
    if app_config.limit_mm_per_prompt is not None:
        from engine.images import most_images

        if not most_images(app_config.limit_mm_per_prompt):
            engine_config = replace(engine_config, image_cache_memory=0)  # no tower
    if serve_config.hf_token is not None:
        os.environ["HF_TOKEN"] = serve_config.hf_token  # the hub's library reads it there
    chat_template = None
    if serve_config.chat_template is not None:
        from engine.text.chat_template import read_template  # jinja2

        chat_template = read_template(serve_config.chat_template)
    facts = check_model(engine_config, has_tokenizer=serve_config.tokenizer is not None)
    tls = read_tls(serve_config)
    return Plan(serve_config, engine_config, app_config, facts, chat_template, tls, started_s)


def _check_folder(flag: str, path: Path | None) -> None:
    """Raise ConfigError if the folder that a setting names can be neither created nor written to."""
    if path is None:
        return
    try:
        place = next(place for place in (path, *path.absolute().parents) if place.exists())
        is_usable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(f"{flag} is {str(path)!r:.200}, which cannot be used: {reason(error)}.") from error
    if not is_usable:
        raise ConfigError(
            f"{flag} is {str(path)!r}, which cannot be used: {place} is no folder that may be written to."
        )
