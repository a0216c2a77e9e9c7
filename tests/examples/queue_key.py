"""A policy without state: shorter prompts first, by at most ten seconds of waiting."""

from __future__ import annotations

from engine.core.types import Request

SECONDS_A_TOKEN = 0.01
MAX_HANDICAP_S = 10.0


def short_prompts(request: Request) -> float:
    """Return a virtual arrival time: the real one, and a bounded handicap."""
    return request.arrival_s + min(SECONDS_A_TOKEN * len(request.prompt), MAX_HANDICAP_S)
