"""A vision tower: transformers' own module, which makes vectors of images for Quire's decoder. Engine thread.

The multimodal model of a checkpoint is built without the layers of its language model. Only a model with a tower imports
this module, and transformers with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

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
        config, vision = self._model.config, self._model.config.vision_config
        given = {name: array.tolist() if array.size < 4 else array.shape for name, array in image.arrays.items()}
        if hasattr(vision, "temporal_patch_size"):
            size, grid = vision.spatial_merge_size, image.grid or (0, 0, 0)
            patch, num = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2, prod(grid)
            sides = [[grid[0], grid[1] * size, grid[2] * size]]
            wanted: dict[str, object] = {"pixel_values": (num * size**2, patch), "image_grid_thw": sides}
        else:
            num, side = config.mm_tokens_per_image, vision.image_size
            wanted = {"pixel_values": (1, vision.num_channels, side, side)}
        if given != wanted or num != image.num_tokens:
            raise InvalidRequestError(
                "An image's numbers are not what this model's vision tower takes.", param="messages"
            )

    @torch.inference_mode()
    def __call__(self, image: Image) -> Tensor:
        """Return the vectors [1 + D, V, hidden] of an image, alone: others in a batch might change its bits."""
        arrays = {name: torch.from_numpy(array).to(self._device) for name, array in image.arrays.items()}
        found = self._model.get_image_features(**arrays, return_dict=True)
        return torch.stack([found.pooler_output[0], *(each[0] for each in getattr(found, "deepstack_features", ()))])


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
