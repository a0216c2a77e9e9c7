"""Has the engine compile grammars, which is given the vocabulary before the first one. Event loop."""

from __future__ import annotations

import asyncio

from engine.core.types import GrammarKey
from engine.handle import CompileGrammar, EngineHandle, UseVocabulary
from engine.text.fields.sampling import Constraint
from engine.text.tokenizer import TextTokenizer


class Grammars:
    """`compile` a constraint before its request is submitted."""

    def __init__(self, engine: EngineHandle, tokenizer: TextTokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._prepared: asyncio.Future[None] | None = None

    async def compile(self, constraint: Constraint) -> GrammarKey:
        """Return what names the grammar in a request. Raises InvalidRequestError or OverloadedError."""
        await self.prepare(warms_up=False)
        await asyncio.wrap_future(self._engine.control(CompileGrammar(*constraint)))
        return GrammarKey(constraint.spec.digest)

    async def prepare(self, *, warms_up: bool) -> None:
        """Give the engine the vocabulary, once."""
        if self._prepared is None:
            self._prepared = asyncio.ensure_future(self._give(warms_up=warms_up))
        await asyncio.shield(self._prepared)

    async def _give(self, *, warms_up: bool) -> None:
        source = await asyncio.to_thread(self._tokenizer.vocabulary, self._engine.facts.vocab_size)
        await asyncio.wrap_future(self._engine.control(UseVocabulary(source, warms_up)))
