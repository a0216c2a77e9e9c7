"""The settings of `quire serve`: flag, QUIRE_* variable and YAML key all grow from the fields in server/settings/groups.py.

The first source that names a setting wins: flag, then variable, then the file given by --config, then the default; an
empty variable counts as absent, but in the Security group it is refused, for it would leave the daemon open. server/settings/flags.py makes the command line from these fields and sentences from their
faults. Settings are read once, before anything is loaded, and never change.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from yaml.error import MarkedYAMLError

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from server.settings.app_config import AppConfig
from server.settings.groups import (
    AdapterSettings,
    BatchSettings,
    DeviceSettings,
    HandoffSettings,
    HttpSettings,
    LoggingSettings,
    ModelSettings,
    SchedulingSettings,
    SecuritySettings,
)
from server.settings.yaml_file import read_yaml

ENV_PREFIX = "QUIRE_"


class Settings(
    ModelSettings,
    DeviceSettings,
    SchedulingSettings,
    AdapterSettings,
    HandoffSettings,
    HttpSettings,
    BatchSettings,
    SecuritySettings,
    LoggingSettings,
    BaseSettings,
):
    """All settings; `Settings(**flags)` adds what the variables and the file say."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is pydantic-settings'
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Where values come from, the strongest first."""
        path = {**env_settings(), **init_settings()}.get("config")
        file_settings = InitSettingsSource(settings_cls, read_config_file(Path(path)) if path else {})
        return init_settings, env_settings, file_settings

    def engine_config(self, model: str) -> EngineConfig:
        """The engine's settings, with the model where it was found. Raises ConfigError."""
        same = {field.name: getattr(self, field.name) for field in fields(EngineConfig) if field.name != "model"}
        return EngineConfig(model=model, **same)

    def check_together(self) -> None:
        """Raise ConfigError for settings that do not go with each other."""
        if self.role == "decode" and not self.prefill_url:
            raise ConfigError("--role is 'decode', which needs --prefill-url, the address of a prefill daemon.")
        if self.role != "decode" and self.prefill_url:
            raise ConfigError(
                f"--prefill-url is for --role decode, and --role is {self.role!r}; leave one of them out."
            )
        if self.prefill_url and not _is_url(self.prefill_url):
            raise ConfigError(f"--prefill-url is {self.prefill_url!r}; it must be like http://127.0.0.1:8001.")
        for name in ("swap_space", "kv_offload_gib", "kv_offload_dir", "record"):
            if self.role == "decode" and getattr(self, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"--role decode does not go with {flag}; leave one of them out.")
        if self.protect_metrics and not (self.api_key or self.tenants):
            raise ConfigError("--protect-metrics needs a key to ask for; set --api-key or --tenants, too.")
        if self.pinned_prefixes:
            self._check_pins()
        if self.role != "both" and not self.enable_prefix_caching:
            raise ConfigError(
                f"--role {self.role} hands blocks over through the prefix cache; leave --enable-prefix-caching on."
            )
        if self.role != "both" and self.block_size is None:
            raise ConfigError(
                f"--role {self.role} does not go with --block-size auto; name a size that both daemons use."
            )

    def _check_pins(self) -> None:
        """Raise ConfigError for what leaves no place for --pinned-prefixes."""
        without = {
            "--pinned-prefix-share 0, which leaves no place for them": not self.pinned_prefix_share,
            "--no-enable-prefix-caching": not self.enable_prefix_caching,
        }
        for setting, is_so in without.items():
            if is_so:
                raise ConfigError(f"--pinned-prefixes does not go with {setting}; leave one of them out.")

    def app_config(self, model: str, served_name: str) -> AppConfig:
        """The HTTP application's settings; `served_name` is for a user who named none."""
        return AppConfig(
            model=model,
            served_model_names=tuple(name for name in self.served_model_name if "*" not in name) or (served_name,),
            model_aliases=tuple(name for name in self.served_model_name if "*" in name),
            api_keys=tuple(key.get_secret_value() for key in self.api_key),
            tenants=self.tenants,
            share_prefix_cache=self.share_prefix_cache,
            allowed_hosts=self.allowed_hosts,
            allowed_origins=self.allowed_origins,
            protect_metrics=self.protect_metrics,
            max_body_bytes=self.max_body_bytes,
            max_json_values=self.max_json_values,
            data_dir=self.data_dir,
            max_file_bytes=self.max_file_bytes,
            max_logprobs=self.max_logprobs,
            pooling=self.pooling,
            max_stored_responses=self.max_stored_responses,
            allow_runtime_lora_updating=self.allow_runtime_lora_updating,
            role=self.role,
            prefill_url=self.prefill_url,
            prefill_timeout_s=self.prefill_timeout,
            kv_connector_dir=self.kv_connector_dir,
            kv_connector_bytes=int(self.kv_connector_gib * (1 << 30)),
            pinned_prefixes=self.pinned_prefixes,
            page=self.page,
            strict_fields=self.strict_fields,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            sse_keep_alive_interval_s=self.sse_keep_alive_interval,
            stall_limit_s=self.stall_limit,
            shutdown_timeout_s=self.shutdown_timeout,
            metrics_compat=None if self.metrics_compat == "none" else self.metrics_compat,
        )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_address = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        return parts.scheme in ("http", "https") and has_address and parts.path in ("", "/")
    except ValueError:
        return False


def read_config_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML file by field name, keys in either spelling and nulls left out. Raises ConfigError."""
    try:
        content = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"--config is {str(path)!r}, which cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        line = (
            f" at line {error.problem_mark.line + 1}: {error.problem}"
            if isinstance(error, MarkedYAMLError) and error.problem_mark
            else ""
        )
        raise ConfigError(f"--config is {str(path)!r}, which is not valid YAML{line}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config is {str(path)!r}, which holds no settings; write one 'name: value' a line.")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in values:
            raise ConfigError(f"{path} sets {key!r} twice; keep one of the two spellings.")
        if value is None and name in SecuritySettings.model_fields:
            raise ConfigError(
                f"{path} sets {key!r} to nothing, but a setting that protects needs a value; give one, or remove it."
            )
        values[name] = value
    return {name: value for name, value in values.items() if value is not None}
