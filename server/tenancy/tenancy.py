"""Tenants: the file that names them, and their accounts, which are owners of stored objects and have limits. Event loop.

With --tenants the key decides the tenant, so inventing users gains no share. Without, all callers are trusted alike, and the
field `user` (or `safety_identifier`) distinguishes them.

Everything that outlives a request (its record, stored responses, files, batches) belongs to an owner, the name of a
tenant, and is invisible to all others. Keys of --api-key, and every client of a server without --tenants, are the owner
DEFAULT, a name that no tenant can have.

A request counts as open from before its body is read, so that one over a limit is refused unread, until it ends.
A limit on tokens is a bucket that fills at its rate and holds a minute's worth. A prompt is charged when its request
arrives, the answer when it ends; a tenant in debt waits until the bucket has filled again. So no request is refused for
tokens that it might generate, and the rate holds on average.

The file given by --tenants has their names, keys, weights and limits:

    tiers:
      gold: {weight: 4}
      free: {weight: 1, max_concurrent_requests: 4, tokens_per_minute: 20000}
    tenants:
      - {name: acme, tier: gold, key_env: ACME_KEY}
      - {name: hobby, tier: free, key_sha256: <what `printf %s "$KEY" | sha256sum` prints>}
      - {name: here, key: in-plain-sight, weight: 2}

A tenant's own terms override its tier's. A key can be given by a variable or a digest instead of plainly. Read at start-up
and on SIGHUP; every fault is a ConfigError that never repeats a key.
"""

from __future__ import annotations

import hmac
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import ceil, inf
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from engine.core.errors import ConfigError, OverloadedError
from engine.core.types import Request
from engine.overload import RetryTimes

DEFAULT = "default"  # the name of everything that is no tenant of the file: keys of --api-key

_NOTHING = sha256(b"").digest()

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant, its tier resolved. None is no limit."""

    name: str
    digests: tuple[bytes, ...] = ()  # SHA-256 of its keys
    tier: str = ""
    weight: float = 1.0
    max_concurrent_requests: int | None = None
    tokens_per_minute: int | None = None


class _Terms(BaseModel):
    """Terms of tiers and tenants. A null is refused: it would limit nothing."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True, defer_build=True
    )

    weight: float | None = Field(None, ge=0.001, le=1000)
    max_concurrent_requests: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _refuse_null(cls, content: Any) -> Any:
        empty = [name for name, value in content.items() if value is None] if isinstance(content, dict) else []
        if empty:
            raise PydanticCustomError("empty", "{name} has no value; give one, or remove it", {"name": empty[0]})
        return content


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class _Tenant(_Terms):
    name: Name
    tier: str | None = None
    key: Annotated[list[SecretStr], BeforeValidator(_listed)] = Field(default_factory=list)
    key_env: Annotated[list[str], BeforeValidator(_listed)] = Field(default_factory=list)
    key_sha256: Annotated[list[str], BeforeValidator(_listed)] = Field(default_factory=list)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, defer_build=True)

    tiers: dict[Name, _Terms] = Field(default_factory=dict)
    tenants: list[_Tenant] = Field(min_length=1)


def read_tenants(path: Path, api_keys: Iterable[str] = ()) -> tuple[Tenant, ...]:
    """Return a file's tenants; none may have an API key. Raises ConfigError."""
    from server.settings.yaml_files import read_yaml

    try:
        file = _File.model_validate(read_yaml("--tenants", path, has_secrets=True))
        tenants = tuple([_resolve(entry, file.tiers) for entry in file.tenants])
        _refuse_twins(tenants, api_keys)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        faults.sort(key=lambda fault: fault["type"] != "extra_forbidden")  # a misspelt name explains a missing one
        raise ConfigError(f"--tenants is {str(path)!r}, {_fault(faults[0])}.") from None
    except ValueError as error:
        raise ConfigError(f"--tenants is {str(path)!r}, {error}.") from None
    return tenants


def _fault(error: ErrorDetails) -> str:
    """Return a description of a fault without the value, which may be a key."""
    *parents, last = [str(part) for part in error["loc"][:3]] or [""]
    at = ".".join([*parents, last])
    if not last:
        return "which is not a file of tenants; it begins with the line tenants:"
    if error["type"] == "extra_forbidden":
        model: type[BaseModel] = _File if not parents else _Terms if parents[0] == "tiers" else _Tenant
        known = list(model.model_fields)
        may_be = " and ".join(known) if not parents else "one of " + ", ".join(known)
        return f"in which {at} is unknown; {may_be} may be there"
    if error["type"] in ("model_type", "dict_type"):
        return f"in which {at} holds no settings; write them as {{name: value}}"
    if error["type"] == "string_type":
        return f"in which {at} is no text; put it in quotes"
    return f"in which {at} is wrong: {error['msg']}"


def _resolve(entry: _Tenant, tiers: dict[str, _Terms]) -> Tenant:
    if entry.tier is not None and entry.tier not in tiers:
        raise ValueError(
            f"in which tenant {entry.name} is of tier {entry.tier!r}; tiers are {', '.join(tiers) or 'none'}"
        )
    terms = {} if entry.tier is None else tiers[entry.tier].model_dump(exclude_unset=True)
    terms |= entry.model_dump(include=set(_Terms.model_fields), exclude_unset=True)
    return Tenant(name=entry.name, digests=tuple(_digests(entry)), tier=entry.tier or "", **terms)


def _digests(entry: _Tenant) -> list[bytes]:
    keys = [key.get_secret_value() for key in entry.key]
    for variable in entry.key_env:
        if not os.environ.get(variable):
            raise ValueError(f"in which the key of tenant {entry.name} is the variable {variable}, which is not set")
        keys.append(os.environ[variable])
    if not all(key and key == key.strip() and key.isprintable() for key in keys):
        odd = "is empty, or begins or ends with a space, or has a character that no client sends"
        raise ValueError(f"in which a key of tenant {entry.name} {odd}")
    found = [sha256(key.encode()).digest() for key in keys]
    for text in entry.key_sha256:
        if len(text) != 64 or not set(text.lower()) <= set("0123456789abcdef"):
            raise ValueError(f"in which key_sha256 of tenant {entry.name} is not 64 hexadecimal digits")
        if bytes.fromhex(text) == _NOTHING:
            raise ValueError(
                f"in which key_sha256 of tenant {entry.name} is the digest of an empty key; make it of the key itself"
            )
        found.append(bytes.fromhex(text))
    if not found:
        raise ValueError(f"in which tenant {entry.name} has no key; give it key, key_env or key_sha256")
    return found


def _refuse_twins(tenants: tuple[Tenant, ...], api_keys: Iterable[str]) -> None:
    for name, count in Counter([tenant.name for tenant in tenants]).items():
        if count > 1 or name == DEFAULT:
            why = "is there twice" if count > 1 else "is reserved for callers that are no tenant of the file"
            raise ValueError(f"in which the name {name} {why}; choose another")
    owners = {sha256(key.encode()).digest(): "--api-key" for key in api_keys}
    for tenant in tenants:
        for digest in tenant.digests:
            other = owners.setdefault(digest, tenant.name)
            if other is not tenant.name:
                raise ValueError(f"in which {other} and {tenant.name} have the same key; give each its own")


CountRefusal = Callable[[str, str], None]  # the tenant and the limit


class Account:
    """A tenant's open requests, and the tokens it may still spend."""

    def __init__(
        self, tenant: Tenant, count_refusal: CountRefusal, clock: Callable[[], float], cache_owner: str = ""
    ) -> None:
        self.tenant = tenant
        self.cache_owner = cache_owner  # "" is the operator's part of the prefix cache
        self.num_open = 0
        self._count_refusal = count_refusal
        self._clock = clock
        self._tokens = float(tenant.tokens_per_minute or 0)  # in the bucket; a negative number is a debt
        self._filled_s = clock()
        self._retry_times = RetryTimes()
        self._num_opened, self._num_spent = 0, 0  # requests, and their tokens

    def change(self, tenant: Tenant) -> None:
        """Change the terms; a debt stays."""
        tokens, limit = self._fill(), float(tenant.tokens_per_minute or 0)
        self._tokens = limit if self.tenant.tokens_per_minute is None else min(tokens, limit)
        self.tenant = tenant

    def _fill(self) -> float:
        now, rate = self._clock(), self.tenant.tokens_per_minute or 0
        self._tokens = min(self._tokens + (now - self._filled_s) * rate / 60, rate)
        self._filled_s = now
        return self._tokens

    def check(self, request_s: float, *, is_counted: bool = False) -> None:
        """Raise OverloadedError at a limit; requests take `request_s` on average."""
        tenant, limit = self.tenant, self.tenant.max_concurrent_requests
        if limit is not None and self.num_open >= limit and not is_counted:
            self._count_refusal(tenant.name, "concurrent_requests")
            why = f"Tenant {tenant.name} has {limit} requests open, the most it may have"
            raise self._refusal(why, 0.0, request_s / limit)
        rate = tenant.tokens_per_minute
        if rate is not None and (tokens := self._fill()) <= 0:
            self._count_refusal(tenant.name, "tokens_per_minute")
            why = f"Tenant {tenant.name} has used up its {rate} tokens a minute"
            mean = self._num_spent / max(self._num_opened, 1)
            raise self._refusal(why, (1 - tokens) * 60 / rate, mean * 60 / rate, num_before=0)

    def _refusal(self, why: str, wait_s: float, each_s: float, num_before: int = 1) -> OverloadedError:
        """Return the refusal; each client that returns earlier adds `each_s` to the wait."""
        wait_s = self._retry_times.give(self._clock(), wait_s + num_before * each_s, each_s)
        return OverloadedError(f"{why}; try again in {ceil(wait_s)} s.", retry_after_s=wait_s)

    def room_for_lines(self, num_running: int) -> float:
        """Return how many more batch lines may begin; one request is left to clients."""
        if self.tenant.tokens_per_minute is not None and self._fill() <= 0:
            return 0
        limit = self.tenant.max_concurrent_requests
        return inf if limit is None else max(max(limit - 1, 1) - max(self.num_open, num_running), 0)

    def sign(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests with the account's name, weight and cache owner."""
        name, weight, cache_owner = self.tenant.name, self.tenant.weight, self.cache_owner
        return [replace(request, tenant=name, weight=weight, cache_owner=cache_owner) for request in requests]

    def charge_prompts(self, requests: Sequence[Request]) -> None:
        """Charge requests that are submitted together for their prompts."""
        self._num_opened += 1
        self.charge(sum([len(request.prompt) for request in requests]))

    def charge(self, num_tokens: int) -> None:
        """Charge tokens: of prompts, or drawn, of a search in all beams."""
        self._tokens = self._fill() - num_tokens
        self._num_spent += num_tokens

    def headers(self, num_drawn_tokens: int = 0) -> dict[str, str]:
        """Return the limits in OpenAI's headers, less the tokens drawn so far."""
        limits: dict[str, str] = {}
        if (most := self.tenant.max_concurrent_requests) is not None:
            limits["x-ratelimit-limit-requests"] = str(most)
            limits["x-ratelimit-remaining-requests"] = str(max(most - self.num_open, 0))
        if (rate := self.tenant.tokens_per_minute) is not None:
            tokens = self._fill() - num_drawn_tokens
            limits["x-ratelimit-limit-tokens"] = str(rate)
            limits["x-ratelimit-remaining-tokens"] = str(max(int(tokens), 0))
            limits["x-ratelimit-reset-tokens"] = f"{(rate - tokens) * 60 / rate:.3f}s"
        return limits


class Tenancy:
    """All accounts, by key and by name."""

    def __init__(
        self,
        api_keys: Iterable[str],
        tenants: Sequence[Tenant] | None,
        count_refusal: CountRefusal,
        clock: Callable[[], float] = time.monotonic,
        *,
        shares_prefixes: bool = False,
    ) -> None:
        """If `shares_prefixes`, all tenants share the prefix cache."""
        self._shares_prefixes = shares_prefixes
        self.has_file = tenants is not None
        self._api_keys = [sha256(key.encode()).digest() for key in api_keys]
        self._count_refusal = count_refusal
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._owners: list[tuple[bytes, Account]] = []  # by the digests of their keys
        self.replace(tenants or ())

    @property
    def needs_key(self) -> bool:
        return bool(self._owners)

    @property
    def owners(self) -> Mapping[str, Account | None]:
        """Return each owner's account; without a file there is one owner, without one."""
        return self._accounts if self.has_file else {DEFAULT: None}

    def replace(self, tenants: Iterable[Tenant]) -> None:
        """Replace the tenants. Those that stay keep their open requests and their debts."""
        before, self._accounts = self._accounts, {}
        for tenant in (Tenant(name=DEFAULT), *tenants):
            account = before.get(tenant.name)
            if account is None:
                cache_owner = "" if self._shares_prefixes or tenant.name == DEFAULT else tenant.name
                account = Account(tenant, self._count_refusal, self._clock, cache_owner)
            else:
                account.change(tenant)
            self._accounts[tenant.name] = account
        self._owners = [(digest, self._accounts[DEFAULT]) for digest in self._api_keys]
        for account in self._accounts.values():
            self._owners += [(digest, account) for digest in account.tenant.digests]

    def find(self, keys: Iterable[str]) -> Account | None:
        """Return the account that owns one of these keys, in constant time."""
        shown = [sha256(key.encode("latin-1")).digest() for key in keys if key]  # an empty key is no key
        found = [account for digest in shown for known, account in self._owners if hmac.compare_digest(digest, known)]
        return found[0] if found else None
