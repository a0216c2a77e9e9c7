"""How each family spells an image in a prompt: what stands around its tokens, and how many there are. Pure.

A chat template writes a mark for an image; what `spelled` returns takes its place. Positions whose id is that of the image's
token get the vectors of the vision tower, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt, prod, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
COUNTS = frozenset(("cols", "num_crops", "num_patches", "num_soft_tokens_per_image", "rows"))  # of no use to a tower
Values = Mapping[str, Any]


class ImageTokens(NamedTuple):
    """A checkpoint's settings that its family reads."""

    config: Values  # config.json
    processor: Values  # processor_config.json and preprocessor_config.json
    token: str  # of an image
    spell: Callable[[str], str]  # the token of an id that config.json names

    @property
    def tower(self) -> Values:
        """Return the settings of the vision tower."""
        found: Values = self.config["vision_config"]
        return found

    @property
    def side(self) -> int:
        """Return the pixels of a vector's side."""
        return int(self.tower["patch_size"] * self.config.get("spatial_merge_size", 1))

    @property
    def is_atomic(self) -> bool:
        """Return whether the tokens of an image attend to each other both ways."""
        kind, text = self.config.get("model_type"), self.config.get("text_config", {})
        ways = text.get("use_bidirectional_attention", "vision" if kind == "gemma4_unified" else None)
        return kind == "gemma3" or ways == "vision"

    def count(self, name: str) -> int:
        """Return how many vectors a tile has, if a file of the processor or the config names it; 0 if none does."""
        return int(self.processor.get(name) or self.config.get(name) or 0)


class Family(NamedTuple):
    """A family: the text of an image, of which the processor made some arrays."""

    spelled: Callable[[ImageTokens, Arrays], str]
    mark: str = ""  # the key of config.json with the id that templates write; without one it is the image's token
    options: Callable[[ImageTokens], Values] = lambda _: {}  # of every call of the image processor
    is_coarse_in_company: bool = False  # each of several images of a prompt is fewer vectors than one alone


def grid_of(tokens: ImageTokens, made: Arrays) -> tuple[int, int, int] | None:
    """Return frames, rows and columns of the vectors, where positions have three axes."""
    if "image_grid_thw" not in made:
        return None
    side = tokens.tower["spatial_merge_size"]
    frames, rows, columns = map(int, made["image_grid_thw"][0])
    return frames, rows // side, columns // side


def _qwen(tokens: ImageTokens, made: Arrays) -> str:
    """Return a token a vector."""
    return tokens.token * prod(grid_of(tokens, made) or ())


def _gemma3(tokens: ImageTokens, _: Arrays) -> str:
    """Return as many tokens for every image, between two marks."""
    count = tokens.count("image_seq_length") or tokens.config["mm_tokens_per_image"]
    return f"\n\n{tokens.spell('boi_token_index')}{tokens.token * count}{tokens.spell('eoi_token_index')}\n\n"


def _gemma4(tokens: ImageTokens, made: Arrays) -> str:
    """Return tokens between two marks."""
    count = int(made["num_soft_tokens_per_image"][0])
    return f"{tokens.spell('boi_token_id')}{tokens.token * count}{tokens.spell('eoi_token_id')}"


def _mistral3(tokens: ImageTokens, made: Arrays) -> str:
    """Return rows with a mark behind each."""
    rows, columns = (int(side) // tokens.side for side in made["image_sizes"][0])
    return "[IMG_BREAK]".join([tokens.token * columns] * rows) + "[IMG_END]"


def _idefics3(tokens: ImageTokens, made: Arrays) -> str:
    """Return tiles in rows, and the whole image behind them."""
    around, tower = "<fake_token_around_image>", tokens.tower
    count = tokens.count("image_seq_len") or int(
        (tower["image_size"] / tower["patch_size"] / tokens.config["scale_factor"]) ** 2
    )
    tile = tokens.token * count
    rows, columns = (int(np.ravel(made[name])[0]) for name in ("rows", "cols"))
    tiles = "".join(
        "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
        for row in range(rows)
    )
    return f"{tiles}{chr(10) if tiles else ''}{around}<global-img>{tile}{around}"


def _internvl(tokens: ImageTokens, made: Arrays) -> str:
    """Return tiles, and the whole image behind them."""
    tower = tokens.tower
    count = tokens.count("image_seq_length") or int(
        (tower["image_size"][0] / tower["patch_size"][0] * tokens.config["downsample_ratio"]) ** 2
    )
    return f"<img>{tokens.token * count * int(made['num_patches'][0])}</img>"


def _lfm2_vl(tokens: ImageTokens, made: Arrays) -> str:
    """Return tiles in rows, and the whole image behind them, with a mark ahead of each."""
    factor, columns = tokens.config["downsample_factor"], int(made["cols"])
    tiles = [tokens.token * (-(-rows // factor) * -(-across // factor)) for rows, across in made["spatial_shapes"]]
    if len(tiles) > 1:
        marks = [
            f"row_{place // columns + 1}_col_{place % columns + 1}" for place in range(columns * int(made["rows"]))
        ]
        tiles = [f"<|img_{mark}|>{tile}" for mark, tile in zip([*marks, "thumbnail"], tiles, strict=False)]
    return f"<|image_start|>{''.join(tiles)}<|image_end|>"


def _llava_onevision(tokens: ImageTokens, made: Arrays) -> str:
    """Return the whole image, and behind it one of the sizes that tiles make, in rows, without what was padded.

    Each of several images is a whole one and a mark.
    """
    height, width = map(int, made["image_sizes"][0])
    tile = tokens.count("num_image_tokens") or (tokens.tower["image_size"] // tokens.tower["patch_size"]) ** 2
    if made["batch_num_images"][0] > 1:
        return tokens.token * (tile + 1)
    # the least that shows the most of the image
    size = max(tokens.processor["image_grid_pinpoints"], key=lambda size: _shown(height, width, *size))
    rows, columns = (side // made["pixel_values"].shape[-1] * isqrt(tile) for side in size)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    most = tokens.config.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_")
    ratio = sqrt(rows * columns / (int(most) * tile))
    if ratio > 1.1:
        rows, columns = int(rows // ratio), int(columns // ratio)
    return tokens.token * int(tile + rows * (columns + 1))


def _shown(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return how many pixels of an image fit a size, and minus the pixels of the size that stay empty."""
    scale = min(columns / width, rows / height)
    shown = min(int(width * scale) * int(height * scale), width * height)
    return shown, shown - rows * columns


_QWEN = Family(_qwen)
_PIXTRAL = Family(_mistral3, options=lambda tokens: {"patch_size": tokens.side})
_IDEFICS = Family(_idefics3, options=lambda _: {"return_row_col_info": True})
# By the model type of config.json.
FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3": Family(_gemma3, mark="boi_token_index"),
    "gemma4": Family(_gemma4),
    "gemma4_unified": Family(_gemma4),
    "llava": _PIXTRAL,  # with its tower; others are served as text
    "mistral3": _PIXTRAL,
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "internvl": Family(_internvl, options=lambda _: {"crop_to_patches": True}),
    "lfm2_vl": Family(_lfm2_vl),
    "llava_onevision": Family(_llava_onevision, is_coarse_in_company=True),
}
