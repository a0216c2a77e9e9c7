"""Reads --kv-events-config, whose keys and values are vLLM's. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.core.errors import ConfigError
from engine.settings.setting import check_type, read_object, unknown_key

FLAG = "--kv-events-config"
PUBLISHERS = ("zmq", "null")
_ADDRESS = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.%\w]+\]|[\w.-]+):(\*|(?P<port>[0-9]{1,5}))|ipc://[!-~]+")
_MOST = 1 << 30  # messages or steps; ZeroMQ's limits are 32-bit numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """What is published of the prefix cache, and where."""

    enable_kv_cache_events: bool = False
    publisher: str = ""  # "zmq" where events are enabled, unless it is "null"
    endpoint: str = "tcp://127.0.0.1:5557"  # vLLM's is tcp://*:5557; token ids are not for everyone
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # messages kept for replay
    hwm: int = 100_000  # messages that wait for one slow subscriber
    max_queue_size: int = 100_000  # steps that wait for the publisher's thread
    topic: str = ""

    @classmethod
    def read(cls, asked: str | Mapping[str, Any]) -> KVEventsConfig:
        """Return the configuration in JSON, or in the mapping read from it. Raises ConfigError."""
        given = {key: value for key, value in read_object(FLAG, asked).items() if value is not None}
        types = {field.name: str(field.type) for field in fields(cls)}
        for key, value in given.items():
            if key not in types:
                raise unknown_key(FLAG, key, types)
            check_type(FLAG, key, value, types[key])
        config = cls(**given)
        config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError for a value out of bounds."""
        if self.publisher not in ("", *PUBLISHERS):
            raise ConfigError(f"{FLAG}: publisher is {self.publisher!r}; choose one of {', '.join(PUBLISHERS)}.")
        for key in ("buffer_steps", "hwm", "max_queue_size"):
            if not 1 <= getattr(self, key) <= _MOST:
                raise ConfigError(f"{FLAG}: {key} is {getattr(self, key)}; it must be from 1 to {_MOST}.")
        for key in ("endpoint", "replay_endpoint"):
            address = getattr(self, key)
            found = None if address is None else _ADDRESS.fullmatch(address)
            if address is not None and (found is None or int(found["port"] or 0) > 65535):
                raise ConfigError(f"{FLAG}: {key} is {address!r}; it must be like tcp://127.0.0.1:5557.")
        if not self.topic.isprintable():
            raise ConfigError(f"{FLAG}: topic is {self.topic!r}; it must have printable characters only.")

    @property
    def is_on(self) -> bool:
        """Return whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"
