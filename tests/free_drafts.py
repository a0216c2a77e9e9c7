"""Drafts that cost nothing, so they are drafted. A start measures what they cost, and beside other work finds that none pays.

`python -m tests.free_drafts` is `quire` with this cost.
"""

from __future__ import annotations

import sys

from engine.core.config import DraftCosts

FREE_DRAFTS = DraftCosts(plain=((1, 1.0),), checking=((1, 1.0),), drafting=((1, 0.0),))

if __name__ == "__main__":
    from engine.startup import speculation
    from server.cli import main

    speculation.measure_draft_costs = lambda *_, **__: FREE_DRAFTS  # type: ignore[assignment]
    sys.exit(main())
