"""How each family spells an image in a prompt: what stands around its tokens, and how many there are. Pure.

A chat template writes a mark for an image; `spelled` is what takes its place. Positions whose id is that of the image's token
get the vectors of the vision tower, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
COUNTS = frozenset(("cols", "num_crops", "num_patches", "num_soft_tokens_per_image", "rows"))  # of no use to a tower
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """A checkpoint's settings that its family reads."""

    config: Values  # config.json
    processor: Values  # processor_config.json and preprocessor_config.json
    token: str  # of an image
    spell: Callable[[str], str]  # the token of an id that config.json names, or ""

    def length(self, name: str, computed: Callable[[Values, Values], float]) -> int:
        """Return the tokens of one tile: as files name them, or computed of the config and its tower's."""
        found = self.processor.get(name) or self.config.get(name)
        return int(found or computed(self.config, self.config.get("vision_config", {})))


class Family:
    """A family whose image is a run of its token, which is what the chat template writes."""

    def __init__(self, tokens: ImageTokens) -> None:
        self.tokens, self.token, self.mark = tokens, tokens.token, tokens.token
        self.is_atomic = False
        self.options: Values = {}  # of every call of the image processor

    def spelled(self, made: Arrays) -> str:
        """Return the text of an image, of which the processor made these arrays."""
        raise NotImplementedError

    def grid(self, made: Arrays) -> tuple[int, int, int] | None:  # noqa: ARG002
        """Return frames, rows and columns of the vectors, where positions have three axes."""
        return None


class Qwen(Family):
    """Qwen 2 VL and later: patches, some of which are merged into one vector."""

    def grid(self, made: Arrays) -> tuple[int, int, int]:
        side = self.tokens.config["vision_config"]["spatial_merge_size"]
        frames, rows, columns = map(int, made["image_grid_thw"][0])
        return frames, rows // side, columns // side

    def spelled(self, made: Arrays) -> str:
        return self.token * prod(self.grid(made))


class Gemma3(Family):
    """Gemma 3: the same number for every image, which attend to each other both ways."""

    def __init__(self, tokens: ImageTokens) -> None:
        super().__init__(tokens)
        self.mark, self._end = (tokens.spell(name) for name in ("boi_token_index", "eoi_token_index"))
        self._count = tokens.length("image_seq_length", lambda config, _: config["mm_tokens_per_image"])
        self.is_atomic = True

    def spelled(self, made: Arrays) -> str:  # noqa: ARG002
        return f"\n\n{self.mark}{self.token * self._count}{self._end}\n\n"


class Gemma4(Family):
    """Gemma 4: as many as the image has of pooled patches."""

    def __init__(self, tokens: ImageTokens) -> None:
        super().__init__(tokens)
        self._begin, self._end = (tokens.spell(name) for name in ("boi_token_id", "eoi_token_id"))
        self.is_atomic = tokens.config["text_config"].get("use_bidirectional_attention") == "vision"

    def spelled(self, made: Arrays) -> str:
        return f"{self._begin}{self.token * int(made['num_soft_tokens_per_image'][0])}{self._end}"


class Pixtral(Family):
    """Pixtral and Mistral 3: rows, with a mark behind each."""

    def __init__(self, tokens: ImageTokens) -> None:
        super().__init__(tokens)
        self._side = tokens.config["vision_config"]["patch_size"] * tokens.config.get("spatial_merge_size", 1)
        self.options = {"patch_size": self._side}

    def spelled(self, made: Arrays) -> str:
        rows, columns = (int(side) // self._side for side in made["image_sizes"][0])
        return "[IMG_BREAK]".join([self.token * columns] * rows) + "[IMG_END]"


class Idefics3(Family):
    """Idefics 3 and SmolVLM: tiles in rows, and the whole image behind them."""

    def __init__(self, tokens: ImageTokens) -> None:
        super().__init__(tokens)
        self.options = {"return_row_col_info": True}
        self._tile = self.token * tokens.length(
            "image_seq_len",
            lambda config, tower: (tower["image_size"] / tower["patch_size"] / config["scale_factor"]) ** 2,
        )

    def spelled(self, made: Arrays) -> str:
        around, tile = "<fake_token_around_image>", self._tile
        rows, columns = (int(np.ravel(made[name])[0]) for name in ("rows", "cols"))
        tiles = "".join(
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return f"{tiles}{chr(10) if tiles else ''}{around}<global-img>{tile}{around}"


class InternVL(Family):
    """InternVL: as many tiles as the processor cuts."""

    def __init__(self, tokens: ImageTokens) -> None:
        super().__init__(tokens)
        self.options = {"crop_to_patches": True}
        self._tile = self.token * tokens.length(
            "image_seq_length",
            lambda config, tower: (tower["image_size"][0] / tower["patch_size"][0] * config["downsample_ratio"]) ** 2,
        )

    def spelled(self, made: Arrays) -> str:
        return f"<img>{self._tile * int(made['num_patches'][0])}</img>"


class LlavaOnevision(Family):
    """LLaVA-OneVision: the whole image, and behind it a larger one in rows, without what was padded."""

    def __init__(self, tokens: ImageTokens) -> None:
        super().__init__(tokens)
        self._tile = tokens.length(
            "num_image_tokens", lambda _, tower: (tower["image_size"] // tower["patch_size"]) ** 2
        )

    def spelled(self, made: Arrays) -> str:
        height, width = map(int, made["image_sizes"][0])
        tile, side, pixels = self._tile, isqrt(self._tile), made["pixel_values"].shape[-1]
        # of the resolutions that tiles make: the least that shows the most of the image
        rows, columns = max(
            self.tokens.processor["image_grid_pinpoints"],
            key=lambda size: _shown(height, width, *size),
        )
        rows, columns = rows // pixels * side, columns // pixels * side
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        most = int(self.tokens.config.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_"))
        ratio = sqrt(rows * columns / (most * tile))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return self.token * int(tile + rows * (columns + 1))


def _shown(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return how many of an image's pixels a resolution shows, and how few of its own it wastes."""
    scale = min(columns / width, rows / height)
    shown = min(int(width * scale) * int(height * scale), width * height)
    return shown, shown - rows * columns


# By the model type of config.json.
FAMILIES: Mapping[str, type[Family]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), Qwen),
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "mistral3": Pixtral,
    "idefics3": Idefics3,
    "smolvlm": Idefics3,
    "internvl": InternVL,
    "llava_onevision": LlavaOnevision,
}
