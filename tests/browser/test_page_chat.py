"""Chats in a real browser: thoughts, tool calls, asking again, the history. The parrot says the last message."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Locator, Page, Route, expect

from engine.core.types import Request
from tests.http.fake_images import TEMPLATE, picture, preprocessor
from tests.http.harness import Live, eventually

Serve = Callable[..., Live]
Open = Callable[..., Page]
THINKING = (
    "{% if tools %}{% set a = '<tool_call>' %}{% endif %}{% set b = '</think>' %}"
    "{{ messages[-1].content }}{% if add_generation_prompt %}|{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])


def ask(page: Page, text: str) -> None:
    box = page.get_by_label("Message", exact=True)
    box.fill(text)
    box.press("Enter")


def answers(page: Page) -> Locator:
    return page.locator(".answer .text")


def more(page: Page, item: str) -> None:
    page.get_by_role("button", name="More").click()
    page.get_by_role("menuitem", name=item).click()


def chats(page: Page) -> Locator:
    return page.locator("#history-list .open-chat")


def reload(page: Page, last: str) -> None:
    """Load the page again, once the last answer is in the history."""
    kept = "import('./page/store.js').then(({ store }) => store.loadAll()).then(JSON.stringify)"
    eventually(lambda: f'"content":{json.dumps(last)}' in page.evaluate(kept))
    eventually(lambda: '"finish":"interrupted"' not in page.evaluate(kept))
    page.reload()


def test_thoughts_fold_when_the_answer_begins(serve: Serve, open_page: Open) -> None:
    live = serve(template=THINKING, step_s=0.01)
    page = open_page(live)
    ask(page, "<think>First *this*,\nthen that.</think>The **answer**.")
    expect(page.locator(".thoughts.thinking")).to_be_visible()
    expect(answers(page)).to_have_text("The answer.")
    thoughts = page.locator(".thoughts")
    expect(thoughts.locator("summary")).to_have_text(re.compile(r"^Thought for [\d.]+ s$"))
    expect(thoughts).not_to_have_attribute("open", "")
    thoughts.locator("summary").click()
    expect(thoughts.locator("em")).to_have_text("this")
    expect(page.locator("#announcer")).to_have_text("The **answer**.")


def test_a_tool_call_gets_its_result_and_the_model_goes_on(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(template=THINKING))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill(TOOLS)
    page.get_by_role("button", name="Done").click()
    ask(page, f"I look.{CALL}{CALL.replace('Rome', 'Oslo')}")
    calls = page.locator(".call")
    expect(calls).to_have_count(2)
    expect(calls.first.get_by_label("Arguments of weather")).to_have_text('{\n  "city": "Rome"\n}')
    for index, result in enumerate(("sunny", "snow")):
        calls.nth(index).get_by_role("textbox", name="Result").fill(result)
        calls.nth(index).get_by_role("button", name="Use this result").click()
    expect(answers(page).last).to_have_text("snow")  # the last message, which the parrot repeats
    reload(page, "snow")
    expect(page.locator(".call .given").first).to_have_text("sunny")
    expect(answers(page).last).to_have_text("snow")


def test_messages_are_edited_and_asked_again(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(template=THINKING))
    ask(page, "one")
    expect(answers(page)).to_have_text("one")
    ask(page, "two")
    expect(answers(page)).to_have_text(["one", "two"])
    page.get_by_role("button", name="Edit message").first.click()
    page.get_by_label("Edited message").fill("three")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text(["three"])
    page.get_by_role("button", name="Retry").click()
    expect(answers(page)).to_have_text(["three"])
    expect(page.locator(".question .bubble")).to_have_text(["three"])
    page.get_by_role("button", name="Undo").click()
    expect(answers(page)).to_have_text(["one", "two"])


def test_a_question_after_a_failed_answer_takes_the_failed_one_along(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(template=THINKING))
    error = 'data: {"error": {"message": "The device is lost."}}\n\n'
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=error), times=1
    )
    ask(page, "one")
    expect(page.get_by_role("alert")).to_have_text("The device is lost.")
    ask(page, "two")
    expect(answers(page).last).to_have_text("one\n\ntwo", use_inner_text=True)


def test_keys_of_a_composition_leave_no_field(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(step_s=0.1, template=THINKING))

    def compose(field: Locator) -> None:
        """Press what ends the composition of a character, as Safari reports it."""
        for key in ("Enter", "Escape"):
            event = f'new KeyboardEvent("keydown", {{ key: "{key}", keyCode: 229, bubbles: true, cancelable: true }})'
            field.evaluate(f"field => field.dispatchEvent({event})")

    def stays(label: str) -> None:
        field = page.get_by_label(label)
        compose(field)
        expect(field).to_be_visible()
        field.press("Escape")
        expect(field).not_to_be_visible()

    ask(page, "a long answer")
    expect(answers(page)).to_have_text(re.compile("^a"))
    compose(page.get_by_label("Message", exact=True))
    expect(answers(page)).to_have_text("a long answer")
    page.get_by_role("button", name="Edit message").click()
    stays("Edited message")
    expect(answers(page)).to_have_text("a long answer")
    page.get_by_role("button", name="Settings").click()
    stays("System prompt")
    page.set_viewport_size({"width": 390, "height": 800})
    page.locator("#list-button").click()
    stays("Search chats")


def test_enter_does_not_send_while_a_character_is_composed_and_a_draft_survives(serve: Serve, open_page: Open) -> None:
    live = serve()
    page = open_page(live)
    box = page.get_by_label("Message", exact=True)
    box.fill("ni")
    box.evaluate("""box => box.dispatchEvent(
      new KeyboardEvent("keydown", { key: "Enter", isComposing: true, bubbles: true, cancelable: true }))""")
    box.press("Shift+Enter")
    expect(box).to_have_value("ni\n")
    box.press("x")
    page.reload()
    expect(box).to_have_value("ni\nx")
    assert live.engine.stats.prompt_tokens == 0


def test_chats_are_kept_found_renamed_and_deleted(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(template=THINKING), viewport={"width": 1400, "height": 800})
    ask(page, "about cats")
    expect(answers(page)).to_have_text("about cats")
    page.get_by_role("button", name="New chat").click()
    expect(answers(page)).to_have_count(0)
    ask(page, "about dogs")
    expect(answers(page)).to_have_text("about dogs")
    expect(chats(page)).to_have_text(["about dogs", "about cats"])
    reload(page, "about dogs")
    expect(answers(page)).to_have_text("about dogs")
    page.get_by_label("Search chats").fill("CAT")
    expect(chats(page)).to_have_text(["about cats"])
    chats(page).click()
    expect(answers(page)).to_have_text("about cats")
    more(page, "Rename")
    page.get_by_role("textbox", name="Title").fill("my cats")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="my cats")).to_be_visible()
    page.get_by_label("Search chats").fill("")
    page.get_by_role("button", name="Delete my cats").focus()
    page.keyboard.press("Enter")
    expect(chats(page)).to_have_text(["about dogs"])
    page.get_by_role("button", name="Undo").click()
    expect(chats(page)).to_have_text(["about dogs", "my cats"])


def test_chats_are_exported_and_imported(serve: Serve, open_page: Open, tmp_path: Path) -> None:
    page = open_page(serve(template=THINKING), viewport={"width": 1400, "height": 800})
    ask(page, "<think>hm</think>**kept**")
    expect(answers(page)).to_have_text("kept")
    with page.expect_download() as download:
        more(page, "Export as Markdown")
    download.value.save_as(tmp_path / "a.md")
    assert "## Assistant\n\n<details><summary>Reasoning</summary>\n\nhm\n\n</details>\n\n**kept**\n" in (
        tmp_path / "a.md"
    ).read_text("utf-8")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    download.value.save_as(tmp_path / "a.json")
    chat = json.loads((tmp_path / "a.json").read_text("utf-8"))
    chat["conversations"][0] |= {"title": "again", "evil": 1, "settings": {"temperature": "x", "top_p": 0.5}}
    (tmp_path / "b.json").write_text(json.dumps(chat), "utf-8")
    page.locator("#import-file").set_input_files(tmp_path / "b.json")
    expect(page.locator("#notice")).to_contain_text("1 chat is imported.")
    page.get_by_role("button", name="again", exact=True).click()
    expect(answers(page)).to_have_text("kept")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Top p")).to_have_value("0.5")
    expect(page.get_by_label("Temperature")).to_have_value("0.3")
    page.get_by_role("button", name="Done").click()
    page.locator("#import-file").set_input_files(tmp_path / "a.md")
    expect(page.locator("#notice")).to_contain_text("The file is not JSON")


def test_a_picture_goes_with_the_message(serve: Serve, open_page: Open) -> None:
    """On a phone: chosen, pasted and dropped, shown in the chat, sent to the model, kept over a reload."""
    live = serve(template=TEMPLATE, images=preprocessor, place="thread")
    found: list[Request] = []
    submit = live.engine.submit
    live.engine.submit = lambda *given: (found.extend(given), submit(*given))[1]
    page = open_page(live, viewport={"width": 390, "height": 700})
    shot = {"name": "photo.png", "mimeType": "image/png", "buffer": picture(48, 32)}
    page.get_by_role("button", name="Attach pictures").wait_for()
    page.get_by_label("Pictures", exact=True).set_input_files([shot])
    pictures = page.locator(".composer .picture img")
    expect(pictures).to_have_count(1)
    add = """([place, kind, bytes]) => {
      const data = new DataTransfer();
      data.items.add(new File([new Uint8Array(bytes)], "more.png", { type: "image/png" }));
      const event = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: data, bubbles: true, cancelable: true })
        : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
      document.querySelector(place).dispatchEvent(event);
    }"""
    page.evaluate(add, [".composer textarea", "paste", list(picture(24, 16))])
    expect(pictures).to_have_count(2)
    page.evaluate(add, [".chat", "drop", list(picture(16, 16))])
    expect(pictures).to_have_count(3)
    page.get_by_role("button", name="Remove more.png").last.click()
    expect(pictures).to_have_count(2)
    ask(page, "What is it?")
    expect(page.locator(".bubble .picture img")).to_have_count(2)
    expect(page.locator(".composer .picture")).to_have_count(0)
    eventually(lambda: [image.grid for request in found for image in request.images] == [(1, 4, 6), (1, 2, 3)])
    reload(page, "What is it?")
    shown = page.locator(".bubble .picture img")
    expect(shown).to_have_count(2)
    assert shown.first.evaluate("(image) => [image.naturalWidth, image.naturalHeight]") == [48, 32]


def test_a_model_of_text_alone_is_offered_no_pictures(serve: Serve, open_page: Open) -> None:
    page = open_page(serve())
    expect(page.locator(".chat .composer")).to_be_visible()
    expect(page.locator("#model-name")).to_have_text("parrot")
    expect(page.get_by_role("button", name="Attach pictures")).to_be_hidden()


def test_a_file_of_text_goes_with_the_message(serve: Serve, open_page: Open, tmp_path: Path) -> None:
    page = open_page(serve(template="{{ messages[0].content }}|"), viewport={"width": 390, "height": 700})
    chooser = page.get_by_label("Files of text")
    files = [
        {"name": "table.csv", "mimeType": "text/csv", "buffer": b"\xef\xbb\xbfa,b\r\n1,2\r\n"},
        {"name": "more.md", "mimeType": "text/markdown", "buffer": b"```\ncode\n```"},
        {"name": "photo.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x00\xff"},
        {"name": "huge.log", "mimeType": "text/plain", "buffer": b"x" * 300_000},
    ]
    chooser.set_input_files(files[2:3])
    expect(page.locator("#notice")).to_have_text(re.compile("^photo.png is no text in UTF-8; attach"))
    chooser.set_input_files(files[3:])
    expect(page.locator("#notice")).to_have_text(re.compile("^huge.log has 293 KB; attach files of at most 256 KB"))
    chooser.set_input_files(files[:2])
    chips = page.locator(".composer .file")
    expect(chips).to_have_text(["table.csv13 bytes".replace("13", "8"), "more.md12 bytes"])
    page.get_by_role("button", name="Remove more.md").click()
    page.locator(".chat").evaluate("""(chat) => {
      const data = new DataTransfer();
      data.items.add(new File(["```\\ncode\\n```"], "more.md"));
      chat.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
    }""")
    expect(chips).to_have_count(2)
    ask(page, "What is it?")
    expect(chips).to_have_count(0)
    sent = "File table.csv:\n```\na,b\n1,2\n```\n\nFile more.md:\n````\n```\ncode\n```\n````\n\nWhat is it?"

    def said() -> str:
        messages = page.evaluate("import('./page/store.js').then(({ store }) => store.loadAll())")[0]["messages"]
        return str(messages[-1]["content"])

    eventually(lambda: said() == sent)
    page.get_by_role("button", name="Edit message").click()
    page.get_by_label("Edited message").fill("Really?")
    page.get_by_role("button", name="Send", exact=True).first.click()
    eventually(lambda: said() == sent.replace("What is it?", "Really?"))
    page.reload()
    expect(page.locator(".question .file")).to_have_text(["table.csv8 bytes", "more.md12 bytes"])
    with page.expect_download() as download:
        more(page, "Export as JSON")
    download.value.save_as(tmp_path / "a.json")
    page.locator("#import-file").set_input_files(tmp_path / "a.json")
    expect(page.locator("#notice")).to_contain_text("1 chat is imported.")
    page.get_by_role("button", name="Chats", exact=True).click()
    chats(page).nth(1).click()
    expect(page.locator(".question .file")).to_have_count(2)


def test_a_long_chat_draws_its_end_first(serve: Serve, open_page: Open) -> None:
    page = open_page(serve(), viewport={"width": 1400, "height": 800})
    page.evaluate("""async () => {
      const { store } = await import("./page/store.js");
      const { emptyAnswer, newConversation, userMessage } = await import("./page/conversation.js");
      const messages = Array.from({ length: 50 }, (_, index) => [
        userMessage(`question ${index}`), { ...emptyAnswer(), content: `answer ${index}` },
      ]).flat();
      await store.save({ ...newConversation(), messages });
    }""")
    page.reload()
    chats(page).click()
    expect(answers(page)).to_have_text([f"answer {index}" for index in range(30, 50)])
    page.get_by_role("button", name="Show earlier messages").click()
    page.get_by_role("button", name="Show earlier messages").click()
    expect(answers(page)).to_have_count(50)
    expect(page.get_by_role("button", name="Show earlier messages")).to_have_count(0)


def test_a_full_storage_is_reported_and_the_chat_goes_on(serve: Serve, open_page: Open) -> None:
    page = open_page(serve())
    page.evaluate("""() => {
      IDBObjectStore.prototype.put = () => { throw new DOMException("no room", "QuotaExceededError"); };
    }""")
    ask(page, "hello")
    expect(answers(page)).to_have_text("hello")
    expect(page.locator("#notice")).to_contain_text("storage is full")


def test_a_lost_connection_is_reported_and_the_answer_goes_on(serve: Serve, open_page: Open) -> None:
    live = serve()
    page = open_page(live)
    begun = 'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"half"},"finish_reason":null}]}\n\n'
    asked: list[Route] = []

    def cut(route: Route) -> None:
        asked.append(route)
        route.fulfill(content_type="text/event-stream", body=begun)

    page.route("**/v1/chat/completions", cut)
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_have_text("The connection was lost before the answer was complete.")
    page.get_by_role("button", name="Continue").click()
    eventually(lambda: len(asked) == 2)
    body = asked[1].request.post_data_json
    assert body["continue_final_message"] is True
    assert body["messages"][-1] == {"role": "assistant", "content": "half"}
    expect(answers(page)).to_have_text("halfhalf")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Retry").click()
    expect(answers(page)).to_have_text("hello")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_an_answer_streams_on_while_another_chat_is_shown(serve: Serve, open_page: Open) -> None:
    live = serve(step_s=0.02)
    page = open_page(live, viewport={"width": 1400, "height": 800})
    live.gate.close()
    ask(page, "in the background")
    page.get_by_role("button", name="New chat").click()
    expect(answers(page)).to_have_count(0)
    expect(page.locator("#history-list .is-busy")).to_have_count(1)
    live.gate.open()
    expect(page.locator("#history-list .is-busy")).to_have_count(0)
    chats(page).click()
    expect(answers(page)).to_have_text("in the background")


def test_the_reader_who_scrolls_up_stays_there(serve: Serve, open_page: Open) -> None:
    live = serve(step_s=0.01)
    page = open_page(live, viewport={"width": 1000, "height": 400})
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("combobox", name="API").select_option("completion")
    page.get_by_role("button", name="Done").click()
    ask(page, "no end\n" * 20)
    log = page.get_by_role("log")
    expect(answers(page)).to_have_text(re.compile("[a-z]{20}"))
    at_end = "log => log.scrollHeight - log.scrollTop - log.clientHeight < 40"
    eventually(lambda: log.evaluate(at_end))
    log.evaluate("log => { log.scrollTop = 0; }")
    latest = page.get_by_role("button", name="Scroll to the latest message")
    expect(latest).to_be_visible()
    seen = len(answers(page).inner_text())
    eventually(lambda: len(answers(page).inner_text()) > seen + 10)
    assert log.evaluate("log => log.scrollTop") == 0
    latest.click()
    eventually(lambda: log.evaluate(at_end))
    page.get_by_role("button", name="Stop").click()
