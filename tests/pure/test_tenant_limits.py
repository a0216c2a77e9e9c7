"""--tenants: what the file may say, how each fault of it is told, and the buckets by a clock of our own."""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import ConfigError, OverloadedError
from server.tenancy.tenancy import DEFAULT, Account, Tenancy, Tenant, read_tenants
from tests.pure.driver import request

FILE = """
tiers:
  gold: {weight: 4, tokens_per_minute: 1000}
  free: {max_concurrent_requests: 2}
tenants:
  - {name: acme, tier: gold, key_env: ACME_KEY}
  - {name: hobby, tier: free, weight: 0.5, key_sha256: %s}
  - {name: here, key: [in-plain-sight, another], max_concurrent_requests: 7}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "tenants.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def test_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEY", "sécret")
    acme, hobby, here = read_tenants(write(tmp_path, FILE % digest("h").hex().upper()))
    assert acme == Tenant(name="acme", digests=(digest("sécret"),), tier="gold", weight=4.0, tokens_per_minute=1000)
    assert hobby == Tenant(name="hobby", digests=(digest("h"),), tier="free", weight=0.5, max_concurrent_requests=2)
    assert here.digests == (digest("in-plain-sight"), digest("another"))
    assert (here.weight, here.max_concurrent_requests, here.tokens_per_minute) == (1.0, 7, None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "which is not a file of tenants; it begins with the line tenants:"),
        ("tenants: []", "tenants is wrong: List should have at least 1 item"),
        ("tenants: [{name: a, key: k}", "not valid YAML at line 1"),
        ("tenants: [{name: a}]", "tenant a has no key; give it key, key_env or key_sha256"),
        ("tenants: [{name: a, key: ''}]", "a key of tenant a is empty"),
        ("tenants: [{name: a, key: ' k'}]", "begins or ends with a space"),
        ('tenants: [{name: a, key: "k\\nl"}]', "has a character that no client sends"),
        ("tenants: [{name: a, key_env: NOT_THERE}]", "the variable NOT_THERE, which is not set"),
        ("tenants: [{name: a, key_sha256: abc}]", "key_sha256 of tenant a is not 64 hexadecimal digits"),
        (
            f"tenants: [{{name: a, key_sha256: {sha256(b'').hexdigest()}}}]",
            "key_sha256 of tenant a is the digest of an empty key",
        ),
        (
            f"tenants: [{{name: a, key_sha256: ['{'0' * 64}', {sha256().hexdigest().upper()}]}}]",
            "the digest of an empty key",
        ),
        ("tenants: [{name: a, key: ''}]", "a key of tenant a is empty, or begins or ends with a space"),
        ("tenants: [{name: a, key: [k, ' ']}]", "a key of tenant a is empty, or begins or ends with a space"),
        ("tenants: [{name: a, key: []}]", "tenant a has no key"),
        ("tenants: [{name: a, key: k, tokens_per_minute: }]", "tenants.0 is wrong: tokens_per_minute has no value"),
        (
            "tiers: {t: {max_concurrent_requests: null}}\ntenants: [{name: a, key: k}]",
            "tiers.t is wrong: max_concurrent_",
        ),
        ("tenants: [{name: a b, key: k}]", "tenants.0.name is wrong: String should match pattern"),
        ("tenants: [{name: default, key: k}]", "the name default is reserved"),
        ("tenants: [{name: a, key: k}, {name: a, key: l}]", "the name a is there twice"),
        ("tenants: [{name: a, key: secret}, {name: b, key: secret}]", "a and b have the same key"),
        ("tenants: [{name: a, key: k, tier: gold}]", "tenant a is of tier 'gold'; tiers are none"),
        ("tenants: [{name: a, key: k, weight: 0}]", "tenants.0.weight is wrong: Input should be greater than or equal"),
        ("tenants: [{name: a, key: k, weight: .nan}]", "tenants.0.weight is wrong"),
        ("tenants: [{name: a, key: k, tokens_per_minute: 0}]", "tenants.0.tokens_per_minute is wrong"),
        (
            "tenants: [{name: a, key: k, max_requests: 1}]",
            "tenants.0.max_requests is unknown; one of weight, max_concurrent_requests, ",
        ),
        ("tenants: [{name: a, key: 12345678901}]", "tenants.0.key is no text; put it in quotes."),
        ("tenants: [{name: a, key: [k, 12345678901]}]", "tenants.0.key is no text; put it in quotes."),
        ("tenant: [{name: a, key: k}]", "tenant is unknown; tiers and tenants may be there"),
        ("tiers: {gold: }\ntenants: [{name: a, key: k}]", "tiers.gold holds no settings; write them as {name: value}."),
        ("tiers: {gold: {wieght: 2}}\ntenants: [{name: a, key: k}]", "tiers.gold.wieght is unknown; one of weight, "),
        (
            "tiers: {gold: {weight: 2},\n gold: {weight: 3}}\ntenants: [{name: a, key: k}]",
            "'gold' is there twice at line 2",
        ),
        ("tenants: [{name: a, key: !secret x}]", "not valid YAML at line 1"),
        ("tenants: [{name: a, key: !!int secret}]", "not valid YAML at line 1"),
    ],
)
def test_a_fault_is_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_tenants(write(tmp_path, text))
    message = str(refused.value)
    assert message.startswith(f"--tenants is '{tmp_path}/tenants.yaml', ")
    assert told in message
    assert "\n" not in message
    assert "secret" not in message
    assert "12345678901" not in message


def test_a_key_that_is_everybodys_is_no_tenants(tmp_path: Path) -> None:
    path = write(tmp_path, "tenants: [{name: a, key: k}, {name: here, key: [l, secret]}]")
    assert len(read_tenants(path, ["another one"])) == 2
    with pytest.raises(
        ConfigError, match="in which --api-key and here have the same key; give each its own"
    ) as refused:
        read_tenants(path, ["another one", "secret"])
    assert "secret" not in str(refused.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which cannot be read: No such file"):
        read_tenants(tmp_path / "tenants.yaml")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def account(clock: Clock, **terms: int) -> Account:
    return Account(Tenant(name="a", **terms), _count_refusal, clock)  # type: ignore[arg-type]  # ints, all of them


def answer(account: Account, num_prompt: int, num_generated: int) -> None:
    account.charge_prompts([request(prompt=tuple(range(num_prompt)))])
    account.charge(num_generated)


def test_requests_at_once_are_limited() -> None:
    held = account(Clock(), max_concurrent_requests=2)
    for _ in range(2):
        held.check(6.0)
        held.num_open += 1
    with pytest.raises(OverloadedError, match=r"Tenant a has 2 requests open, the most .*try again in 3 s") as refused:
        held.check(6.0)
    assert refused.value.retry_after_s == 3.0
    assert held.headers() == {"x-ratelimit-limit-requests": "2", "x-ratelimit-remaining-requests": "0"}
    held.check(6.0, is_counted=True)
    held.num_open -= 1
    held.check(6.0)


def refused_s(held: Account, request_s: float = 0.0) -> float:
    with pytest.raises(OverloadedError) as refused:
        held.check(request_s)
    return refused.value.retry_after_s


def test_each_refused_client_of_a_tenant_is_given_another_time() -> None:
    clock = Clock()
    held = account(clock, max_concurrent_requests=2)
    held.num_open = 2
    assert [refused_s(held, 6.0) for _ in range(3)] == [3.0, 6.0, 9.0]
    clock.now += 6.0
    assert refused_s(held, 6.0) == 6.0, "one is still to come back"
    held = account(clock, tokens_per_minute=60)
    answer(held, 20, 70)
    assert [refused_s(held) for _ in range(2)] == [31.0, 120.0], "a request takes 90 tokens"


def test_tokens_a_minute_are_limited_and_come_again() -> None:
    clock = Clock()
    held = account(clock, tokens_per_minute=60)
    answer(held, 20, 70)
    assert held.headers() == {
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "90.000s",
    }
    with pytest.raises(OverloadedError, match="used up its 60 tokens a minute; try again in 31 s") as refused:
        held.check(0.0)
    clock.now += refused.value.retry_after_s
    held.check(0.0)
    clock.now += 1000.0
    assert held.headers()["x-ratelimit-remaining-tokens"] == "60", "what is not used is not saved for later"


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 200), st.floats(0, 30)), max_size=60))
def test_the_rate_holds_in_the_mean(asked: list[tuple[int, int, float]]) -> None:
    """However requests come: in any time, a minute's worth, what the time brought, and the last request beyond it."""
    clock = Clock()
    held = account(clock, tokens_per_minute=600)
    spent, largest = 0, 0
    for num_prompt, num_generated, pause_s in asked:
        clock.now += pause_s
        with suppress(OverloadedError):
            held.check(0.0)
            answer(held, num_prompt, num_generated)
            spent += num_prompt + num_generated
            largest = max(largest, num_prompt + num_generated)
        assert spent <= 600 + 10 * clock.now + largest + 1e-6


def test_other_terms_hold_from_then_on() -> None:
    clock = Clock()
    tenancy = Tenancy(["k"], [Tenant(name="a", digests=(digest("x"),), tokens_per_minute=60)], _count_refusal, clock)
    first = tenancy.find(["", "x"])
    assert first is not None
    first.num_open = 1
    first.charge_prompts([request(prompt=(1,) * 100)])
    tenancy.replace([Tenant(name="a", digests=(digest("y"),), tokens_per_minute=600), Tenant(name="b")])
    assert tenancy.find(["x"]) is None
    assert tenancy.find(["y"]) is first
    assert first.num_open == 1
    clock.now = 2.0
    with pytest.raises(OverloadedError, match="600 tokens a minute"):  # 40 are owed, 20 have come
        first.check(0.0)
    clock.now = 4.1
    first.check(0.0)
    tenancy.replace([])
    assert tenancy.find(["y"]) is None
    found = tenancy.find(["k"])
    assert found is not None
    assert found.tenant.name == DEFAULT


def test_lines_of_batches_leave_a_place_to_clients() -> None:
    held = account(Clock(), max_concurrent_requests=3)
    assert [held.room_for_lines(num_running) for num_running in (0, 1, 2, 5)] == [2, 1, 0, 0]
    held.num_open = 1
    assert [held.room_for_lines(num_running) for num_running in (0, 1, 2)] == [1, 1, 0]
    assert account(Clock(), max_concurrent_requests=1).room_for_lines(0) == 1
    assert account(Clock()).room_for_lines(1000) == inf
    owing = account(Clock(), tokens_per_minute=5)
    assert owing.room_for_lines(0) == inf
    owing.charge_prompts([request(prompt=(1,) * 9)])
    assert owing.room_for_lines(0) == 0


def test_owners_are_the_tenants_of_the_file_and_the_operator() -> None:
    tenancy = Tenancy(["k"], [Tenant(name="a"), Tenant(name="b")], _count_refusal)
    before = tenancy.owners
    assert set(before) == {DEFAULT, "a", "b"}
    tenancy.replace([Tenant(name="b"), Tenant(name="c")])
    assert set(tenancy.owners) == {DEFAULT, "b", "c"}
    assert tenancy.owners["b"] is before["b"]
    assert Tenancy(["k"], None, _count_refusal).owners == {DEFAULT: None}


def _count_refusal(tenant: str, limit: str) -> None:
    """Count nothing."""
