"""What requests name and an engine keeps: grammars and adapters. Any thread."""

from __future__ import annotations

from typing import Any

from engine.adapters import Adapters
from engine.core.types import Adapter, Grammar, GrammarKey, SamplingParams
from engine.text.grammars.compiler import GrammarCompiler


class EngineResources:
    """Resolves names before a request is accepted; the runner finds by them what some request holds."""

    def __init__(self, adapters: Adapters | None = None) -> None:
        self.adapters, self.grammars = adapters or Adapters(), GrammarCompiler()

    def hold(self, params: SamplingParams) -> tuple[object, ...]:
        """Return what keeps all that a request names until it ends. Raises AdapterNotFoundError or OverloadedError."""
        held: tuple[object, ...] = ()
        if params.adapter is not None:
            held = (self.adapters.hold(params.adapter),)
        if params.grammar is not None:
            held = (*held, self.grammars.hold(params.grammar))
        return held

    def adapter(self, adapter: Adapter) -> Any:
        """Return the weights of an adapter."""
        return self.adapters.weights(adapter)

    def grammar(self, key: GrammarKey) -> Grammar:
        """Return a grammar."""
        return self.grammars.grammar(key)
