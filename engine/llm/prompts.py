"""Reads the offline API's prompts: a text, token ids, or vLLM's dicts of them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import NotRequired, TypedDict

from engine.core.errors import InvalidRequestError
from engine.core.spans import Span
from engine.system.regular_file import read_bytes
from engine.text.fields.chat import ImageSource


class TextPrompt(TypedDict):
    """A text as a prompt. `cache_salt`: prompts with different salts share no cached K/V.

    `multi_modal_data` is {"image": ...}: one of Pillow's images, a path, or a list of these, for the marks in the text.
    """

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """Token ids as a prompt, and perhaps the text they were made of, which is repeated in the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")


class ReadPrompt(NamedTuple):
    """A prompt in its parts; with ids, the text is not encoded."""

    text: str | None
    ids: list[int] | None
    cache_salt: str = ""
    images: Sequence[ImageSource] = ()
    spans: tuple[Span, ...] = ()  # where they stand, once there are ids


def listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts as a list; a single prompt may come without one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts is of type {type(prompts).__name__}; give a text, token ids, or a list of these.", param="prompts"
        )
    is_ids = bool(prompts) and isinstance(prompts[0], int)
    return [prompts] if is_ids else prompts  # type: ignore[list-item,return-value]  # the first item decides


def read_prompt(prompt: Prompt) -> ReadPrompt:
    """Return the parts of a prompt. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        return ReadPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return ReadPrompt(None, _token_ids(prompt))
    given = {name: value for name, value in prompt.items() if value is not None}
    if unknown := given.keys() - set(_KEYS):
        raise InvalidRequestError(
            f"A prompt has the key {min(unknown, key=str)!r}, which is not read; give {', '.join(_KEYS)}.",
            param="prompts",
        )
    text, ids, salt = given.get("prompt"), given.get("prompt_token_ids"), given.get("cache_salt", "")
    if not isinstance(salt, str) or not (text is None or isinstance(text, str)) or (text is None and ids is None):
        raise InvalidRequestError(
            "A prompt that is a dict needs prompt, a text, or prompt_token_ids, a list of ids.", param="prompts"
        )
    images = images_of(given.get("multi_modal_data", {}))
    if images and ids is not None:
        raise InvalidRequestError("A prompt with images must be a text; leave prompt_token_ids out.", param="prompts")
    return ReadPrompt(text, None if ids is None else _token_ids(ids), salt, images)


def images_of(data: object) -> list[ImageSource]:
    """Return the images of `multi_modal_data`. Raises InvalidRequestError."""
    if not isinstance(data, Mapping) or data.keys() - {"image"}:
        raise InvalidRequestError(
            'multi_modal_data must be {"image": ...}, with one of Pillow\'s images, a path, or a list of these.',
            param="prompts",
        )
    given = data.get("image", [])
    return [ImageSource(address_of(each)) for each in (given if isinstance(given, list | tuple) else [given])]


def with_addresses(message: Any) -> Any:
    """Return a message in which Pillow's images, vLLM's parts `image_pil`, are addresses that hold them."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = [
        {"type": "image_url", "image_url": {"url": address_of(part.get("image_pil"))}}
        if isinstance(part, Mapping) and part.get("type") == "image_pil"
        else part
        for part in content
    ]
    return {**message, "content": parts}


def address_of(image: Any) -> str:
    """Return an address that holds one of Pillow's images, or the file of a path. Raises InvalidRequestError."""
    file = BytesIO()
    try:
        if isinstance(image, str | Path):
            file.write(read_bytes(Path(image)))
        else:
            image.convert("RGBA" if "A" in image.getbands() else "RGB").save(file, "PNG", compress_level=1)
    except OSError as error:
        raise InvalidRequestError(f"{str(image)!r} cannot be read: {error.strerror}.", param="prompts") from None
    except AttributeError:
        raise InvalidRequestError(
            f"An image is of type {type(image).__name__}; give one of Pillow's images, or a path.", param="prompts"
        ) from None
    return f"data:;base64,{base64.b64encode(file.getvalue()).decode()}"


def _token_ids(prompt: object) -> list[int]:
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        ids = list(prompt)
        if all(type(token_id) is int for token_id in ids):
            return ids
    raise InvalidRequestError("A prompt must be a text or a list of token ids.", param="prompts")
