"""A vision tower: transformers' own module, which makes vectors of images for Quire's decoder. Engine thread.

The multimodal model of a checkpoint is built without the layers of its language model. Only a model with a tower imports
this module, and transformers with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_MAPPING
from transformers.utils import logging as transformers_logging

from engine.core.errors import InvalidRequestError, ModelLoadError
from engine.files.hf_config import HFConfig
from engine.images import Image
from engine.runtime.models.tower_ops import TowerOps
from engine.runtime.weights.checkpoint import Checkpoint
from engine.system.calls import foreign_code

log = logging.getLogger("quire.engine")

_NEEDED = ("model_type", "hidden_size", "rms_norm_eps")  # by projectors, of the language model's settings


class Tower:
    """The tower of one checkpoint."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model.to(device).eval().requires_grad_(False), device
        self._ops = TowerOps(self._model) if device.type == "cpu" else nullcontext()
        self._names = signature(model.get_image_features).parameters.keys()

    def check(self, image: Image) -> None:
        """Raise InvalidRequestError for an image of another model."""
        num_placed = image.num_tokens if "image_grid_thw" in self._names else 1
        if not image.arrays.keys() <= self._names or prod(image.grid or ()) != num_placed:
            message = "An image's numbers are not what this model's vision tower takes."
            raise InvalidRequestError(message, param="messages")

    @torch.inference_mode()
    def __call__(self, image: Image) -> Tensor | None:
        """Return the vectors [1 + D, V, hidden] of an image, alone: others in a batch might change its bits.

        None for one that cannot be computed: its requests fail, and no others.
        """
        try:
            arrays = {name: torch.from_numpy(array).to(self._device) for name, array in image.arrays.items()}
            with self._ops:
                found = self._model.get_image_features(**arrays, return_dict=True)
            levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
            made = torch.stack([_rows(level) for level in levels])
            if made.shape[1] == image.num_tokens and made.isfinite().all():
                return made
            log.warning("an image of %d tokens became %d vectors, not all finite", image.num_tokens, made.shape[1])
        except Exception as error:  # any: it is another project's code; one is that of a device's full memory
            log.warning("the vision tower cannot compute an image: %s: %s", type(error).__name__, error)
        return None


def _rows(level: Tensor | Sequence[Tensor]) -> Tensor:
    """Return vectors [V, hidden], of which some versions of transformers have a tensor, others one for each image."""
    parts = [level] if isinstance(level, Tensor) else level
    return torch.cat([part.flatten(0, -2) for part in parts])


def load_tower(config: HFConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower:
    """Build and fill the tower of a checkpoint; `config` is the whole model's. Raises ModelLoadError."""
    values, source = dict(config.values), config.source
    # Its language model is left without layers.
    fewest = {"num_hidden_layers": 0, "vocab_size": 8, "pad_token_id": None, "layer_types": None}
    values |= {"audio_config": None} if "audio_config" in values else {}
    if "text_config" in values:
        values["text_config"] = {key: value for key, value in values["text_config"].items() if key in _NEEDED} | fewest
    else:
        values |= fewest
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # about the layers that are left out
    transformers_logging.disable_progress_bar()
    try:
        with foreign_code(
            lambda error: ModelLoadError(
                f"{source}: transformers cannot load its tower ({error}); --image-cache-memory 0 serves text alone."
            )
        ):
            settings = CONFIG_MAPPING[values["model_type"]].from_dict(values)
            kind = MODEL_MAPPING[type(settings)]
            model, info = kind.from_pretrained(
                None, config=settings, state_dict=_weights(checkpoint, dtype), dtype=dtype, output_loading_info=True
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(("language_model.", "text_model.")))
    if missing and checkpoint.num_weights is not None:  # else they are random
        raise ModelLoadError(f"{source}: its tower lacks {len(missing)} tensors, {missing[0]!r} first.")
    return Tower(model, device)


def _weights(checkpoint: Checkpoint, dtype: torch.dtype) -> Mapping[str, Tensor]:
    found = {}
    for tensor in checkpoint.towers():
        if "audio" in tensor.name:
            continue
        found[tensor.name] = torch.empty(tensor.shape, dtype=dtype)
        tensor.copy_to(found[tensor.name])
    return found
