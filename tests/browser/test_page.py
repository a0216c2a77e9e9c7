"""The page in a real browser, over the real application and a model that repeats what it is told (tests/http/harness.py)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route, expect

from engine.core.config import SchedulerConfig
from tests.http.harness import Live, eventually

Serve = Callable[..., Live]
Open = Callable[..., Page]
MANY = 500  # tokens: minutes, at the steps that these tests have
PROMPT = "no end"  # as a completion it is answered with letters until max_tokens
CENSUS = """canvas => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3]) colours.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
  }
  return colours.size;
}"""  # how many colours are on it


def card(page: Page, chat: int = 1) -> Locator:
    return page.locator(".chat").nth(chat - 1)


def ask(page: Page, text: str, chat: int = 1) -> None:
    box = card(page, chat).get_by_label("Message", exact=True)
    box.fill(text)
    box.press("Enter")


def set_up(page: Page, chat: int = 1, api: str = "chat", **fields: str) -> None:
    """Change settings of a chat, named as their labels begin."""
    card(page, chat).get_by_role("button", name="Settings").click()
    page.get_by_role("combobox", name="API").select_option(api)
    for name, value in fields.items():
        page.get_by_label(name.replace("_", " "), exact=True).fill(value)
    page.get_by_role("button", name="Done").click()


def ask_without_end(page: Page, chat: int = 1) -> Locator:
    set_up(page, chat, api="completion", Max_tokens=str(MANY))
    ask(page, PROMPT, chat)
    answer = card(page, chat).locator(".answer .text")
    expect(answer).to_have_text(re.compile("[a-z]{3}"))
    return answer


def test_a_question_is_answered_with_its_figures_and_its_command(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(step_s=0.005))
    set_up(page, Temperature="0", Seed="7")
    ask(page, "Who goes 'there'?")
    expect(card(page).locator(".answer .text")).to_have_text("Who goes 'there'?")
    expect(card(page).locator(".facts")).to_have_text(
        re.compile(r"^18\stokens\s+·\s+[\d,]+\stokens/s\s+·\s+TTFT\s[\d.]+\sm?s$")
    )
    card(page).get_by_role("button", name="Show as curl command").click()
    command = card(page).locator(".command").inner_text()
    for part in ("/v1/chat/completions'", '"temperature":0,', '"seed":7', "Who goes '\\''there'\\''?"):
        assert part in command
    assert "Authorization" not in command
    card(page).get_by_role("combobox", name="Model").select_option("bird")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "And now?")  # the history goes along, and the parrot repeats that too
    assert asked.value.post_data_json["model"] == "bird"
    expect(card(page).locator(".answer .text").nth(1)).to_have_text("Who goes 'there'?" * 2 + "And now?")


def test_the_view_of_the_engine_shows_the_model_that_is_chosen(serve: Serve, open_page: Open) -> None:
    """Of several in one daemon, with what has become of each."""
    page = open_page(serve())
    shown = page.get_by_role("combobox", name="Model on show")
    expect(shown.locator("option")).to_have_text(["parrot: loaded", "bird: loaded"])
    for name in ("bird", "parrot"):
        with page.expect_request(re.compile(rf"/v1/engine/live\?.*&model={name}$")):
            shown.select_option(name)


def test_the_live_view_follows_several_chats(serve: Serve, open_page: Open) -> None:
    live = serve(step_s=0.2)
    page = open_page(live)
    expect(page.locator("#running")).to_have_text("0")
    quiet = page.locator("#pool").evaluate(CENSUS)
    page.get_by_role("button", name="More").click()
    page.get_by_role("menuitem", name="Add a chat beside it").click()
    page.get_by_label("Send to every chat").check()
    for chat in (1, 2):
        set_up(page, chat, api="completion", Max_tokens=str(MANY))
    ask(page, PROMPT)
    expect(page.locator("#running")).to_have_text("2")
    expect(page.locator("#status")).to_have_text("computing")
    expect(page.locator(".sequence")).to_have_count(2)
    expect(page.locator("#rate")).to_have_text(re.compile(r"^[1-9]\d*$"))
    expect(page.locator("#ttft")).to_have_text(re.compile(r"\d m?s$"))
    expect(page.locator("#tpot")).to_have_text(re.compile(r"\d m?s$"))
    eventually(lambda: page.locator("#pool").evaluate(CENSUS) > quiet)
    held = page.locator("#history-note")
    expect(held).to_have_text(re.compile("^[1-9]"))
    owns = [card(page, chat).evaluate("chat => chat.style.getPropertyValue('--own')") for chat in (1, 2)]
    assert len(set(owns)) == 2, "each chat wears its sequence's colour"
    page.locator(".sequence").first.hover()
    for chat in (1, 2):
        card(page, chat).get_by_role("button", name="Stop").click()
    expect(page.locator("#running")).to_have_text("0")
    expect(held).to_have_text(re.compile("^0 held"))
    expect(page.locator(".sequence:not(.ended)")).to_have_count(0)
    expect(page.locator(".sequence.ended")).to_have_count(2)
    live.check_idle()


def test_an_answer_can_be_stopped(serve: Serve, open_page: Open) -> None:
    live = serve(step_s=0.2)
    page = open_page(live)
    for how in ("button", "escape", "delete", "close"):
        before = live.engine.stats.generation_tokens
        if how == "close":
            page.get_by_role("button", name="More").click()
            page.get_by_role("menuitem", name="Add a chat beside it").click()
        answer = ask_without_end(page)
        if how == "button":
            card(page).get_by_role("button", name="Stop").click()
        elif how == "escape":
            card(page).get_by_label("Message", exact=True).press("Escape")
        elif how == "delete":
            card(page).get_by_role("button", name="More").click()
            page.get_by_role("menuitem", name="Delete").click()
        else:
            card(page).get_by_role("button", name="Close this chat").click()
            expect(page.locator(".chat")).to_have_count(1)
        live.check_idle()  # the engine has let go of it, long before its last token
        assert live.engine.stats.generation_tokens - before < MANY
        if how in ("button", "escape"):
            expect(card(page).locator(".facts")).to_have_text(re.compile("stopped$"))
            assert len(answer.inner_text()) >= 3
            expect(card(page).get_by_role("button", name="Send")).to_be_enabled()
            page.get_by_role("button", name="New chat").click()


def test_a_question_is_answered_before_the_list_of_models_has_arrived(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(step_s=0.2))
    held: list[Route] = []
    page.route("**/v1/models", lambda route: held.append(route))  # noqa: PLW0108 - Playwright inspects it
    page.reload()
    ask_without_end(page)
    assert page.locator("#settings [name=model]").input_value() == ""
    card(page).get_by_role("button", name="Stop").click()
    for route in held:
        route.continue_()


def test_a_wrong_key_is_told_and_a_right_one_kept_in_the_tab(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(api_keys=("rïght→",)))
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    for key, error in (("wrong", "The server does not know this key"), ("rïght→", None)):
        page.get_by_role("textbox", name="API key").fill(key)
        page.get_by_role("button", name="Use this key").click()
        if error:
            expect(page.get_by_role("alert")).to_contain_text(error)
    expect(dialog).to_be_hidden()
    expect(page.locator("#model-name")).to_have_text("parrot")
    expect(page.locator("#running")).to_have_text("0")
    ask(page, "hello")
    expect(card(page).locator(".answer .text")).to_have_text("hello")
    card(page).get_by_role("button", name="Show as curl command").click()
    command = card(page).locator(".command").inner_text()
    assert "$QUIRE_API_KEY" in command
    assert "rïght→" not in command
    page.reload()
    expect(page.locator("#model-name")).to_have_text("parrot")
    expect(dialog).to_be_hidden()
    stored = page.evaluate("[JSON.stringify({...sessionStorage}), JSON.stringify({...localStorage})]")
    assert ["rïght→" in each for each in stored] == [True, False]


def test_a_refusal_is_shown_where_the_answer_would_be(serve: Serve, open_page: Open) -> None:
    page = open_page(serve())
    # The browser itself tells of the status of a refused request; what is asked here is refused within a stream.
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        content_type="text/event-stream",
        body=': ping\n\ndata: {"error": {"message": "The device is lost.", "code": "engine_dead"}}\n\ndata: [DONE]\n\n',
    ))  # fmt: skip
    ask(page, "hello")
    expect(card(page).get_by_role("alert")).to_have_text("The device is lost.")
    expect(card(page).get_by_role("button", name="Send")).to_be_enabled()


def test_a_wrong_setting_is_reported_before_anything_is_sent(serve: Serve, open_page: Open) -> None:
    page = open_page(serve())
    set_up(page, Temperature="9")
    expect(page.get_by_label("Temperature")).to_be_focused()
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Tools").fill("[{}]")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Tools")).to_be_focused()
    page.get_by_role("button", name="Reset").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_system_chooses_the_theme_until_the_user_does(serve: Serve, open_page: Open, scheme: Any) -> None:
    page = open_page(serve(), color_scheme=scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    is_dark = "matchMedia('(prefers-color-scheme: dark)').matches"
    assert page.evaluate(is_dark) == (scheme == "dark")
    before = page.evaluate(background)
    page.get_by_role("button", name="Light theme" if scheme == "dark" else "Dark theme").click()
    after = page.evaluate(background)
    assert after != before
    page.reload()
    assert page.evaluate(background) == after
    assert (max(map(int, re.findall(r"\d+", before))) < 128) == (scheme == "dark")


BAND = "band => [...band.children].map(part => [part.title, part.getBoundingClientRect().width])"


def milliseconds(title: str) -> float:
    number, unit = title.split()[1:]
    return float(number) * {"ms": 1, "s": 1000}[unit]


def test_a_sequence_shows_its_journey_while_it_runs_and_afterwards(serve: Serve, open_page: Open) -> None:
    live = serve(step_s=0.2)
    page = open_page(live)
    answer = ask_without_end(page)
    row = page.locator(".sequence").first
    row.focus()
    page.keyboard.press("Enter")
    journey = page.locator("#journey")
    expect(journey).to_be_visible()
    expect(journey.locator("li").nth(1)).to_contain_text("admitted with")
    expect(journey.locator("li").nth(2)).to_contain_text("of prefill")
    expect(journey.locator("li").last).to_contain_text("running:")
    card(page).get_by_role("button", name="Stop").click()
    expect(journey.locator("li").last).to_contain_text("ended:")
    parts = journey.locator(".band").evaluate(BAND)
    assert [title.partition(":")[0] for title, _ in parts] == ["waiting", "prefill", "decoding"]
    widths, times = [width for _, width in parts], [milliseconds(title) for title, _ in parts]
    assert [width / sum(widths) for width in widths] == pytest.approx([each / sum(times) for each in times], abs=0.05)
    assert len(answer.inner_text()) >= 3
    journey.get_by_role("button", name="Close").click()
    expect(journey).to_be_hidden()
    page.locator(".sequence.ended").click()
    expect(journey).to_be_visible()


def test_an_ended_journey_has_the_numbers_of_the_end(serve: Serve, open_page: Open) -> None:
    live = serve(step_s=0.03)  # several tokens between two snapshots
    page = open_page(live)
    set_up(page, api="completion", Max_tokens="58")
    ask(page, PROMPT)
    page.locator(".sequence").click()
    end = page.locator("#journey li").last
    expect(end).to_have_text(re.compile(r"^[\d.]+ m?sended: 58 tokens, .* each \(length\)$"))
    expect(page.locator(".sequence.ended .tokens")).to_have_text(f"{len(PROMPT)} + 58")


def test_the_requests_are_listed_as_they_come(serve: Serve, open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text("tenants:\n  - {name: ann, key: ann-key}\n  - {name: bob, key: bob-key}\n")
    live = serve(tenants=tmp_path / "tenants.yaml")

    def post(key: str, **fields: Any) -> None:
        headers = {"authorization": f"Bearer {key}", "user-agent": "a client/1"}
        httpx.post(live.url + "/v1/completions", json=fields, headers=headers)

    post("bob-key", prompt="of bob|")
    page = open_page(live, viewport={"width": 390, "height": 800})
    page.get_by_role("textbox", name="API key").fill("ann-key")
    page.get_by_role("button", name="Use this key").click()
    page.get_by_role("button", name="Requests", exact=True).click()
    expect(page.locator("#requests-note")).to_have_text("none yet")
    post("ann-key", prompt="secret|", top_a=1)
    post("ann-key", prompt=7)
    rows = page.locator(".request")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text(re.compile("^400POST /v1/completions.*invalid_value: prompt: must be"))
    expect(rows.nth(1)).to_contain_text("without effect: top_a")
    expect(rows.nth(1)).to_contain_text(
        re.compile(r"7 \+ 7\stokens.*queued\s.*TTFT\s.*TPOT\s.*total\s".replace(" ", r"\s"))
    )
    expect(rows.nth(1)).to_contain_text("ann  ·  127.0.0.1  ·  a client/1")
    assert "secret" not in page.locator("#requests").inner_text()
    page.locator("#requests-panel").focus()
    expect(page.locator("#requests-panel")).to_be_focused()


def test_an_answer_shows_its_own_journey(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(step_s=0.1), viewport={"width": 390, "height": 800})
    ask(page, "hello there")
    expect(card(page).locator(".answer .text")).to_have_text("hello there")
    expect(page.locator("#journey")).to_be_hidden()
    card(page).get_by_role("button", name="Show its journey").click()
    expect(page.locator("#journey li").last).to_contain_text("tokens")
    expect(page.locator("#journey li").nth(2)).to_contain_text("Too short")
    page.reload()  # which forgets journeys, and keeps the chat
    card(page).get_by_role("button", name="Show its journey").click()
    expect(page.locator("#notice")).to_contain_text("The journey of this answer is not known")


def test_a_pool_of_any_size_is_drawn_and_a_click_opens_the_journey_of_its_owner(serve: Serve, open_page: Open) -> None:
    config = SchedulerConfig(
        num_blocks=100_000, block_size=1, max_model_len=8192, max_num_seqs=4, max_num_batched_tokens=8192
    )
    live = serve(config=config, step_s=0.1)
    body = {"prompt": ["x" * 7000, "y" * 7000], "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", live.url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: without a reader the stream is closed
        next(lines)
        page = open_page(live)
        expect(page.locator("#pool-note")).to_have_text(
            re.compile(r"^first 16,384 of 100,000 blocks of 1 tokens, \d+ a square$")
        )
        page.locator("#pool").click(position={"x": 4, "y": 4})
        expect(page.locator("#journey-note")).to_have_text(re.compile(r"at most 7,\d+ blocks$"))
        page.locator("#pool").hover(position={"x": 4, "y": 4})
        assert re.match(
            r"Blocks 0 to \d+: \d+ held, 0 cached, 0 free", page.locator("#pool").get_attribute("title") or ""
        )
