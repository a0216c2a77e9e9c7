"""Files of settings in YAML, read so that nothing in them is silently overruled. Start-up thread, and event loop on SIGHUP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, ScalarNode


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that names a key twice, of which YAML's readers commonly take the last."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode) and key.value in seen:
                raise ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(key.value if isinstance(key, ScalarNode) else None)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """What is in a file. Raises OSError and yaml.YAMLError."""
    return yaml.load(path.read_bytes(), _Loader)  # noqa: S506 - a SafeLoader
