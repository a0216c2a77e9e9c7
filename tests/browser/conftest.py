"""A headless Chromium, and pages in it that fail a test on any error, warning or breach of the policy they report."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Response, expect, sync_playwright

from tests.http.harness import Live
from tests.patience import PATIENCE_S

expect.set_options(timeout=PATIENCE_S * 1000)

# The headless shell is the same engine without the browser around it: a page takes 0.6 s of a core instead of 1.5.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")  # no longer: while Playwright is open, no other test of this thread can run a loop
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs a browser: no chromium is installed (on Debian: apt-get install chromium-headless-shell)")
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM) as browser:
        yield browser


@pytest.fixture
def serve() -> Iterator[Callable[..., Live]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Live(**options).serving())


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """`open_page(live, color_scheme="dark")`. What the browser complains of is an error; refusals of keys are expected."""
    complaints: list[str] = []

    def note_response(response: Response) -> None:
        if response.status >= 400 and response.status != 401:
            complaints.append(f"{response.status} {response.url}")

    with ExitStack() as stack:

        def open_(live: Live, **options: Any) -> Page:
            context = stack.enter_context(browser.new_context(**options))
            page = context.new_page()
            page.set_default_timeout(PATIENCE_S * 1000)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda said: complaints.append(said.text) if "status of 401" not in said.text else None)
            page.on("response", note_response)
            page.goto(live.url)
            return page

        yield open_
    assert complaints == []
