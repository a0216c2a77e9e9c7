"""Tenants' accounts: owners of stored objects, and limits. Event loop.

With --tenants the key decides the tenant, so inventing users gains no share. Without, all callers are trusted alike, and the
field `user` (or `safety_identifier`) distinguishes them.

Everything that outlives a request (its record, stored responses, files, batches) belongs to an owner, the name of a
tenant, and is invisible to all others. Keys of --api-key, and every client of a server without --tenants, are the owner
DEFAULT, a name that no tenant can have.

A request counts as open from before its body is read, so that one over a limit is refused unread, until it ends.
A limit on tokens is a bucket that fills at its rate and holds a minute's worth. A prompt is charged when its request
arrives, the answer when it ends; a tenant in debt waits until the bucket has filled again. So no request is refused for
tokens that it might generate, and the rate holds on average.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from math import ceil, inf

from engine.core.errors import OverloadedError
from engine.core.scheduling.admission import RetryTimes
from engine.core.types import Request
from server.tenancy.tenant_file import DEFAULT, Tenant

CountRefusal = Callable[[str, str], None]  # the tenant and the limit


class Account:
    """A tenant's open requests, and the tokens it may still spend."""

    def __init__(
        self, tenant: Tenant, count_refusal: CountRefusal, clock: Callable[[], float], cache_owner: str = ""
    ) -> None:
        self.tenant = tenant
        self._cache_owner = cache_owner  # "" is the operator's part of the prefix cache
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
        name, weight, cache_owner = self.tenant.name, self.tenant.weight, self._cache_owner
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
