"""Take the pictures of the page in the documents, from a running daemon.

quire serve &
python -m tests.browser.pictures http://127.0.0.1:8000 docs
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.conftest import CHROMIUM
from tests.patience import PATIENCE_S

SIZE: Any = {"width": 1440, "height": 960}
SUBJECTS = ("the sea", "a lost dog", "bread", "a night train", "rain")
QUESTIONS = (
    ("Write a Python function that adds two numbers.", "What is photosynthesis?"),
    ("Give me three tips for sleeping well.", "Write a short poem about the sea."),
)


def load(url: str) -> None:
    """Ask for stories, so that the engine has something to show."""

    def ask(subject: str) -> None:
        message = {"role": "user", "content": f"Write a long story about {subject}."}
        body = {"messages": [message], "max_tokens": 1000, "min_tokens": 900, "temperature": 0.3}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=None)

    for subject in SUBJECTS:
        Thread(target=ask, args=(subject,), daemon=True).start()


def take(page: Page, url: str, path: Path) -> None:
    """Ask twice in two chats under load, and take a picture before the second answers are complete."""
    page.goto(url)
    expect(page.locator("#model-name")).not_to_be_empty()
    page.get_by_role("button", name="Chats", exact=True).click()  # the list goes: a picture has little room
    page.get_by_role("button", name="More").click()
    page.get_by_role("menuitem", name="Add a chat beside it").click()
    load(url)
    for turn in (0, 1):
        for index, questions in enumerate(QUESTIONS):
            chat = page.locator(".chat").nth(index)
            expect(chat.get_by_role("button", name="Send")).to_be_visible()
            chat.get_by_label("Message", exact=True).fill(questions[turn])
            chat.get_by_role("button", name="Send").click()
    for index in range(len(QUESTIONS)):
        answer = page.locator(".chat").nth(index).locator(".answer .text").nth(1)
        expect(answer).to_have_text(re.compile(".{200}", re.DOTALL))
    page.screenshot(path=path)


def main(url: str, folder: str) -> None:
    """Take one picture of each theme."""
    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM) as browser:
        for scheme in ("light", "dark"):
            with browser.new_context(viewport=SIZE, color_scheme=scheme) as context:  # type: ignore[arg-type]
                take(context.new_page(), url, Path(folder) / f"page-{scheme}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
