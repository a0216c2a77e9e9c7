"""What is kept of answers: no more than its bounds allow, the ones used longest ago go first."""

from __future__ import annotations

import pytest

from server.answers.stored_responses import ResponseStore, StoredResponse
from server.protocol.errors import ApiError

ME = "me"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def turn(name: str, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(name, previous, b"i" * (size // 2), b"d" * (size - size // 2))


def store(max_responses: int = 3, **bounds: int) -> ResponseStore:
    return ResponseStore(max_responses, clock=Clock(), **bounds)


def is_kept(store: ResponseStore, name: str) -> bool:
    try:
        store.chain(ME, name)
    except ApiError:
        return False
    return True


def kept(store: ResponseStore, names: str) -> str:
    return "".join(name for name in names if is_kept(store, name))


def test_a_chain_is_told_from_its_beginning() -> None:
    responses = store()
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        responses.put(ME, turn(name, previous))
    assert [stored.response_id for stored in responses.chain(ME, "c")] == ["a", "b", "c"]


def test_the_one_used_longest_ago_goes_first() -> None:
    responses = store()
    for name in "abc":
        responses.put(ME, turn(name))
    responses.find(ME, "a")
    responses.put(ME, turn("d"))
    assert kept(responses, "abcd") == "acd"


def test_going_on_from_one_uses_all_that_it_continues() -> None:
    responses = store()
    responses.put(ME, turn("a"))
    responses.put(ME, turn("b", "a"))
    responses.put(ME, turn("x"))
    responses.chain(ME, "b")
    responses.put(ME, turn("y"))
    assert kept(responses, "aby") == "aby"
    with pytest.raises(ApiError, match="'x'"):
        responses.find(ME, "x")


def test_bytes_are_bounded_too() -> None:
    responses = store(100, max_bytes=25)
    for name in "abc":
        responses.put(ME, turn(name))
    assert kept(responses, "abc") == "bc"
    responses.put(ME, turn("d", size=26))
    assert kept(responses, "abcd") == ""
    responses.put(ME, turn("e", size=25))
    assert kept(responses, "e") == "e", "what was forgotten still counts"


def test_what_nobody_uses_for_long_is_forgotten() -> None:
    clock = Clock()
    responses = ResponseStore(10, ttl_s=100.0, clock=clock)
    responses.put(ME, turn("a"))
    responses.put(ME, turn("b"))
    clock.now_s = 60.0
    responses.find(ME, "a")
    clock.now_s = 120.0
    assert kept(responses, "ab") == "a"
    clock.now_s = 300.0
    assert kept(responses, "a") == ""


def test_a_chain_with_a_gap_says_what_is_missing() -> None:
    responses = store()
    responses.put(ME, turn("a"))
    responses.put(ME, turn("b", "a"))
    responses.delete(ME, "a")
    with pytest.raises(ApiError, match="no response 'a' here: it was deleted") as missing:
        responses.chain(ME, "b")
    assert (missing.value.status, missing.value.code) == (404, "previous_response_not_found")
    with pytest.raises(ApiError) as error:
        responses.delete(ME, "a")
    assert (error.value.code, error.value.param) == ("response_not_found", "response_id")


def test_a_store_for_none_keeps_none() -> None:
    responses = store(0)
    assert not responses.is_open
    with pytest.raises(ApiError, match="--max-stored-responses"):
        responses.find(ME, "a")


def test_an_owner_that_stores_much_pushes_out_its_own() -> None:
    """Neither count nor bytes of one reach another's, and no id of another's is there."""
    responses = store(4, max_bytes=100)
    responses.put("small", turn("a"))
    for name in "bcdefg":
        responses.put("large", turn(name))
    assert responses.find("small", "a").response_id == "a"
    assert [name for name in "bcdefg" if _has(responses, "large", name)] == ["e", "f", "g"]
    responses.put("large", turn("h", size=90))
    responses.put("large", turn("i", size=80))
    assert responses.find("small", "a").response_id == "a"
    for act in (responses.find, responses.delete, responses.chain):
        with pytest.raises(ApiError) as refused:
            act("large", "a")
        with pytest.raises(ApiError) as never:
            act("large", "never")
        assert refused.value.message == never.value.message.replace("never", "a", 1)
    assert responses.find("small", "a").response_id == "a"


def _has(responses: ResponseStore, owner: str, name: str) -> bool:
    try:
        responses.find(owner, name)
    except ApiError:
        return False
    return True


def test_a_chain_never_leads_to_another_owners() -> None:
    responses = store()
    responses.put("one", turn("a"))
    responses.put("two", turn("b", "a"))
    with pytest.raises(ApiError):
        responses.chain("two", "b")
