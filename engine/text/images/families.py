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
    def side(self) -> int:
        """Return the pixels of a vector's side."""
        return int(self.config["vision_config"]["patch_size"] * self.config.get("spatial_merge_size", 1))

    def tile(self, name: str, computed: Callable[[Values, Values], float]) -> str:
        """Return the tokens of one tile: as many as a file names, or computed of the config and its tower's."""
        named = self.processor.get(name) or self.config.get(name)
        return self.token * int(named or computed(self.config, self.config["vision_config"]))


class Family(NamedTuple):
    """A family: the text of an image, of which the processor made some arrays."""

    spelled: Callable[[ImageTokens, Arrays], str]
    mark: str = ""  # the key of config.json with the id that templates write; without one it is the image's token
    options: Callable[[ImageTokens], Values] = lambda _: {}  # of every call of the image processor
    is_atomic: Callable[[ImageTokens], bool] = lambda _: False  # its tokens attend to each other both ways


def grid_of(tokens: ImageTokens, made: Arrays) -> tuple[int, int, int] | None:
    """Return frames, rows and columns of the vectors, where positions have three axes."""
    if "image_grid_thw" not in made:
        return None
    side = tokens.config["vision_config"]["spatial_merge_size"]
    frames, rows, columns = map(int, made["image_grid_thw"][0])
    return frames, rows // side, columns // side


def _in_rows(tokens: ImageTokens, made: Arrays) -> str:
    """Return rows with a mark behind each."""
    rows, columns = (int(side) // tokens.side for side in made["image_sizes"][0])
    return "[IMG_BREAK]".join([tokens.token * columns] * rows) + "[IMG_END]"


def _in_tiles(tokens: ImageTokens, made: Arrays) -> str:
    """Return tiles in rows, and the whole image behind them."""
    around = "<fake_token_around_image>"
    tile = tokens.tile(
        "image_seq_len", lambda config, tower: (tower["image_size"] / tower["patch_size"] / config["scale_factor"]) ** 2
    )
    rows, columns = (int(np.ravel(made[name])[0]) for name in ("rows", "cols"))
    tiles = "".join(
        "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
        for row in range(rows)
    )
    return f"{tiles}{chr(10) if tiles else ''}{around}<global-img>{tile}{around}"


def _at_the_best_size(tokens: ImageTokens, made: Arrays) -> str:
    """Return the whole image, and behind it one of the sizes that tiles make, in rows, without what was padded."""
    height, width = map(int, made["image_sizes"][0])
    tile = len(tokens.tile("num_image_tokens", lambda _, tower: (tower["image_size"] // tower["patch_size"]) ** 2))
    tile //= len(tokens.token)
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


_QWEN = Family(lambda tokens, made: tokens.token * prod(grid_of(tokens, made) or ()))
_IDEFICS = Family(_in_tiles, options=lambda _: {"return_row_col_info": True})
# By the model type of config.json.
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "gemma3": Family(
        lambda tokens, _: (
            f"\n\n{tokens.spell('boi_token_index')}"
            f"{tokens.tile('image_seq_length', lambda config, _: config['mm_tokens_per_image'])}"
            f"{tokens.spell('eoi_token_index')}\n\n"
        ),
        mark="boi_token_index",
        is_atomic=lambda _: True,
    ),
    "gemma4": Family(
        lambda tokens, made: (
            f"{tokens.spell('boi_token_id')}{tokens.token * int(made['num_soft_tokens_per_image'][0])}"
            f"{tokens.spell('eoi_token_id')}"
        ),
        is_atomic=lambda tokens: tokens.config["text_config"].get("use_bidirectional_attention") == "vision",
    ),
    "llava_onevision": Family(_at_the_best_size),
    "mistral3": Family(_in_rows, options=lambda tokens: {"patch_size": tokens.side}),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "internvl": Family(
        lambda tokens, made: f"<img>{_internvl_tile(tokens) * int(made['num_patches'][0])}</img>",
        options=lambda _: {"crop_to_patches": True},
    ),
}


def _internvl_tile(tokens: ImageTokens) -> str:
    return tokens.tile(
        "image_seq_length",
        lambda config, tower: (tower["image_size"][0] / tower["patch_size"][0] * config["downsample_ratio"]) ** 2,
    )
