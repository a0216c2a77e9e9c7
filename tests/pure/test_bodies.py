"""How much a JSON document holds, without parsing it; and how one travels between processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.http import bodies
from server.http.bodies import check_count, count_values, most_values
from server.protocol.errors import ApiError

TEXTS = st.text(alphabet='ab"\\[]{},: \n\u00e9\u4e00', max_size=6)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def weight(value: Any) -> int:
    """By the definition: a string or a name is 4, a list or object 32 with its first item."""
    if isinstance(value, str):
        return 4
    if isinstance(value, list):
        return 32 + sum(map(weight, value)) - bool(value)
    if isinstance(value, dict):
        return 32 + sum(4 + weight(item) for item in value.values()) - bool(value)
    return 1


@settings(deadline=None)
@given(DOCUMENTS, st.sampled_from([None, 1]), st.booleans(), st.integers(1, 9))
def test_the_count_is_exact_wherever_the_document_is_cut(
    document: Any, indent: int | None, ascii_only: bool, piece_bytes: int
) -> None:
    raw = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_PIECE_BYTES", piece_bytes)
        assert count_values(raw) == weight(document) <= most_values(raw)


def test_a_refusal_names_the_flag_and_brackets_in_text_are_no_values() -> None:
    check_count(json.dumps({"prompt": "[{," * 1000}).encode(), 50)
    with pytest.raises(ApiError, match="--max-json-values") as refused:
        check_count(json.dumps({"prompt": [1] * 1000}).encode(), 1000)
    assert refused.value.status == 400
    assert "1066 JSON values" in refused.value.message
