"""A vision tower: transformers' own module, which makes vectors of images for Quire's decoder. Engine thread.

The multimodal model of a checkpoint is built without the layers of its language model. Only a model with a tower imports
this module, and transformers with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING
from transformers.utils import logging as transformers_logging

from engine.core.errors import InvalidRequestError, ModelLoadError
from engine.files.hf_config import HFConfig
from engine.images import Image
from engine.runtime.weights.checkpoint import Checkpoint
from engine.system.calls import foreign_code


class Tower:
    """The tower of one checkpoint."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model.to(device).eval().requires_grad_(False), device

    def check(self, image: Image) -> None:
        """Raise InvalidRequestError for arrays that are not the tower's."""
        vision = self._model.config.vision_config
        size, given = (
            vision.spatial_merge_size,
            {name: array.tolist() if array.size < 4 else array.shape for name, array in image.arrays.items()},
        )
        frames, rows, columns = image.grid or (0, 0, 0)
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        wanted = {
            "pixel_values": (image.num_tokens * size**2, patch),
            "image_grid_thw": [[frames, rows * size, columns * size]],
        }
        if given != wanted or frames * rows * columns != image.num_tokens:
            raise InvalidRequestError(
                "An image's numbers are not what this model's vision tower takes.", param="messages"
            )

    def remember(self, max_bytes: int) -> ImageVectors:
        """Return the tower with a memory of up to so many bytes."""
        return ImageVectors(self, max_bytes)

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image]) -> list[Tensor]:
        """Return the vectors [1 + D, V, hidden] of images with arrays of equal shapes."""
        names = images[0].arrays
        arrays = {
            name: torch.from_numpy(np.concatenate([each.arrays[name] for each in images])).to(self._device)
            for name in names
        }
        found = self._model.get_image_features(**arrays, return_dict=True)
        levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return [torch.stack([level[index] for level in levels]) for index in range(len(images))]


class ImageVectors:
    """The vectors of the images that were used last, in up to so many bytes."""

    def __init__(self, tower: Tower, max_bytes: int) -> None:
        self._tower, self._max_bytes, self._num_bytes = tower, max_bytes, 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    def __call__(self, images: Sequence[Image]) -> list[Tensor]:
        """Return the vectors of images."""
        return [self._find(image) for image in images]

    def _find(self, image: Image) -> Tensor:
        found = self._kept.pop(image.digest, None)
        if found is None:
            found = self._tower([image])[0]  # alone: other images in a product may change its bits
            self._num_bytes += found.nbytes
        self._kept[image.digest] = found
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return found


def load_tower(config: HFConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower:
    """Build and fill the tower of a checkpoint; `config` is the whole model's. Raises ModelLoadError."""
    values, source = dict(config.values), config.source
    # Its language model is left without layers; the projector needs its width.
    fewest = {"num_hidden_layers": 0, "vocab_size": 8, "pad_token_id": None, "layer_types": None}
    values |= {"text_config": {**values["text_config"], **fewest}} if "text_config" in values else fewest
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # about the layers that are left out
    transformers_logging.disable_progress_bar()
    try:
        with foreign_code(lambda error: ModelLoadError(f"{source}: transformers cannot load its tower ({error}).")):
            settings = CONFIG_MAPPING[values["model_type"]].from_dict(values)
            kind = MODEL_MAPPING[type(settings)]
            model, info = kind.from_pretrained(
                None, config=settings, state_dict=_weights(checkpoint, dtype), dtype=dtype, output_loading_info=True
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
    missing = sorted(name for name in info["missing_keys"] if not name.startswith("language_model."))
    if missing and checkpoint.num_weights is not None:  # else they are random
        raise ModelLoadError(f"{source}: its tower lacks {len(missing)} tensors, {missing[0]!r} first.")
    return Tower(model, device)


def _weights(checkpoint: Checkpoint, dtype: torch.dtype) -> Mapping[str, Tensor]:
    found = {}
    for tensor in checkpoint.towers():
        found[tensor.name] = torch.empty(tensor.shape, dtype=dtype)
        tensor.copy_to(found[tensor.name])
    return found
