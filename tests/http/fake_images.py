"""Images for the fake runner: prepared as Qwen's are, without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image as Pillow

from engine.text.images.families import FAMILIES, ImageTokens
from engine.text.images.preprocessor import ImagePreprocessor
from engine.text.tokenizer import TextTokenizer

PAD = 257
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}[<|image_pad|>]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}|{% endif %}"
)


def patches(images: Any, **_: Any) -> Mapping[str, Any]:
    """What Qwen's image processor returns, of patches of 4 x 4 pixels."""
    pixels = np.asarray(images[0], np.float32)
    rows, columns = max(pixels.shape[0] // 8, 1) * 2, max(pixels.shape[1] // 8, 1) * 2
    values = np.full((rows * columns, 48), pixels.mean() / 255, np.float32)
    return {"pixel_values": values, "image_grid_thw": np.array([[1, rows, columns]])}


def preprocessor(tokenizer: TextTokenizer) -> ImagePreprocessor:
    config = {"vision_config": {"spatial_merge_size": 2}}
    tokens = ImageTokens(config, {}, "<|image_pad|>", lambda _: "")
    return ImagePreprocessor(FAMILIES["qwen3_vl"], tokens, patches, tokenizer, {}, {"image": 4})


def picture(width: int = 24, height: int = 16, shade: int = 100, kind: str = "PNG") -> bytes:
    file = BytesIO()
    Pillow.new("RGB", (width, height), (shade, shade, shade)).save(file, kind)
    return file.getvalue()
