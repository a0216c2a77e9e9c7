"""Images of offline prompts: read and prepared on the calling thread, the bytes decoded in a process of their own."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from engine.system.regular_file import read_bytes
from engine.text.fields.chat import ImageSource
from engine.text.images.decoder import ImageDecoder, refused
from engine.text.images.preprocessor import ImagePreprocessor, PreparedImage
from engine.text.images.sources import MAX_BYTES, LocalSources
from engine.text.tokenizer import TextTokenizer


class Pictures:
    """Makes what the images of prompts are to the engine."""

    def __init__(self, preprocessor: ImagePreprocessor, folder: str | None) -> None:
        """`folder` is that of allowed_local_media_path, for file:/// in conversations."""
        self.preprocessor, self._decoder = preprocessor, ImageDecoder()
        self._local = LocalSources(None if folder is None else Path(folder))

    @classmethod
    def of(cls, model: Path, tokenizer: TextTokenizer, folder: str | None, **how: Any) -> Pictures:
        """Return those of a model's folder, as ImagePreprocessor.of. Raises ModelLoadError or ConfigError."""
        return cls(ImagePreprocessor.of(model, tokenizer, **how), folder)

    def of_chat(self, sources: Sequence[ImageSource]) -> list[PreparedImage]:
        """Return the images of a conversation. Raises InvalidRequestError."""
        self.preprocessor.check_count(len(sources), "messages")
        return [self._prepare(self._local.read(each.url, "messages"), each.longest, "messages") for each in sources]

    def of_prompt(self, given: Sequence[object]) -> list[PreparedImage]:
        """Return the images of `multi_modal_data`: Pillow's, or paths. Raises InvalidRequestError."""
        self.preprocessor.check_count(len(given), "prompts")
        return [self._prepare(file_of(each, "prompts"), None, "prompts") for each in given]

    def close(self) -> None:
        """End the decoder's process. Idempotent."""
        self._decoder.close()

    def _prepare(self, file: bytes, longest: int | None, param: str) -> PreparedImage:
        return self.preprocessor.prepare(self._decoder.decode(file, param, longest=longest), param)


def file_of(image: Any, param: str) -> bytes:
    """Return the bytes of an image's file."""
    if isinstance(image, str | Path):
        try:
            return read_bytes(Path(image), MAX_BYTES)
        except OSError as error:
            raise refused(f"{str(image)!r} cannot be read: {error.strerror}", param) from None
    if not hasattr(image, "save"):
        raise refused(f"it is a {type(image).__name__}; give one of Pillow's images, or a path", param)
    file = BytesIO()
    image.convert("RGBA" if "A" in image.getbands() else "RGB").save(file, "PNG", compress_level=1)
    return file.getvalue()
