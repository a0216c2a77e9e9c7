"""Reads where traces and metrics go over OTLP, without importing OpenTelemetry.

A flag wins over its signal's variable, that over OTEL_EXPORTER_OTLP_ENDPOINT. A signal without any of them is off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import NamedTuple
from urllib.parse import urlsplit

from engine.core.errors import ConfigError
from server.settings.app_config import AppConfig

_GRPC_PORT = 4317  # of OTLP over gRPC; OTLP over HTTP has 4318
_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_INSTALL = "install it with: pip install 'quire-serve[otel]'"


class Endpoints(NamedTuple):
    """The address of each signal; None where it is off."""

    traces: str | None
    metrics: str | None


def find_endpoints(
    config: AppConfig, warn: Callable[[str], None] = lambda _: None, environment: Mapping[str, str] = os.environ
) -> Endpoints | None:
    """Return the addresses, or None if no signal is exported. Raises ConfigError."""
    given = {"traces": config.otlp_traces_endpoint, "metrics": config.otlp_metrics_endpoint}
    traces, metrics = (
        _from_environment(signal, environment, warn)
        if address is None
        else _checked(f"--otlp-{signal}-endpoint", address, signal)
        for signal, address in given.items()
    )
    if traces is None and metrics is None:
        return None
    for address in (traces, metrics):
        if address is not None and urlsplit(address).port == _GRPC_PORT:
            warn(f"{address} has the port of OTLP over gRPC; Quire sends OTLP over HTTP, usually to port 4318.")
    if all(map(_is_installed, _MODULES)):
        return Endpoints(traces, metrics)
    for signal, address in given.items():
        if address is not None:
            raise ConfigError(
                f"--otlp-{signal}-endpoint needs OpenTelemetry's SDK, which is not installed; {_INSTALL}."
            )
    warn(f"OTEL_EXPORTER_OTLP_* is set, but OpenTelemetry's SDK is not installed: nothing is exported; {_INSTALL}.")
    return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _from_environment(signal: str, environment: Mapping[str, str], warn: Callable[[str], None]) -> str | None:
    """Return a signal's address; None if there is none, or one that cannot be used.

    The variables may be set for all programs of a machine, so a fault is no reason not to serve.
    """
    name = signal.upper()
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get(f"OTEL_{name}_EXPORTER") == "none":
        return None
    variable = f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT"
    own, base = environment.get(variable), environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    try:
        if own:
            return _checked(variable, own, signal)
        if base:
            return _checked("OTEL_EXPORTER_OTLP_ENDPOINT", f"{base.rstrip('/')}/v1/{signal}", signal)
    except ConfigError as error:
        warn(f"{signal} are not exported: {error}")
    return None


def _checked(name: str, value: str, signal: str) -> str:
    """Return the full address. Raises ConfigError for what is no http URL."""
    example = f"http://localhost:4318/v1/{signal}"
    try:
        parts = urlsplit(value)
        parts.port  # noqa: B018 - raises ValueError
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}, which is no URL: {error}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{name} is {value!r}; OTLP is sent over HTTP, to an address such as {example}.")
    return value.rstrip("/") + f"/v1/{signal}" if parts.path in ("", "/") else value
