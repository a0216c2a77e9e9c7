"""Images of offline prompts: read and prepared on the calling thread, the bytes decoded in a process of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.core.kv.prefix_cache import chain_root
from engine.text.fields.chat import ImageSource
from engine.text.images.decoder import ImageDecoder
from engine.text.images.preprocessor import ImagePreprocessor, PreparedImage
from engine.text.images.sources import LocalSources


class Pictures:
    """Makes what the images of prompts are to the engine."""

    def __init__(self, preprocessor: ImagePreprocessor, folder: str | None) -> None:
        """`folder` is that of allowed_local_media_path, for file:/// in conversations."""
        self.preprocessor, self._decoder = preprocessor, ImageDecoder()
        self._local = LocalSources(None if folder is None else Path(folder))

    def read(self, sources: Sequence[ImageSource], param: str, cache_salt: str = "") -> list[PreparedImage]:
        """Return the images of a prompt. Raises InvalidRequestError."""
        self.preprocessor.check_count(len(sources), param)
        decode, read = self._decoder.decode, self._local.read
        pixels = (decode(read(each.url, param), param, longest=each.longest) for each in sources)
        root, num = chain_root(cache_salt), len(sources)
        return [self.preprocessor.prepare(each, param, root=root, num=num) for each in pixels]

    def close(self) -> None:
        """End the decoder's process. Idempotent."""
        self._decoder.close()
