"""What requests name and an engine keeps: grammars, adapters and images. Any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

from engine.adapters import Adapters
from engine.core.errors import InvalidRequestError
from engine.core.step import Name
from engine.core.types import Request
from engine.text.grammars.compiler import GrammarCompiler

if TYPE_CHECKING:
    from engine.images import Image


def refuse_image(_: Image) -> None:
    """Raise InvalidRequestError, for an engine whose model takes no images."""
    raise InvalidRequestError("This server's model takes no images; send text alone.", param="messages")


class EngineResources:
    """Resolves names before a request is accepted; the runner finds by them what some request holds."""

    def __init__(self, adapters: Adapters | None = None, check_image: Callable[[Image], None] = refuse_image) -> None:
        """`check_image` raises InvalidRequestError for an image that the model cannot take."""
        self._check_image = check_image
        self.adapters, self.grammars = adapters or Adapters(), GrammarCompiler()
        # An adapter that is loaded again, and a grammar that is built again, has the name of the one before.
        self._held: dict[Name, tuple[ref[Any], ...]] = {}
        self._lock = threading.Lock()  # of those who hold; `_held` is replaced as a whole

    def hold(self, request: Request) -> tuple[object, ...]:
        """Return what keeps all that a request names until it ends.

        Raises AdapterNotFoundError or OverloadedError; InvalidRequestError for an image.
        """
        params, found = request.params, dict[Name, Any]()
        for image in request.images:
            self._check_image(image)
            found[image.digest] = image
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
        """Return the weights of an adapter, a grammar or an image that a request holds."""
        return next(found for each in self._held[name] if (found := each()) is not None)

    def has(self, name: Name) -> bool:
        """Return whether a request holds that."""
        return any(each() is not None for each in self._held.get(name, ()))
