"""Reads YAML files of settings and refuses duplicate keys. Start-up thread, and event loop on SIGHUP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from engine.regular_file import read_bytes

_MAX_BYTES = 4 << 20


class DuplicateKeyError(ConstructorError):
    """A mapping has a key twice; `problem` names it."""


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice; YAML readers commonly take the last value."""

    def __init__(self, stream: bytes) -> None:
        super().__init__(stream)
        self._checked: set[Node] = set()

    def flatten_mapping(self, node: MappingNode) -> None:
        """Check a mapping before `<<` merges another one's keys into it, so once only."""
        if node not in self._checked:
            self._checked.add(node)
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if not isinstance(key, ScalarNode):
                    continue
                if (key.tag, key.value) in seen:
                    raise DuplicateKeyError(None, None, f"{key.value!r} is there twice", key.start_mark)
                seen.add((key.tag, key.value))
        super().flatten_mapping(node)

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        """Construct a value; one such as the date 2026-13-45 is a fault of the file like any other."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # raised by PyYAML, depending on the type
            problem = f"this is no value of type {node.tag.rpartition(':')[2]}"
            raise ConstructorError(None, None, problem, node.start_mark) from error


def read_yaml(path: Path) -> Any:
    """Return the content of a file. Raises OSError and yaml.YAMLError."""
    return yaml.load(read_bytes(path, _MAX_BYTES), _Loader)  # noqa: S506 - a SafeLoader
