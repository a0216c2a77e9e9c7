"""Reads --kv-events-config, whose keys and values are vLLM's. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.core.errors import ConfigError
from engine.settings.setting import check_key, declared, key, read_object, unknown_key

FLAG = "--kv-events-config"
_ADDRESS = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.%\w]+\]|[\w.-]+):(\*|(?P<port>[0-9]{1,5}))|ipc://[!-~]+")
_MOST = 1 << 30  # messages or steps; ZeroMQ's limits are 32-bit numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """What is published of the prefix cache, and where."""

    enable_kv_cache_events: bool = key(False)
    publisher: str = key("zmq", choices=("zmq", "null"))
    endpoint: str = key("tcp://127.0.0.1:5557")  # vLLM's is tcp://*:5557; token ids are not for everyone
    replay_endpoint: str | None = key(None)
    buffer_steps: int = key(10_000, at_least=1, at_most=_MOST)  # messages kept for replay
    hwm: int = key(100_000, at_least=1, at_most=_MOST)  # messages that wait for one slow subscriber
    max_queue_size: int = key(100_000, at_least=1, at_most=_MOST)  # steps that wait for the publisher's thread
    topic: str = key("")

    @classmethod
    def read(cls, asked: str | Mapping[str, Any]) -> KVEventsConfig:
        """Return the configuration in JSON, or in the mapping read from it. Raises ConfigError."""
        given = {name: value for name, value in read_object(FLAG, asked).items() if value is not None}
        keys = {each.name: each for each in declared(cls)}
        for name, value in given.items():
            if name not in keys:
                raise unknown_key(FLAG, name, keys)
            check_key(FLAG, keys[name], value)
        config = cls(**given)
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(config, name)
            found = None if address is None else _ADDRESS.fullmatch(address)
            if address is not None and (found is None or int(found["port"] or 0) > 65535):
                raise ConfigError(f"{FLAG}: {name} is {address!r}; it must be like tcp://127.0.0.1:5557.")
        if not config.topic.isprintable():
            raise ConfigError(f"{FLAG}: topic is {config.topic!r}; it must have printable characters only.")
        return config

    @property
    def is_on(self) -> bool:
        """Return whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"
