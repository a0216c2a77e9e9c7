"""Reads where traces go over OTLP, without importing OpenTelemetry.

The flag wins over OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, that over OTEL_EXPORTER_OTLP_ENDPOINT. Without any of them traces are off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from urllib.parse import urlsplit

from engine.core.errors import ConfigError
from server.settings.app_config import AppConfig

_GRPC_PORT = 4317  # of OTLP over gRPC; OTLP over HTTP has 4318
_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_INSTALL = "install it with: pip install 'quire-serve[otel]'"
_FLAG = "--otlp-traces-endpoint"
_OWN, _BASE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


def find_endpoint(
    config: AppConfig, warn: Callable[[str], None] = lambda _: None, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return the address, or None if nothing is exported. Raises ConfigError."""
    given = config.otlp_traces_endpoint
    found = _from_environment(environment, warn) if given is None else _checked(_FLAG, given)
    if found is None:
        return None
    if urlsplit(found).port == _GRPC_PORT:
        warn(f"{found} has the port of OTLP over gRPC; Quire sends OTLP over HTTP, usually to port 4318.")
    if all(map(_is_installed, _MODULES)):
        return found
    if given is not None:
        raise ConfigError(f"{_FLAG} needs OpenTelemetry's SDK, which is not installed; {_INSTALL}.")
    warn(f"OTEL_EXPORTER_OTLP_* is set, but OpenTelemetry's SDK is not installed: nothing is exported; {_INSTALL}.")
    return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _from_environment(environment: Mapping[str, str], warn: Callable[[str], None]) -> str | None:
    """Return the address; None if there is none, or one that cannot be used.

    The variables may be set for all programs of a machine, so a fault is no reason not to serve.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    own, base = environment.get(_OWN), environment.get(_BASE)
    try:
        if own:
            return _checked(_OWN, own)
        if base:
            return _checked(_BASE, f"{base.rstrip('/')}/v1/traces")
    except ConfigError as error:
        warn(f"traces are not exported: {error}")
    return None


def _checked(name: str, value: str) -> str:
    """Return the full address. Raises ConfigError for what is no http URL."""
    try:
        parts = urlsplit(value)
        parts.port  # noqa: B018 - raises ValueError
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}, which is no URL: {error}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        example = "http://localhost:4318/v1/traces"
        raise ConfigError(f"{name} is {value!r}; OTLP is sent over HTTP, to an address such as {example}.")
    return value.rstrip("/") + "/v1/traces" if parts.path in ("", "/") else value
