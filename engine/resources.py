"""What requests name and an engine keeps: grammars and adapters. Any thread."""

from __future__ import annotations

import threading
from typing import Any
from weakref import ref

from engine.adapters import Adapters
from engine.core.types import Adapter, GrammarKey, SamplingParams
from engine.text.grammars.compiler import GrammarCompiler

Name = Adapter | GrammarKey


class EngineResources:
    """Resolves names before a request is accepted; the runner finds by them what some request holds."""

    def __init__(self, adapters: Adapters | None = None) -> None:
        self.adapters, self.grammars = adapters or Adapters(), GrammarCompiler()
        # An adapter that is loaded again, and a grammar that is built again, has the name of the one before.
        self._held: dict[Name, tuple[ref[Any], ...]] = {}
        self._lock = threading.Lock()  # of those who hold; `_held` is replaced as a whole

    def hold(self, params: SamplingParams) -> tuple[object, ...]:
        """Return what keeps all that a request names until it ends. Raises AdapterNotFoundError or OverloadedError."""
        found: dict[Name, Any] = {}
        if params.adapter is not None:
            found[params.adapter] = self.adapters.hold(params.adapter)
        if params.grammar is not None:
            found[params.grammar] = self.grammars.hold(params.grammar)
        if found:
            with self._lock:
                held = {name: tuple(each for each in refs if each() is not None) for name, refs in self._held.items()}
                held |= {name: tuple(dict.fromkeys((ref(each), *held.get(name, ())))) for name, each in found.items()}
                self._held = {name: refs for name, refs in held.items() if refs}
        return tuple(found.values())

    def find(self, name: Name) -> Any:
        """Return the weights of an adapter, or a grammar, that a request holds."""
        return next(found for each in self._held[name] if (found := each()) is not None)
