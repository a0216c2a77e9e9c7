"""Files of settings in YAML, read so that nothing in them is silently overruled. Start-up thread, and event loop on SIGHUP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from engine.regular_file import read_bytes

_MAX_BYTES = 4 << 20


class DuplicateKeyError(ConstructorError):
    """A mapping names a key twice; `problem` says which."""


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that names a key twice, of which YAML's readers commonly take the last."""

    def __init__(self, stream: bytes) -> None:
        super().__init__(stream)
        self._checked: set[Node] = set()

    def flatten_mapping(self, node: MappingNode) -> None:
        """Checked before `<<` puts another mapping's keys beside those that go before them; a second time they are there."""
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
        """A date such as 2026-13-45 is a fault of the file like any other."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # what PyYAML lets out, depending on the type
            problem = f"this is no value of type {node.tag.rpartition(':')[2]}"
            raise ConstructorError(None, None, problem, node.start_mark) from error


def read_yaml(path: Path) -> Any:
    """What is in a file. Raises OSError and yaml.YAMLError."""
    return yaml.load(read_bytes(path, _MAX_BYTES), _Loader)  # noqa: S506 - a SafeLoader
