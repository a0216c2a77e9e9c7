"""Images that requests name: held while a request lives, and refused where a model takes none."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.spans import Span
from engine.core.types import Request, SamplingParams
from engine.images import Image
from engine.resources import EngineResources


def request_of(image: Image) -> Request:
    span = Span(1, image.num_tokens, image.digest)
    params = SamplingParams(max_tokens=1)
    prompt = (1,) * (2 + image.num_tokens)
    return Request(request_id="", prompt=prompt, params=params, arrival_s=0.0, spans=(span,), images=(image,))


def image() -> Image:
    return Image(b"digest", {"pixel_values": np.ones((4, 3), np.float32)}, 4, (1, 2, 2))


def test_an_image_is_found_as_long_as_a_request_holds_it() -> None:
    resources = EngineResources(check_image=lambda _: None)
    request = pickle.loads(pickle.dumps(request_of(image())))
    held = resources.hold(request)
    del request
    assert resources.find(b"digest") is held[0]
    del held
    gc.collect()
    with pytest.raises(StopIteration):
        resources.find(b"digest")


def test_a_model_without_images_refuses_them() -> None:
    with pytest.raises(InvalidRequestError, match="takes no images"):
        EngineResources().hold(request_of(image()))
