"""Grammars of offline requests: made as the daemon makes them, while the caller waits, and kept. The calling threads, in turns."""

from __future__ import annotations

import threading
from dataclasses import replace

from engine.core.grammar import Grammar
from engine.core.types import SamplingParams
from engine.text.detokenizer import Tokenizer
from engine.text.grammars.kept import KeptGrammars
from engine.text.grammars.maker import GrammarMaker, about
from engine.text.grammars.spec import GrammarSpec
from engine.text.grammars.trials import GrammarError


class Grammars:
    """constrain parameters; close at the end."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._maker = GrammarMaker(tokenizer, vocab_size, lambda _: None)
        self._kept = KeptGrammars()
        self._turn = threading.Lock()

    def constrain(self, asked: tuple[GrammarSpec, str] | None, params: SamplingParams) -> SamplingParams:
        """The parameters with the grammar that a field asks for. Raises InvalidRequestError if it cannot be."""
        if asked is None or not params.max_tokens:
            return params
        with self._turn:
            return replace(params, grammar=self._grammar(*asked))

    def close(self) -> None:
        """End the threads and processes that make grammars."""
        self._maker.close()

    def _grammar(self, spec: GrammarSpec, param: str) -> Grammar:
        self._maker.check(spec, param)
        try:
            return self._kept.get(spec) or self._make(spec)
        except GrammarError as error:
            raise about(error, param) from error

    def _make(self, spec: GrammarSpec) -> Grammar:
        self._kept.check_room()
        try:
            made = self._maker.submit(spec).result()
        except GrammarError as error:
            self._kept.put(spec, error)
            raise
        self._kept.put(spec, made)
        return made
