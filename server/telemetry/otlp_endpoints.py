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
_INSTALL = "install it with: pip install 'quire[otel]'"


class Endpoints(NamedTuple):
    """The address of each signal; None where it is off."""

    traces: str | None
    metrics: str | None


def _ignore(_: str) -> None:
    pass


def find_endpoints(
    config: AppConfig, warn: Callable[[str], None] = _ignore, environment: Mapping[str, str] = os.environ
) -> Endpoints | None:
    """Return the addresses, or None if no signal is exported. Raises ConfigError."""
    traces = _find("traces", "--otlp-traces-endpoint", config.otlp_traces_endpoint, environment)
    metrics = _find("metrics", "--otlp-metrics-endpoint", config.otlp_metrics_endpoint, environment)
    if traces is None and metrics is None:
        return None
    for address in (traces, metrics):
        if address is not None and urlsplit(address).port == _GRPC_PORT:
            warn(f"{address} has the port of OTLP over gRPC; Quire sends OTLP over HTTP, usually to port 4318.")
    if all(map(_is_installed, _MODULES)):
        return Endpoints(traces, metrics)
    for flag, value in (
        ("--otlp-traces-endpoint", config.otlp_traces_endpoint),
        ("--otlp-metrics-endpoint", config.otlp_metrics_endpoint),
    ):
        if value is not None:
            raise ConfigError(f"{flag} needs OpenTelemetry's SDK, which is not installed; {_INSTALL}.")
    # The variables may be set for all programs of a machine.
    warn(f"OTEL_EXPORTER_OTLP_* is set, but OpenTelemetry's SDK is not installed: nothing is exported; {_INSTALL}.")
    return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _find(signal: str, flag: str, given: str | None, environment: Mapping[str, str]) -> str | None:
    if given is not None:
        return _checked(flag, given, signal)
    if (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environment.get(f"OTEL_{signal.upper()}_EXPORTER") == "none"
    ):
        return None
    variable = f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
    if own := environment.get(variable):
        return _checked(variable, own, signal)
    if base := environment.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return _checked("OTEL_EXPORTER_OTLP_ENDPOINT", f"{base.rstrip('/')}/v1/{signal}", signal)
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
