"""A setting: one field of a frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from engine.settings.setting import section

_http = section("HTTP")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleConfig:
    """Stands for AppConfig or EngineConfig, which have many such fields."""

    max_wishes: int | None = _http(None, "N", "most wishes a request may have", unset="3", at_least=1)
