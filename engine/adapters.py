"""The adapters that requests may name: load, find, unload. Any thread; knows no tensors.

`max_loras` bounds how many adapters are in memory: loaded ones, and unloaded ones that requests still use. `load` reads
files and takes a while, during which no other call but `unload` waits. A request names an adapter by name and digest; while
it runs it holds the weights (`hold`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from engine.core.errors import AdapterConflictError, AdapterNotFoundError
from engine.core.types import Adapter
from engine.handle import LoadedAdapter


class Adapters:
    """The loaded adapters, by name."""

    def __init__(self, read: Callable[[str, str], Any] | None = None, max_loras: int = 0) -> None:
        """`read` loads weights by name and path, which have a `digest`; it raises AdapterNotFoundError or AdapterLoadError."""
        self._read, self.max_loras = read, max_loras
        self.loaded: Mapping[str, LoadedAdapter] = {}  # replaced as a whole, so that readers need no lock
        self._weights: dict[str, Any] = {}  # of the loaded ones
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()  # one load or unload at a time

    def hold(self, adapter: Adapter) -> Any:
        """Return the weights of a loaded adapter, which live as long as any holder. Raises AdapterNotFoundError."""
        weights = self._weights.get(adapter.name)
        if weights is None or weights.digest != adapter.digest:
            raise AdapterNotFoundError(f"No adapter {adapter.name!r} is loaded.", param="model")
        return weights

    def load(self, name: str, path: str) -> LoadedAdapter:
        """Read an adapter; from now on requests may name it. Blocks.

        Raises AdapterConflictError if the name is taken or there is no room, and the errors of `read`.
        """
        with self._lock:
            if name in self.loaded:
                raise AdapterConflictError(
                    f"An adapter {name!r} is loaded already; unload it first, or choose another name.",
                    param="lora_name",
                )
            num_held = len(self._held)
            if num_held >= self.max_loras:
                num_leaving = num_held - len(self.loaded)
                leaving = f", {num_leaving} of them unloaded but still used by requests" if num_leaving else ""
                raise AdapterConflictError(
                    f"{num_held} adapters are held{leaving}, and --max-loras is {self.max_loras}; unload one first."
                )
            assert self._read is not None, "where none may be held there is none to read"
            weights = self._read(name, path)
            adapter = Adapter(name, weights.digest)
            entry = LoadedAdapter(adapter, path, int(time.time()))
            self._held.add(weights)
            self._weights[name] = weights
            self.loaded = MappingProxyType({**self.loaded, name: entry})
            return entry

    def unload(self, name: str) -> None:
        """Forget an adapter; running requests keep it. Raises AdapterNotFoundError."""
        with self._lock:
            if name not in self.loaded:
                raise AdapterNotFoundError(f"No adapter {name!r} is loaded.", param="lora_name")
            self.loaded = {other: entry for other, entry in self.loaded.items() if other != name}
            del self._weights[name]
