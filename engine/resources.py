"""What requests name and an engine keeps: grammars and adapters. Any thread."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from engine.adapters import Adapters
from engine.core.types import Adapter, GrammarKey, SamplingParams
from engine.text.grammars.compiler import GrammarCompiler


class EngineResources:
    """Resolves names before a request is accepted; the runner finds by them what some request holds."""

    def __init__(self, adapters: Adapters | None = None) -> None:
        self.adapters, self.grammars = adapters or Adapters(), GrammarCompiler()
        self._held: WeakValueDictionary[Adapter | GrammarKey, Any] = WeakValueDictionary()

    def hold(self, params: SamplingParams) -> tuple[object, ...]:
        """Return what keeps all that a request names until it ends. Raises AdapterNotFoundError or OverloadedError."""
        held: dict[Adapter | GrammarKey, Any] = {}
        if params.adapter is not None:
            held[params.adapter] = self.adapters.hold(params.adapter)
        if params.grammar is not None:
            held[params.grammar] = self.grammars.hold(params.grammar)
        self._held.update(held)
        return tuple(held.values())

    def find(self, name: Adapter | GrammarKey) -> Any:
        """Return the weights of an adapter, or a grammar, that a request holds."""
        return self._held[name]
