"""How much a JSON document holds, without parsing it; and how one travels between processes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.http import bodies, packed_json
from server.http.bodies import check_count, count_values, most_values, parse
from server.http.packed_json import pack, unpack
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


@pytest.mark.parametrize("size", [3, 4, 5, 9])
def test_what_is_long_travels_in_slices(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_json, "_SLICE", 4)
    monkeypatch.setattr(packed_json, "_LONG", 4)
    names = {f"n{index}": index / 2 for index in range(size)}
    for each in (names, [*names], [None] * size, [{}] * size, ["x" * 300] * size, {"a": {"b": [[*names], names]}}):
        assert unpack([bytearray(part) for part in pack(each)]) == each
    assert len(pack(names)) == 1 + (-(-size // 4) if size > 4 else 0)


@settings(deadline=None)
@given(DOCUMENTS, st.integers(0, 400), st.lists(st.integers(-(2**70), 2**70), min_size=30, max_size=40))
def test_a_document_arrives_as_it_left(document: Any, length: int, numbers: list[int]) -> None:
    tree = {"a": [document, "é" * length], "ids": numbers, "more": [numbers, numbers[:5]], "root": document}
    for each in (tree, document, numbers, "x" * length):
        parts = [bytearray(part) for part in pack(each)]
        assert unpack(parts) == each
        assert not parts


@pytest.mark.parametrize("numbers", [[2**31 - 1, -(2**31)], [2**31], [-(2**31) - 1], [2**63], [1.0], [True], [None]])
def test_lists_keep_their_types(numbers: list[Any]) -> None:
    tree = numbers + [0] * 100
    told = unpack([bytearray(part) for part in pack(tree)])
    assert told == tree
    assert list(map(type, told)) == list(map(type, tree))


def test_token_ids_and_long_texts_travel_by_themselves() -> None:
    header, *parts = pack({"prompt": [7] * 1000, "text": "é" * 300, "short": "x"})
    assert [len(part) for part in parts] == [2001, 600]
    assert len(header) < 200


def test_what_is_no_json_number_survives() -> None:
    value = unpack([bytearray(part) for part in pack(parse(b'{"a": NaN, "b": [Infinity]}'))])
    assert math.isnan(value["a"])
    assert value["b"] == [math.inf]


def test_a_refusal_names_the_flag_and_brackets_in_text_are_no_values() -> None:
    check_count(json.dumps({"prompt": "[{," * 1000}).encode(), 50)
    with pytest.raises(ApiError, match="--max-json-values") as refused:
        check_count(json.dumps({"prompt": [1] * 1000}).encode(), 1000)
    assert refused.value.status == 400
    assert "1066 JSON values" in refused.value.message
