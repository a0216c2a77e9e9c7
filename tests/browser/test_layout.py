"""The page's layout and colours: widths of screens, contrast, names of controls, the keyboard."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

import server
from tests.http.harness import Live
from tests.patience import PATIENCE_S

Serve = Callable[..., Live]
Open = Callable[..., Page]
WIDTHS = (320, 390, 768, 1280, 1600)
WIDE = "\n\n".join(
    ("w" * 400, "# " + "heading" * 40, "`" + "c" * 300 + "`", "https://example.com/" + "p" * 300,
     "| " + " | ".join(["column" * 4] * 12) + " |\n" + "|---" * 12 + "|\n" + "| cell " * 12 + "|",
     "```\n" + "code" * 100 + "\n```", "> " * 8 + "q" * 200, "- a\n  - b\n    - c\n      - " + "d" * 200),
)  # fmt: skip
# What is wider than the window, or than a box around it that does not scroll.
OVERFLOWING = """() => {
  const wide = [...document.querySelectorAll("body *")].filter((each) => {
    const { left, right, width } = each.getBoundingClientRect();
    return width && each.checkVisibility() && (left < -1 || right > innerWidth + 1)
      && !each.closest("pre, .table, .unseen, .skip");
  });
  const page = document.documentElement.scrollWidth > innerWidth ? ["the page"] : [];
  return [...page, ...wide.map((each) => each.outerHTML.slice(0, 120))];
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, canvas, a, summary")].filter(
  (each) => !(each.labels?.length || each.ariaLabel || each.textContent.trim())).map((each) => each.outerHTML)"""


def events(content: str, reasoning: str = "") -> str:
    """Return a streamed answer."""
    call = {"index": 0, "id": "c", "function": {"name": "n" * 80, "arguments": json.dumps({"a": "v" * 200})}}
    deltas = [{"reasoning_content": reasoning}, {"content": content}, {"tool_calls": [call]}]
    usage = {"prompt_tokens": 123_456, "completion_tokens": 98_765, "prompt_tokens_details": {"cached_tokens": 123_000}}
    chunks = [{"id": "chatcmpl-1", "choices": [{"delta": delta}], "usage": usage} for delta in deltas]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """A page whose model gives wide answers."""
    with Live().serving() as live, browser.new_context(reduced_motion="reduce") as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)

        def answer(route: Route) -> None:
            route.fulfill(content_type="text/event-stream", body=events(WIDE, WIDE))

        page.route("**/v1/chat/completions", answer)
        httpx.post(f"{live.url}/v1/completions", json={"prompt": 1, "model": "m" * 500})
        httpx.get(f"{live.url}/{'p' * 300}", headers={"user-agent": "a" * 300})
        page.goto(live.url)
        yield page


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate(OVERFLOWING) == []
    box = page.get_by_label("Message", exact=True)
    box.fill("q" * 300)
    box.press("Enter")
    expect(page.locator(".call")).to_have_count(1)
    page.locator(".thoughts summary").click()
    assert page.evaluate(OVERFLOWING) == []
    for name, shown in (("Requests", page.locator(".request").first), ("Engine", page.locator("#pool"))):
        page.get_by_role("button", name=name, exact=True).click()
        expect(shown).to_be_visible()
        assert page.evaluate(OVERFLOWING) == []
    if width <= 940:
        expect(box).to_be_hidden()
        page.get_by_role("button", name="Chat", exact=True).click()
    expect(box).to_be_visible()
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate(OVERFLOWING) == []
    page.keyboard.press("Escape")
    if width < 1240:
        page.get_by_role("button", name="Chats", exact=True).click()
    expect(page.locator("#history-list .open-chat").first).to_be_visible()
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate(NAMELESS) == []
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".welcome")).to_be_visible()


def test_a_notice_covers_neither_the_field_nor_stop(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(step_s=0.2), viewport={"width": 390, "height": 420})  # as with a keyboard on the screen
    page.evaluate("import('./page/notices.js').then(({ notify }) => notify('long '.repeat(200), { isError: true }))")
    expect(page.locator("#notice")).to_be_visible()
    box = page.get_by_label("Message", exact=True)
    box.fill("hello")
    box.press("Enter")
    page.get_by_role("button", name="Stop").click()  # which Playwright does only if nothing is over it
    boxes = [page.locator(each).bounding_box() for each in ("#notice", ".composer", ".chat > header")]
    (notice, composer, header) = [(each["y"], each["y"] + each["height"]) for each in boxes if each is not None]
    assert notice[1] <= header[0] < header[1] <= composer[0] < composer[1] <= 420
    assert page.evaluate(OVERFLOWING) == []


def test_a_chat_is_held_by_keyboard_alone(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(), viewport={"width": 1300, "height": 800})
    expect(page.locator("#model-name")).to_have_text("parrot")
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent.trim()"))
        outline = page.evaluate("getComputedStyle(document.activeElement.closest('.composer') ?? document.activeElement)"
                                "[document.activeElement.closest('.composer') ? 'boxShadow' : 'outlineStyle']")  # fmt: skip
        assert outline != "none", f"the focus on {seen[-1]} cannot be seen"
        if seen[-1] == "Message":
            break
    assert {"Skip to the chats", "Chats", "New chat", "Settings", "More"} <= set(seen)
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .text")).to_have_text("hello")
    page.get_by_role("button", name="More").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("menuitem", name="Delete")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="More")).to_be_focused()


# What a field shows while it is empty, and is wider than the field.
CUT = """() => [...document.querySelectorAll("#settings input[placeholder]")].filter((each) => {
  const style = getComputedStyle(each), canvas = document.createElement("canvas").getContext("2d");
  canvas.font = style.font;
  const room = each.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return canvas.measureText(each.placeholder).width > room;
}).map((each) => each.name)"""


@pytest.mark.parametrize("width", WIDTHS)
def test_settings_show_the_whole_of_what_they_are_by_default(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.get_by_role("button", name="Chat", exact=True).click() if width <= 940 else None
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(page.get_by_label("Max tokens")).to_be_visible()
    assert page.evaluate(CUT) == []
    page.get_by_role("button", name="Done").click()


# -- contrast ----------------------------------------------------------------------------------------------------------

TEXTS = ("ink", "soft", "faint", "accent", "danger")
BACKGROUNDS = ("paper", "card", "sunk", "bubble", "code")
PAIRS = [
    *itertools.product(TEXTS[:3], BACKGROUNDS),
    *itertools.product(TEXTS[3:], BACKGROUNDS[:3]),
    *((f"code-{kind}", "code") for kind in ("comment", "string", "number", "keyword")),
    ("accent-ink", "accent"),
    ("card", "ink"),
]
BOUNDARIES = [("line-strong", "card"), ("line-strong", "paper"), ("accent", "paper"), ("accent", "card")]


def colours(theme: str) -> dict[str, str]:
    """Return the colours of a theme, by name."""
    sheet = (Path(server.__file__).parent / "page" / "style.css").read_text("utf-8")
    pairs = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", sheet)
    return {name: dark if theme == "dark" else light for name, light, dark in pairs}


def luminance(colour: str) -> float:
    """Return WCAG's relative luminance."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return WCAG's contrast ratio."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_and_boundaries_have_contrast(theme: str) -> None:
    assert round(contrast("#000000", "#ffffff"), 3) == 21
    named: dict[str, Any] = colours(theme)
    for pairs, least in ((PAIRS, 4.5), (BOUNDARIES, 3)):
        found = {pair: round(contrast(named[pair[0]], named[pair[1]]), 2) for pair in pairs}
        assert {pair: ratio for pair, ratio in found.items() if ratio < least} == {}
