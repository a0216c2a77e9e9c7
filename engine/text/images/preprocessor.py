"""Makes images ready for the model's vision tower, and puts what stands for them into prompts.

The image processor is transformers', on Pillow and numpy; the places of an image's vectors are found here. Made once at the
start of a model with a tower. Any thread, one image at a time.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ConfigError, InvalidRequestError, ModelLoadError
from engine.core.spans import Span
from engine.images import Image
from engine.system.calls import TRANSFORMERS, foreign_code
from engine.system.regular_file import read_object
from engine.text.generation_config import read_json_beside
from engine.text.images.decoder import refused
from engine.text.images.families import COUNTS, FAMILIES, Family, ImageTokens
from engine.text.tokenizer import TextTokenizer

MAX_BYTES = 1 << 20  # of a JSON file
MAX_IMAGES = 32  # in a prompt, unless --limit-mm-per-prompt says otherwise
# Splits a mark that a client wrote, so that it is no image's. Letters alone, which no template changes.
_SPLIT = f"quiresplits{secrets.token_hex(16)}"


class PreparedImage(NamedTuple):
    """An image for the engine, and what the prompt has in its place."""

    image: Image
    text: str


class ImagePreprocessor:
    """Prepares images of one model, and encodes prompts that have some."""

    def __init__(
        self, family: Family, processor: Any, tokenizer: TextTokenizer, options: Mapping[str, Any], most: int
    ) -> None:
        """`processor` is transformers', `options` are of --mm-processor-kwargs, `most` images are taken in a prompt."""
        self._family, self._processor, self._tokenizer, self._most = family, processor, tokenizer, most
        self._token_id = tokenizer.special_tokens[family.token]
        self._marks = {mark: mark[:1] + _SPLIT + mark[1:] for mark in (family.mark, family.token)}
        self._options = json.dumps(options, sort_keys=True, default=str).encode()

    @classmethod
    def of(
        cls,
        folder: Path,
        tokenizer: TextTokenizer,
        options: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> ImagePreprocessor:
        """Return the one of a model's folder. Raises ModelLoadError, or ConfigError for options that it does not have."""
        config = read_object(folder / "config.json", MAX_BYTES, ModelLoadError, f"{folder} has no config.json.")
        with TRANSFORMERS, foreign_code(lambda error: _unreadable(folder, error), (ConfigError,)):
            names = {token_id: token for token, token_id in tokenizer.special_tokens.items()}
            own = {**read_json_beside(folder / "preprocessor_config.json"), **_processor_config(folder)}
            token = names[config["image_token_id" if "image_token_id" in config else "image_token_index"]]
            family = FAMILIES[config["model_type"]](
                ImageTokens(config=config, processor=own, token=token, spell=lambda name: names[config[name]])
            )
            processor = _load_processor(folder, options or {})
        return cls(family, processor, tokenizer, options or {}, most_images(limits))

    # -- images --------------------------------------------------------------------------------------------------------

    def check_count(self, count: int, param: str) -> None:
        """Raise InvalidRequestError for more images than a prompt may have."""
        if count > self._most:
            raise InvalidRequestError(
                f"{param} has {count} images, and at most {self._most} are taken in a prompt (--limit-mm-per-prompt).",
                param=param,
            )

    def prepare(self, pixels: NDArray[np.uint8], param: str) -> PreparedImage:
        """Return an image of rows of RGB. Raises InvalidRequestError for a size that the processor refuses."""
        height, width = pixels.shape[:2]
        why = f"the model's image processor refuses {width} x {height} pixels"
        with foreign_code(lambda _: refused(why, param), (MemoryError,)):
            made = self._processor(
                images=[pixels], input_data_format="channels_last", return_tensors="np", **self._family.options
            )
        arrays = {name: np.ascontiguousarray(made[name]) for name in sorted(made.keys())}
        text, grid = self._family.spelled(arrays), self._family.grid(arrays)
        arrays = {name: array for name, array in arrays.items() if name not in COUNTS}
        digest = blake2b(self._options, digest_size=32)
        for name, array in arrays.items():
            digest.update(f"\0{name} {array.dtype} {array.shape}\0".encode())
            digest.update(array.data)
        return PreparedImage(Image(digest.digest(), arrays, text.count(self._family.token), grid), text)

    # -- prompts -------------------------------------------------------------------------------------------------------

    def hide_marks(self, value: Any) -> Any:
        """Return a value of JSON in which what a client wrote is no image's mark."""
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return value  # the template refuses it
        if not any(mark in text for mark in self._marks):
            return value
        for mark, split in self._marks.items():
            text = text.replace(mark, split)
        return json.loads(text)

    def show_marks(self, text: str) -> str:
        """Return a rendered prompt as it reads, with the marks that a client wrote."""
        return text.replace(_SPLIT, "")

    def has_marks(self, text: str) -> bool:
        """Return whether a rendered prompt has marks, of the template or hidden ones of a client."""
        return self._family.mark in text or _SPLIT in text

    def count(self, text: str) -> int:
        """Return the number of images that a rendered prompt has places for."""
        return text.count(self._family.mark)

    def encoder(
        self, images: Sequence[PreparedImage], *, add_special_tokens: bool = False
    ) -> Callable[[str], list[int]]:
        """Return a function that encodes the parts of a rendered prompt, in order, with the images in their places."""
        texts = iter([each.text for each in images])

        def encode(part: str) -> list[int]:
            ids: list[int] = []
            for number, piece in enumerate(part.split(_SPLIT)):
                first, *others = piece.split(self._family.mark)
                whole = [first]
                for text, other in zip(islice(texts, len(others)), others, strict=True):
                    whole += (text, other)
                ids += self._tokenizer.encode("".join(whole), add_special_tokens=add_special_tokens and not number)
            return ids

        return encode

    def spans(self, ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[Span, ...]:
        """Return where the images of an encoded prompt stand, each from its first token to its last."""
        places = iter([place for place, token_id in enumerate(ids) if token_id == self._token_id])
        spans = []
        for image, _ in images:
            own = list(islice(places, image.num_tokens))
            spans.append(Span(own[0], own[-1] + 1 - own[0], image.digest, self._family.is_atomic))
        assert next(places, None) is None, "every other one was hidden"
        return tuple(spans)


def most_images(limits: Mapping[str, Any] | None) -> int:
    """Return how many images a prompt may have, as --limit-mm-per-prompt says. Raises ConfigError."""
    found = {"image": MAX_IMAGES, **(limits or {})}["image"]
    count = found.get("count", MAX_IMAGES) if isinstance(found, Mapping) else found
    if type(count) is not int or count < 0:
        raise ConfigError(
            f'--limit-mm-per-prompt: image is {found!r}; it must be a whole number, as in {{"image": 4}}.'
        )
    return count


def _processor_config(folder: Path) -> Mapping[str, Any]:
    """Return processor_config.json, to which newer checkpoints have moved the image processor's settings."""
    values = read_json_beside(folder / "processor_config.json")
    return {**values.get("image_processor", {}), **values}


def _load_processor(folder: Path, options: Mapping[str, Any]) -> Any:
    from transformers import AutoImageProcessor  # seconds to import; only models with a tower need it

    made, unused = AutoImageProcessor.from_pretrained(
        str(folder),
        backend="pil",
        local_files_only=True,
        trust_remote_code=False,
        return_unused_kwargs=True,
        **options,
    )
    if beyond := options.keys() & unused.keys() - made.valid_kwargs.__annotations__.keys():
        raise ConfigError(
            f"--mm-processor-kwargs has {min(beyond)!r}, which the model's image processor does not know; it knows "
            f"{', '.join(sorted(made.valid_kwargs.__annotations__))}."
        )
    return made


def _unreadable(folder: Path, error: Exception) -> ModelLoadError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ModelLoadError(f"The image processor of {str(folder)!r} cannot be loaded: {reason[:300]}.")
