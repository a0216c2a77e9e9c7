"""Tests that pass on any machine: no fixed port, no deadline, no bound on a wait but the one that all share."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from hypothesis import settings

from tests.patience import PATIENCE_S

TESTS = Path(__file__).parents[1]
WITH_HOSTS = {
    "test_cross_site.py",
    "pages.py",
    "pictures.py",
    "test_foreign.py",
    "test_traces.py",
    "test_config.py",
    "test_kv_events.py",
    "nginx.py",
    "test_kubernetes.py",
}  # of headers, settings and the documents' text; never dialled
HOST = r"(?:127\.0\.0\.1|localhost|\[::1\]):[1-9]"


def test_libraries_have_no_deadline_of_their_own() -> None:
    assert settings.default.deadline is None
    with httpx.Client() as client:
        assert client.timeout == httpx.Timeout(PATIENCE_S)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(HOST, id="a fixed port"),
        pytest.param(r"\bdeadline=[^N]", id="a deadline of Hypothesis"),
        # Below a second it is what the test is about: a client that gives up.
        pytest.param(r"(?:\btimeout=|\.wait\(|\.join\(|\.result\(|\.acquire\()[1-9]", id="a bound on a wait"),
    ],
)
def test_no_test_races_the_clock_or_another_process(pattern: str) -> None:
    found = [
        f"{path.relative_to(TESTS)}: {line.strip()}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(pattern, line) and not (path.name in WITH_HOSTS and re.search(HOST, line))
    ]
    assert found == []
