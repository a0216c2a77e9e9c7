"""The worked examples of CONTRIBUTING.md, and that of KV events: each is the file that the page shows, registered by one line, and it works."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import server.app
from engine.core.queues import POLICIES
from engine.core.queues.keyed import KeyedQueue
from engine.core.scheduling.scheduler import Scheduler
from engine.outbound.offload import Offload
from engine.settings.engine_config import EngineConfig
from engine.text.tools.formats import TOOL_FORMATS
from tests.examples.cache_tier import CompressedStore, open_tier
from tests.examples.queue_key import short_prompts
from tests.examples.queue_turns import TurnsQueue
from tests.examples.tool_format import CALL_TAGS
from tests.http.harness import Live
from tests.patience import PATIENCE_S
from tests.pure.driver import Driver, config, request

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in Path(__file__).parent.glob("*.[cp]*") if not path.name.startswith("test_"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_page_shows_the_file_as_it_is(path: Path) -> None:
    name = "docs/observe/kv-events.md" if path.stem == "kv_consumer" else "CONTRIBUTING.md"
    page = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:python|c)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert path.read_text(encoding="utf-8") in blocks
    assert f"tests/examples/{path.name}" in page


def order_of(policy: str, *requests: object) -> list[str]:
    """The names of some requests in the order in which they end, one at a time."""
    driver = Driver(config(policy=policy, max_num_seqs=1))
    for each in requests:
        driver.add(each)
    driver.drain()
    driver.check_streams()
    return [name for name, _ in driver.ends]


def test_a_policy_that_is_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "short-prompts", partial(KeyedQueue, short_prompts))
    long, short = request("long", (5,) * 30, max_tokens=2), request("short", (5,), arrival_s=0.1, max_tokens=2)
    assert order_of("short-prompts", long, short) == ["short", "long"]
    assert order_of("fcfs", long, short) == ["long", "short"]


def test_a_policy_with_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "turns", TurnsQueue)
    asked = [request(f"a{i}", tenant="a", arrival_s=0.0) for i in range(3)] + [request("b", tenant="b", arrival_s=1.0)]
    assert order_of("turns", *asked) == ["a0", "b", "a1", "a2"]
    assert order_of("fcfs", *asked) == ["a0", "a1", "a2", "b"]


def test_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.app, "ENDPOINTS", [*server.app.ENDPOINTS, "tests.examples.endpoint"])
    with Live().serving() as live, httpx.Client(base_url=live.url) as client:
        assert client.post("/v1/count_words", json={"text": "one two three"}).json()["num_words"] == 3
        assert "/v1/count_words" in client.get("/openapi.json").json()["paths"]


def test_a_tool_call_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOL_FORMATS, "call_tags", CALL_TAGS)
    template = "{% if tools %}{# <call name>{...}</call> #}{% endif %}{{ messages[-1].content }}|"
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    text = 'Well. <call add>{"a": 1}</call> <call me> <call add>{"a": 2}'
    with Live(template=template).serving() as live, httpx.Client(base_url=live.url) as client:
        for strict in (False, True):
            tools = [{"type": "function", "function": {**function, "strict": strict}}]
            asked = {"messages": [{"role": "user", "content": text}], "tools": tools, "max_tokens": len(text)}
            message = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
            assert calls[0] == ("add", '{"a": 1}')
            assert message["content"].startswith("Well.")


class HostPages(list["array[int]"]):
    """FakeRunner's host blocks, at fixed addresses."""

    def __setitem__(self, index: object, page: Iterable[int]) -> None:
        self[index][:] = array("q", page)  # type: ignore[index,call-overload]

    def row(self, index: int) -> memoryview:
        return memoryview(self[index]).cast("B")

    def finish_copies(self) -> None:
        """They are done when a step was run."""


def test_a_cache_tier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from engine.startup import stores as table

    monkeypatch.setattr(table, "STORES", {"compressed": open_tier})
    settings, pages = config(num_blocks=12, host_caching=True), HostPages()

    def open_host_pool(num_blocks: int, folder: Path | None) -> HostPages:
        pages.extend(array("q", [-1] * settings.block_size) for _ in range(num_blocks))
        return pages

    device = SimpleNamespace(blocks=[torch.zeros(settings.num_blocks, 1 << 16)], open_host_pool=open_host_pool)
    asked = EngineConfig(model=str(tmp_path), kv_offload_gib=2 / (1 << 10))  # 8 blocks
    settings, tiers = table.open_tiers(device, asked, settings, torch.float32, lambda _: None)  # type: ignore[arg-type]
    assert isinstance(tiers["compressed"].store, CompressedStore)
    driver = Driver(settings, scheduler=Scheduler(settings))
    driver.runner._host_pages = pages  # type: ignore[assignment]
    offload = Offload(driver.scheduler, driver.runner, tiers, time.monotonic)

    def exchange(num_left: int = 0, *, is_good: bool = True) -> None:
        offload.exchange()
        while driver.scheduler.tiers._under_way:
            offload.exchange(PATIENCE_S)

    monkeypatch.setattr(driver, "transfer", exchange)
    prompts = [tuple(range(30 * i, 30 * i + 25)) for i in range(8)]
    for index, prompt in enumerate(prompts):
        driver.add(request(f"r{index}", prompt, max_tokens=1))
        driver.drain()
    driver.add(request("again", prompts[0], max_tokens=1))
    exchange()  # the blocks arrive before the first step
    driver.drain()
    driver.check_streams()
    assert driver.prompts["again", 0].num_cached_tokens > 0
    offload.close()
