"""Reads YAML files that settings name, which must not have a key twice. Start-up thread, and event loop on SIGHUP.

Imported when there is such a file: PyYAML takes 10 ms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.error import MarkedYAMLError
from yaml.nodes import MappingNode, Node, ScalarNode

from engine.core.errors import ConfigError
from engine.system.regular_file import read_bytes, reason

_MAX_BYTES = 4 << 20


def read_yaml(flag: str, path: Path, *, has_secrets: bool = False) -> Any:
    """Return the content of the YAML file that `flag` names. Raises ConfigError."""
    try:
        return yaml.load(read_bytes(path, _MAX_BYTES), _Loader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"{flag} is {str(path)!r}, which cannot be read: {reason(error)}.") from None
    except RecursionError:
        raise ConfigError(f"{flag} is {str(path)!r}, whose values are nested too deeply.") from None
    except yaml.YAMLError as error:
        at, problem = "", ""
        if isinstance(error, MarkedYAMLError) and error.problem_mark:
            at, problem = f" at line {error.problem_mark.line + 1}", f": {error.problem}"
        fault = f"which is not valid YAML{at}{'' if has_secrets else problem}"
        if has_secrets and isinstance(error, DuplicateKeyError):  # it names fields only
            fault = f"in which {error.problem}{at}"
        raise ConfigError(f"{flag} is {str(path)!r}, {fault}.") from None  # the cause may show lines of the file


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
