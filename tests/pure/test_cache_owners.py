"""The prefix cache as a side channel: an owner finds its own blocks, and never another owner's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.kv.prefix_cache import chain_root
from engine.core.types import AbortCause
from tests.integrity import check_scheduler
from tests.pure.driver import Driver, config, request

PUBLIC = tuple(range(20, 33))  # 13 tokens, 3 blocks of 4


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


asked = st.fixed_dictionaries(
    {
        "owner": st.sampled_from(["", "a", "b"]),
        "begin": st.sampled_from([(), PUBLIC[:5], PUBLIC]),
        "own": st.lists(st.integers(0, 1), min_size=1, max_size=14),
        "max_tokens": st.integers(0, 6),
        "n": st.integers(1, 2),
        "abort_after": st.sampled_from([None, None, 0, 1, 3]),
    }
)


@settings(deadline=None)
@given(
    history=st.lists(asked, min_size=2, max_size=12),
    num_blocks=st.sampled_from([16, 24, 60]),
    num_host_blocks=st.sampled_from([0, 30]),
    budget=st.sampled_from([6, 12, 40]),
)
def test_nothing_of_another_owners_is_ever_found(
    history: list[dict[str, object]], num_blocks: int, num_host_blocks: int, budget: int
) -> None:
    """What a request finds, it could find if all other owners had never asked anything."""
    settings = config(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        host_caching=bool(num_host_blocks),
        max_num_batched_tokens=budget,
        max_model_len=40,
    )
    driver = Driver(settings)
    known: dict[str, list[tuple[int, ...]]] = {"": [PUBLIC], "a": [], "b": []}
    driver.add(request("public", PUBLIC, max_tokens=0))
    driver.drain()
    for number, each in enumerate(history):
        owner, name = str(each["owner"]), str(number)
        prompt = (*each["begin"], *each["own"])  # type: ignore[misc]
        changes = {"max_tokens": each["max_tokens"], "n": each["n"], "eos_token_ids": frozenset[int]()}
        driver.add(request(name, prompt, cache_owner=owner, **changes))
        if each["abort_after"] is not None:
            for _ in range(int(str(each["abort_after"]))):
                driver.step()
            driver.take(driver.scheduler.abort(name, AbortCause.DISCONNECT, driver.now))
        driver.drain()
        allowed = max([0, *(common(prompt, said) for said in known[owner])])
        for choice in range(int(str(each["n"]))):
            info = driver.prompts.get((name, choice))
            assert info is None or info.num_cached_tokens <= allowed, (owner, prompt)
            known[owner].append((*prompt, *driver.streams.get((name, choice), ())))
    check_scheduler(driver.scheduler)


def test_owners_and_salts_make_roots_of_their_own() -> None:
    roots = [
        chain_root(salt, digest, owner) for salt in ("", "a", "b") for digest in (b"", b"a") for owner in ("", "a", "b")
    ]
    assert len(set(roots)) == len(roots)
    assert chain_root("a") == chain_root("a", b"", "")
