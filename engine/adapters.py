"""The adapters that requests may name: load, find, unload. Any thread; knows no tensors.

`max_loras` bounds how many adapters are in memory: loaded ones, and unloaded ones that requests still use. `load` reads
files and takes a while, during which `find` does not wait.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.errors import AdapterConflictError, AdapterNotFoundError
from engine.core.types import Adapter


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter, its path and the time of loading."""

    adapter: Adapter
    path: str
    loaded_s: int = field(default_factory=lambda: int(time.time()))  # Unix time


class Adapters:
    """The loaded adapters, by name."""

    def __init__(self, read: Callable[[str, str], Adapter] | None = None, max_loras: int = 0) -> None:
        """`read` loads an adapter by name and path; it raises AdapterNotFoundError or AdapterLoadError."""
        self._read, self.max_loras = read, max_loras
        self._loaded: dict[str, LoadedAdapter] = {}  # replaced as a whole, so that readers need no lock
        self._held: weakref.WeakSet[Adapter] = weakref.WeakSet()
        self._lock = threading.Lock()  # one load or unload at a time

    def find(self, name: str) -> LoadedAdapter | None:
        """Return the adapter of that name, or None."""
        return self._loaded.get(name)

    def all(self) -> list[LoadedAdapter]:
        """Return all adapters in the order of loading."""
        return list(self._loaded.values())

    def load(self, name: str, path: str) -> LoadedAdapter:
        """Read an adapter; from now on requests may name it. Blocks.

        Raises AdapterConflictError if the name is taken or there is no room, and the errors of `read`.
        """
        with self._lock:
            if name in self._loaded:
                raise AdapterConflictError(
                    f"An adapter {name!r} is loaded already; unload it first, or choose another name.",
                    param="lora_name",
                )
            num_held = len(self._held)
            if num_held >= self.max_loras:
                num_leaving = num_held - len(self._loaded)
                leaving = f", {num_leaving} of them unloaded but still used by requests" if num_leaving else ""
                raise AdapterConflictError(
                    f"{num_held} adapters are held{leaving}, and --max-loras is {self.max_loras}; unload one first."
                )
            assert self._read is not None, "where none may be held there is none to read"
            entry = LoadedAdapter(self._read(name, path), path)
            self._held.add(entry.adapter)
            self._loaded = {**self._loaded, name: entry}
            return entry

    def unload(self, name: str) -> None:
        """Forget an adapter; running requests keep it. Raises AdapterNotFoundError."""
        with self._lock:
            if name not in self._loaded:
                raise AdapterNotFoundError(f"No adapter {name!r} is loaded.", param="lora_name")
            self._loaded = {other: entry for other, entry in self._loaded.items() if other != name}
