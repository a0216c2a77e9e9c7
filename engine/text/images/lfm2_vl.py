"""Prepares images for LFM2-VL, whose image processor in transformers needs another library: tiles and patches. Pure.

A small image is scaled to so many patches; a large one becomes a grid of tiles, and the whole of it, small, behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_DEFAULTS: Mapping[str, Any] = {
    "do_image_splitting": True,
    "downsample_factor": 2,
    "encoder_patch_size": 16,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "max_image_tokens": 256,
    "max_pixels_tolerance": 2.0,
    "max_tiles": 10,
    "min_image_tokens": 64,
    "min_tiles": 2,
    "tile_size": 512,
    "use_thumbnail": True,
}


class Lfm2VlImageProcessor:
    """What transformers' class of this name makes of one image, less the padding to the most patches."""

    valid_kwargs = SimpleNamespace(__annotations__=_DEFAULTS)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._is = SimpleNamespace(**{key: values.get(key, default) for key, default in _DEFAULTS.items()})

    def __call__(self, *, images: Sequence[NDArray[np.uint8]], **_: Any) -> Mapping[str, NDArray[Any]]:
        """Return patches of an image's tiles, padded to the most of a tile, and the rows and columns of tiles."""
        image = Image.fromarray(images[0])
        columns, rows = self._grid(*image.size) if self._is_large(*image.size) else (1, 1)
        parts = []
        if (columns, rows) != (1, 1):
            side = self._is.tile_size
            whole = image.resize((side * columns, side * rows), Image.Resampling.BILINEAR)
            parts = [
                whole.crop((side * column, side * row, side * (column + 1), side * (row + 1)))
                for row in range(rows)
                for column in range(columns)
            ]
        if not parts or self._is.use_thumbnail:
            parts.append(image.resize(self._scaled(*image.size), Image.Resampling.BILINEAR))
        patches = [self._patches(np.asarray(part)) for part in parts]
        most, shapes = max(map(len, patches)), [(part.height, part.width) for part in parts]
        return {
            "pixel_values": np.stack([np.pad(each, ((0, most - len(each)), (0, 0))) for each in patches]),
            "pixel_attention_mask": np.array([np.arange(most) < len(each) for each in patches], np.int32),
            "spatial_shapes": np.array(shapes) // self._is.encoder_patch_size,
            "rows": np.array(rows),
            "cols": np.array(columns),
        }

    @property
    def _side(self) -> int:
        """Return the pixels of a vector's side."""
        return int(self._is.encoder_patch_size * self._is.downsample_factor)

    def _is_large(self, width: int, height: int) -> bool:
        """Return whether an image becomes tiles."""
        across, down = (max(self._is.encoder_patch_size, _nearest(each, self._side)) for each in (width, height))
        most = self._is.max_image_tokens * self._side**2 * self._is.max_pixels_tolerance
        return bool(self._is.do_image_splitting and across * down > most)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return columns and rows of tiles: those nearest to the image's ratio, of equal ones the most that it fills by half."""
        fewest, most = self._is.min_tiles, self._is.max_tiles
        sides = range(1, most + 1)
        grids = [(across, down) for across in sides for down in sides if fewest <= across * down <= most]
        best, least = (1, 1), float("inf")
        for across, down in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            distance = abs(width / height - across / down)
            is_filled = width * height > 0.5 * self._is.tile_size**2 * across * down
            if distance < least or (distance == least and is_filled):
                best, least = (across, down), distance
        return best

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height, in whole vectors, of an image that is one tile."""
        side, sizes = self._side, (width, height)
        fewest, most = (tokens * side**2 for tokens in (self._is.min_image_tokens, self._is.max_image_tokens))
        across, down = (max(side, _nearest(each, side)) for each in sizes)
        if across * down > most:
            scale = sqrt(width * height / most)
            across, down = (max(side, floor(each / scale / side) * side) for each in sizes)
        elif across * down < fewest:
            scale = sqrt(fewest / (width * height))
            across, down = (ceil(each * scale / side) * side for each in sizes)
        return across, down

    def _patches(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the patches of a tile, row by row, each as rows of colours."""
        side = self._is.encoder_patch_size
        scaled = (pixels.astype(np.float32) / 255 - np.float32(self._is.image_mean)) / np.float32(self._is.image_std)
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        patches: NDArray[Any] = scaled.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
        return patches.reshape(rows * columns, -1)


def _nearest(size: int, side: int) -> int:
    return round(size / side) * side
