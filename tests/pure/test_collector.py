"""What start-up made is out of the garbage collector's sight, and what comes later is not."""

from __future__ import annotations

import gc
import weakref

from server.serve import hide_from_collector


class Node:
    """Something that can be part of a cycle."""


def test_only_what_comes_later_is_looked_through() -> None:
    early = [Node()]
    gc.disable()  # as start-up does
    try:
        hide_from_collector()
        assert gc.isenabled()
        assert not any(seen is early for seen in gc.get_objects())
        later = Node()
        later.itself = later  # type: ignore[attr-defined]
        gone = weakref.ref(later)
        del later
        gc.collect()
        assert gone() is None
    finally:
        gc.enable()  # what the tests have made stays out of sight, as after their collection
