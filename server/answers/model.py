"""The served model: its names, the prompts of requests, and their grammars.

Event loop; long texts are rendered and encoded on other threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fastapi import Request as HttpRequest

from engine.core.errors import AdapterNotFoundError, read_each
from engine.core.types import Adapter, GrammarKey
from engine.handle import CompileGrammar, EngineHandle, UseVocabulary
from engine.text.chat.history import Owner
from engine.text.fields.chat import Conversation
from engine.text.fields.sampling import Constraint
from engine.text.requests.chat_preprocessor import ChatPreprocessor, PreparedChat
from engine.text.requests.vector_reader import VectorReader
from server.answers.body import ChatBody, EngineBody
from server.http.bodies import IS_LARGE
from server.http.middleware import RequestState
from server.http.threads import Result, run_slowly
from server.protocol.errors import STATE
from server.settings.app_config import AppConfig

if TYPE_CHECKING:
    from engine.text.images.preprocessor import PreparedImage
    from server.answers.images import ImageReader


MAX_INLINE_CHARS = 2048  # about 1 ms; more is encoded on a worker thread

_RENDERING = ThreadPoolExecutor(1, "quire-rendering")  # waits for the process that renders chat templates


async def aside(function: Callable[[], Result], num_chars: int = 0) -> Result:
    """Run work on the body, or on so many characters; on another thread if that takes long."""
    if IS_LARGE.get():
        return await run_slowly(function)
    return function() if num_chars <= MAX_INLINE_CHARS else await asyncio.to_thread(function)


class Named(NamedTuple):
    """What a request names as its model."""

    name: str  # to report
    adapter: Adapter | None  # None is the model itself

    def history_owner(self, http: HttpRequest, body: EngineBody) -> Owner | None:
        """Return whose answers a request may find again, and leaves; None of a line of a batch."""
        state: RequestState = http.scope[STATE]
        if state.begun_s is None:
            return None
        adapter = "" if self.adapter is None else self.adapter.name
        return Owner(f"{state.owner}\0{body.tenant}", body.cache_salt, adapter)


class ServedModel:
    """Finds models by name, and makes prompts and grammars of what requests ask."""

    def __init__(
        self,
        engine: EngineHandle,
        preprocessor: ChatPreprocessor,
        config: AppConfig,
        images: ImageReader | None = None,
    ) -> None:
        """No `images`: the model takes text alone."""
        self._engine, self._config, self.images = engine, config, images
        self.preprocessor = preprocessor
        self.limits = preprocessor.limits
        self.tokenizer = self.limits.tokenizer
        self.reader = VectorReader(self.limits)
        self.reader.pooling(config.pooling)  # or raises
        self.names = config.served_model_names
        self._prepared: asyncio.Future[None] | None = None  # once the engine has the vocabulary

    def find(self, name: str | None) -> Named:
        """Return the model, or the adapter of a name. Raises AdapterNotFoundError for one that has just been unloaded."""
        if name is None or name in self.names:
            return Named(name or self.names[0], None)
        loaded = self._engine.adapters.get(name)
        if loaded is None and not self._config.is_alias(name):  # the model would answer in its name
            raise AdapterNotFoundError(f"No adapter {name!r} is loaded.", param="model")
        return Named(name, None if loaded is None else loaded.adapter)

    # -- prompts -----------------------------------------------------------------------------------------------------

    async def prepare(self, http: HttpRequest, body: ChatBody, named: Named) -> PreparedChat:
        """Return a conversation as the engine takes it, once that has its grammar. Raises ClientError."""
        text, images, num_chars = await self._text(http, body)
        chat = await aside(
            lambda: self.preprocessor.prepare(body, text, named.history_owner(http, body), images), num_chars
        )
        if chat.constraint is not None:
            await self.compile(chat.constraint)
        return chat

    async def prompt_ids(self, http: HttpRequest, body: ChatBody, named: Named) -> list[int]:
        """Return the tokens of a conversation's prompt, as `prepare`. Raises ClientError."""
        text, images, num_chars = await self._text(http, body)
        return await aside(
            lambda: self.preprocessor.encode(body, text, named.history_owner(http, body), images), num_chars
        )

    async def conversation_ids(self, http: HttpRequest, body: Conversation, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a conversation, as its text alone has them. Raises ClientError."""
        text, images, num_chars = await self._text(http, body)
        encode = partial(self.preprocessor.encode_text, text, images, add_special_tokens=add_special_tokens)
        return await aside(encode, num_chars)

    async def _text(self, http: HttpRequest, body: Conversation) -> tuple[str, Sequence[PreparedImage], int]:
        """Return a conversation's prompt, its images, and how many characters it has with them.

        A model that takes no images has none, which `render` reports. Raises ClientError or OverloadedError.
        """
        images = () if self.images is None else await self.images.read(http, body)
        text = await self.render(body)
        return text, images, len(text) + sum([len(image.text) for image in images])

    async def render(self, body: Conversation) -> str:
        """Return a conversation's prompt; threads prepare a long one, and wait for the process that renders it.

        Raises InvalidRequestError.
        """
        is_long = body.is_long or IS_LARGE.get()
        begun = await run_slowly(lambda: self.preprocessor.begin(body)) if is_long else self.preprocessor.begin(body)
        return begun if isinstance(begun, str) else await asyncio.get_running_loop().run_in_executor(_RENDERING, begun)

    async def encode(self, texts: Sequence[str], param: str, *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text. Raises ContextLengthError."""
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        read_each(lambda text: self.limits.check_length(len(text), param), texts)
        return await aside(lambda: list(map(encode, texts)), sum(map(len, texts)))

    # -- grammars ----------------------------------------------------------------------------------------------------

    async def compile(self, constraint: Constraint) -> GrammarKey:
        """Return what names the grammar in a request. Raises InvalidRequestError or OverloadedError."""
        await self.prepare_grammars(warms_up=False)
        await asyncio.wrap_future(self._engine.control(CompileGrammar(*constraint)))
        return GrammarKey(constraint.spec.digest)

    async def prepare_grammars(self, *, warms_up: bool) -> None:
        """Give the engine the vocabulary, once."""
        if self._prepared is None:
            self._prepared = asyncio.ensure_future(self._give_vocabulary(warms_up=warms_up))
        await asyncio.shield(self._prepared)

    async def _give_vocabulary(self, *, warms_up: bool) -> None:
        source = await asyncio.to_thread(self.tokenizer.vocabulary, self._engine.facts.vocab_size)
        await asyncio.wrap_future(self._engine.control(UseVocabulary(source, warms_up)))
