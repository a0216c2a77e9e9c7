"""What crosses an EngineHandle is a value: it survives being written as bytes and read back, and so does every error."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import errors
from engine.core.config import SchedulerConfig
from engine.core.errors import ContextLengthError, ErrorValue, OverloadedError, QuireError
from engine.core.stats import Histogram, Stats
from engine.core.types import Request, StepEvents
from engine.images import Image
from tests.values import TYPES, dumps, loads

CONFIGS = st.builds(
    SchedulerConfig,
    num_blocks=st.integers(1, 99),
    block_size=st.integers(1, 99),
    max_model_len=st.integers(1, 99),
    max_num_seqs=st.integers(1, 9),
    max_num_batched_tokens=st.integers(9, 99),
    policy=st.text(),
    windows=st.lists(st.integers(1, 99)).map(tuple),
    target_itl_s=st.none() | st.floats(0.1, 9.0),
)
HISTOGRAMS = st.lists(st.floats(allow_nan=False), unique=True).map(sorted).map(Histogram)
ARRAYS = st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(lambda values: np.array(values, np.float32))
IMAGES = st.builds(Image, arrays=st.dictionaries(st.text(), ARRAYS, max_size=2))
st.register_type_strategy(Image, IMAGES)
OTHERS = {each.name: ... for each in fields(Request) if each.name != "images"}
st.register_type_strategy(Request, st.builds(Request, images=st.lists(IMAGES, max_size=2).map(tuple), **OTHERS))
st.register_type_strategy(SchedulerConfig, CONFIGS)
st.register_type_strategy(Histogram, HISTOGRAMS)
st.register_type_strategy(Path, st.text("ab/.", min_size=1).map(Path))


@pytest.mark.parametrize("name", sorted(TYPES))
def test_every_value_that_crosses_survives_the_way(name: str) -> None:
    """The bytes name all types and contents, so equal bytes are equal values; NaN is one as well."""

    @settings(max_examples=25)
    @given(st.from_type(TYPES[name]))
    def survives(value: object) -> None:
        data = dumps(value)
        again = loads(data)
        assert type(again) is type(value)
        assert dumps(again) == data

    survives()


def test_what_is_no_value_is_not_written() -> None:
    for thing in (object(), StepEvents(), OverloadedError("full", retry_after_s=1.0), Stats().end):
        with pytest.raises(AssertionError, match="may not cross"):
            dumps((1, thing))


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QuireError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_raised_as_it_was(kind: type[QuireError]) -> None:
    error = kind.__new__(kind, "A sentence.")
    error.__dict__ |= {"param": "n", "retry_after_s": 2.5, "log_message": ""}
    again = loads(dumps(ErrorValue.of(error))).exception()
    assert type(again) is kind
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_an_error_keeps_what_its_class_adds() -> None:
    error = ContextLengthError("Too long.", param="prompt", num_prompt=9, limit=8)
    again = ErrorValue.of(error).exception()
    assert isinstance(again, ContextLengthError)
    assert (again.num_prompt, again.limit, again.max_tokens, again.param) == (9, 8, 0, "prompt")


def test_an_error_of_another_file_crosses_as_the_kind_that_it_is() -> None:
    class SpecialError(OverloadedError):
        pass

    again = ErrorValue.of(SpecialError("Full.", retry_after_s=1.0)).exception()
    assert type(again) is OverloadedError
    assert again.retry_after_s == 1.0
