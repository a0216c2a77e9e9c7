"""The headers that a request of ours carries so that its receiver continues the trace; none without traces."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

# Set for the task of an HTTP request, and for the tasks that it starts.
TRACE_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("trace_headers", default={})  # noqa: B039 - never changed
