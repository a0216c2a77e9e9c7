"""What the layers of the application leave for each other about one HTTP request. Event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from server.protocol.errors import STATE, ApiError
from server.telemetry.request_log import RequestRecord
from server.tenancy.tenancy import Account
from server.tenancy.tenant_file import DEFAULT


@dataclass(slots=True, eq=False)
class RequestState:
    """Made by the outermost middleware, or for a line of a batch."""

    request_id: str
    begun_s: float | None = None  # Unix time of its arrival; None of a batch line
    is_anthropic: bool = False  # a request of Anthropic's API
    account: Account | None = None  # left by the guard
    is_open: bool = False  # the account counts it
    ignored_fields: Sequence[str] = ()
    record: RequestRecord | None = None  # of one that runs the engine
    error: ApiError | None = None  # that answered it

    @property
    def owner(self) -> str:
        """Return the owner of what the request stores, see server/tenancy/tenancy.py."""
        return DEFAULT if self.account is None else self.account.tenant.name

    def enter(self, request_s: float) -> None:
        """Count the request on its account, once; requests take `request_s` on average.

        Raises OverloadedError at a limit, also if its tokens were used up meanwhile.
        """
        if self.account is None:
            return
        self.account.check(request_s, is_counted=self.is_open)
        if not self.is_open:
            self.is_open = True
            self.account.num_open += 1

    def leave(self) -> None:
        """Count the request as open no longer. Idempotent."""
        if self.is_open and self.account is not None:
            self.is_open = False
            self.account.num_open -= 1


def state_of(scope: Scope) -> RequestState:
    """Return the state of a request."""
    state: Any = scope[STATE]
    assert isinstance(state, RequestState)
    return state
