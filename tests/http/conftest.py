"""Fixtures of the HTTP tests: one served application that most tests share, and any other that a test asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from harness import NOT_SERVED, PLACE, Live

# Their tests run twice: with the engine here, and in another process. ENGINE_PLACE=process is for all tests.
TWICE = ("test_lifecycle", "test_deadlines_http", "test_adapters_http", "test_structured_http")
ONCE = ("test_what_cannot_be_is_a_400_that_says_where",)  # of them, what no engine comes to see


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_twice = metafunc.module.__name__ in TWICE and metafunc.function.__name__ not in ONCE
    if "place" in metafunc.fixturenames and is_twice and PLACE == "thread":
        metafunc.parametrize("place", ["thread", "process"], scope="session")


@pytest.fixture(autouse=True)
def _end_of_processes() -> Iterator[None]:
    """An application that a test only makes has an engine all the same."""
    yield
    while NOT_SERVED:
        NOT_SERVED.pop().close()


@pytest.fixture(scope="session")
def place() -> str:
    return PLACE


@pytest.fixture(scope="session")
def shared_server(place: str) -> Iterator[Live]:
    with Live(place=place).serving() as live:
        yield live


@pytest.fixture
def live(shared_server: Live) -> Iterator[Live]:
    """The shared server; after the test it must be idle and its books must balance."""
    yield shared_server
    shared_server.check_idle()


@pytest.fixture
def serve(place: str) -> Iterator[Callable[..., Live]]:
    """Serve another application for this test: `serve(api_keys=("k",))`."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Live(**{"place": place, **options}).serving())


@pytest.fixture(scope="session")
def shared_client(shared_server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared_server.url) as client:
        yield client


@pytest.fixture
def http(live: Live, shared_client: httpx.Client) -> httpx.Client:
    """A client of the shared server."""
    return shared_client


@pytest.fixture
def post(http: httpx.Client) -> Callable[..., dict[str, Any]]:
    """POST fields as JSON to a path that must answer 200."""

    def send(path: str, **fields: Any) -> dict[str, Any]:
        response = http.post(path, json=fields)
        assert response.status_code == 200, response.text
        return response.json()

    return send
