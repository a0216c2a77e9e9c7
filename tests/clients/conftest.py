"""One daemon for most clients: the real `quire serve` with the default model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemons import serving

SMALL = ("--served-model-name", "smol", "--max-model-len", "2048", "--kv-cache-memory-bytes", "128MiB")


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """Where the daemon's API begins, as clients want it."""
    with serving(*SMALL) as url:
        yield url + "/v1"
