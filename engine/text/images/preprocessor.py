"""Makes images ready for the model's vision tower, and puts what stands for them into prompts.

The image processor is transformers', on Pillow and numpy; the places of an image's vectors are found here. Made once at the
start of a model with a tower. Any thread, one image at a time.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ConfigError, InvalidRequestError, ModelLoadError
from engine.core.shown import shorten
from engine.core.spans import Span
from engine.files.mmproj import read_mmproj
from engine.images import Image, most_images
from engine.system.calls import TRANSFORMERS, foreign_code
from engine.system.regular_file import expanded
from engine.text.generation_config import read_json_beside
from engine.text.images.decoder import refused
from engine.text.images.families import COUNTS, FAMILIES, Family, ImageTokens, grid_of
from engine.text.images.lfm2_vl import Lfm2VlImageProcessor
from engine.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

# Splits a mark that a client wrote, so that it is no image's. Letters alone, which no template changes.
_SPLIT = f"quiresplits{secrets.token_hex(16)}"


class PreparedImage(NamedTuple):
    """An image for the engine, and what the prompt has in its place."""

    image: Image
    text: str


class ImagePreprocessor:
    """Prepares images of one model, and encodes prompts that have some."""

    def __init__(
        self,
        family: Family,
        tokens: ImageTokens,
        processor: Any,
        tokenizer: TextTokenizer,
        options: Mapping[str, Any],
        limits: Mapping[str, Any],
    ) -> None:
        """`processor` is transformers'; `options` are of --mm-processor-kwargs, `limits` of --limit-mm-per-prompt."""
        self._family, self._tokens, self._processor, self._tokenizer = family, tokens, processor, tokenizer
        self._most = most_images(limits)
        self._token_id = tokenizer.special_tokens[tokens.token]
        self._mark = tokens.spell(family.mark) if family.mark else tokens.token
        self._own = {name: options.get(name, value) for name, value in family.options(tokens).items()}
        self._options = json.dumps(options, sort_keys=True, default=str).encode()

    @classmethod
    def of(
        cls,
        model: Path,
        tokenizer: TextTokenizer,
        options: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        mmproj: str | None = None,
    ) -> ImagePreprocessor | None:
        """Return the one of a model; None, and a warning, if files of it are missing or of another library.

        A model is a folder, or a GGUF file with `mmproj` for its vision half.
        Raises ConfigError for options or limits that cannot be kept.
        """
        settings = options or {}

        def refuse(error: Exception) -> ModelLoadError:
            return ModelLoadError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

        try:
            with TRANSFORMERS, foreign_code(refuse, (ConfigError,)):
                tokens = _read_tokens(model, tokenizer, settings, mmproj)
                processor = _load_processor(model if mmproj is None else None, tokens.processor, settings)
                family = FAMILIES[tokens.config["model_type"]]
                made = cls(family, tokens, processor, tokenizer, settings, limits or {})
                made.prepare(np.zeros((64, 64, 3), np.uint8), "the start")  # so that what a file lacks is known now
        except ModelLoadError as error:
            logger.warning("text alone is served: its image processor cannot be loaded (%s)", error)
            return None
        return made

    # -- images --------------------------------------------------------------------------------------------------------

    def check_count(self, count: int, param: str) -> None:
        """Raise InvalidRequestError for more images than a prompt may have."""
        if count > self._most:
            raise InvalidRequestError(
                f"{param} has {count} images, and at most {self._most} are taken in a prompt (--limit-mm-per-prompt).",
                param=param,
            )

    def prepare(
        self,
        pixels: NDArray[np.uint8],
        param: str,
        *,
        root: bytes = b"",
        num: int = 1,
        wishes: Mapping[str, Any] = MappingProxyType({}),
    ) -> PreparedImage:
        """Return an image of rows of RGB, one of `num` of a prompt; `root` is of those who share what is cached of it.

        `wishes` are the request's mm_processor_kwargs. Raises InvalidRequestError for some, and for a size that the
        processor refuses.
        """
        options = {**self._own, **(self._sizes(wishes) if wishes else {})}
        height, width = pixels.shape[:2]
        is_coarse = num > 1 and self._family.is_coarse_in_company
        why = f"the model's image processor refuses {width} x {height} pixels"
        with foreign_code(lambda _: refused(why, param), (MemoryError,)):
            made = self._processor(
                images=[[pixels, pixels[:1, :1]]] if is_coarse else [pixels],  # one pixel stands for all others
                input_data_format="channels_last",
                return_tensors="np",
                **options,
            )
        if is_coarse:
            made = {name: array[:1] for name, array in made.items()}
        text, digest = self._family.spelled(self._tokens, made), blake2b(root + self._options, digest_size=32)
        arrays = {name: np.ascontiguousarray(made[name]) for name in sorted(made.keys() - COUNTS)}
        for name, array in arrays.items():
            digest.update(f"\0{name} {array.dtype} {array.shape}\0".encode())
            digest.update(array.data)
        grid = grid_of(self._tokens, arrays)
        return PreparedImage(Image(digest.digest(), arrays, text.count(self._tokens.token), grid), text)

    def _sizes(self, wishes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an option of the processor: the numbers of pixels that a request wishes, up to the server's own.

        Raises InvalidRequestError.
        """
        knows = "image_grid_thw" in getattr(self._processor, "model_input_names", ())  # its sizes are numbers of pixels
        names = ("min_pixels", "max_pixels") if knows else ()
        wrong = [name for name, value in wishes.items() if name not in names or type(value) is not int or value < 1]
        if wrong:
            raise InvalidRequestError(
                f"mm_processor_kwargs has {shorten(wrong[0])!r}: {shorten(repr(wishes[wrong[0]]))}; that of a request may have "
                f"{' and '.join(names) or 'nothing'} with this model, as whole numbers from 1 on; all else is the "
                "server's (--mm-processor-kwargs).",
                param="mm_processor_kwargs",
            )
        size = self._processor.size
        most = min(wishes.get("max_pixels", size.longest_edge), size.longest_edge)
        return {
            "size": {"shortest_edge": min(wishes.get("min_pixels", size.shortest_edge), most), "longest_edge": most}
        }

    # -- prompts -------------------------------------------------------------------------------------------------------

    def hide_marks(self, value: Any) -> Any:
        """Return a value of JSON in which what a client wrote is no image's mark."""
        try:
            text = hidden = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return value  # the template refuses it
        for mark in (self._mark, self._tokens.token):
            hidden = _split(hidden, mark)
        return value if hidden == text else json.loads(hidden)

    def count(self, text: str) -> int:
        """Return the number of images that a rendered prompt has places for."""
        return text.count(self._mark)

    def encoder(
        self, text: str, images: Sequence[PreparedImage], *, add_special_tokens: bool = False
    ) -> Callable[[str], list[int]] | None:
        """Return what encodes the parts of a rendered prompt, in order, with images in their places; None if it has none.

        Raises InvalidRequestError if it has not as many places as there are images.
        """
        if (places := self.count(text)) != len(images):
            raise InvalidRequestError(
                f"The prompt has places for {places} of {len(images)} images; in a conversation, send them in messages of "
                "the user.",
                param="messages",
            )
        texts = iter([each.text for each in images])

        def encode(part: str) -> list[int]:
            ids: list[int] = []
            if self._mark != self._tokens.token:  # which the template may have made of two texts of a client
                part = _split(part, self._tokens.token)
            for number, piece in enumerate(part.split(_SPLIT)):
                first, *others = piece.split(self._mark)
                whole = first + "".join([next(texts) + other for other in others])
                ids += self._tokenizer.encode(whole, add_special_tokens=add_special_tokens and not number)
            return ids

        return encode if images or _SPLIT in text else None

    def spans(self, ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[Span, ...]:
        """Return where the images of an encoded prompt stand, each from its first token to its last."""
        places = iter([place for place, token_id in enumerate(ids) if token_id == self._token_id])
        is_atomic, spans = self._tokens.is_atomic, []
        for image, _ in images:
            own = list(islice(places, image.num_tokens))
            spans.append(Span(own[0], own[-1] + 1 - own[0], image.digest, is_atomic))
        assert next(places, None) is None, "every other one was hidden"
        return tuple(spans)


def _split(text: str, mark: str) -> str:
    """Return a text in which a mark is split."""
    return text.replace(mark, mark[:1] + _SPLIT + mark[1:])


def _read_tokens(model: Path, tokenizer: TextTokenizer, options: Mapping[str, Any], mmproj: str | None) -> ImageTokens:
    """Return the settings of a checkpoint that its family reads; `options` come before those of its files."""
    names: dict[Any, str] = {token_id: token for token, token_id in tokenizer.special_tokens.items()}
    if mmproj is None:
        config, old, new = (
            read_json_beside(model / f"{name}config.json") for name in ("", "preprocessor_", "processor_")
        )
        own = {**old, **new.get("image_processor", {}), **new}
    else:
        half = read_mmproj(expanded(mmproj), model)
        config, own = {**half.config, **half.tokens}, half.processor
        names = {token: token for token in tokenizer.special_tokens}
    token = names[config["image_token_id" if "image_token_id" in config else "image_token_index"]]
    return ImageTokens(config, {**own, **options}, token, lambda name: names[config[name]])


def _load_processor(folder: Path | None, own: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return the image processor of some settings, options among them, of which a folder has the others unless it is None.

    Raises ConfigError for an option that cannot be kept.
    """
    import transformers  # seconds to import; only models with a tower need it

    # Gemma 4's and InternVL's forget the format between two steps, and guess it right; of widths that could be channels they warn.
    logging.getLogger("transformers.image_utils").setLevel(logging.ERROR)
    kind, unused = own.get("image_processor_type", ""), options
    if kind.startswith("Lfm2Vl"):
        made: Any = Lfm2VlImageProcessor(own)
    elif kind.startswith("Gemma4Unified"):  # whose merged patches are larger ones; its class needs another library
        side = own.get("patch_size", 16) * own.get("pooling_kernel_size", 3)
        made = transformers.Gemma4ImageProcessorPil.from_dict({**own, "patch_size": side, "pooling_kernel_size": 1})
    elif folder is None:
        made = getattr(transformers, f"{kind}Pil").from_dict(own)
    else:
        how = {"backend": "pil", "local_files_only": True, "trust_remote_code": False, "return_unused_kwargs": True}
        made, unused = transformers.AutoImageProcessor.from_pretrained(str(folder), **how, **options)
    known = made.valid_kwargs.__annotations__
    if beyond := options.keys() & unused.keys() - known.keys():
        raise ConfigError(
            f"--mm-processor-kwargs has {min(beyond)!r}, which the model's image processor does not know; it knows "
            f"{', '.join(sorted(known))}."
        )
    if getattr(made, "do_pan_and_scan", None):  # Gemma 3's, each crop of which is an image among text
        raise ConfigError(
            "do_pan_and_scan cuts images into crops, which are not served; set it to false (--mm-processor-kwargs)."
        )
    return made
