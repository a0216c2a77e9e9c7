"""What routers ask: model, limits, load, and where KV events are published."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from harness import CONFIG, Live, eventually

from engine.outbound.kv_events import KVEvents
from engine.settings.kv_events_config import KVEventsConfig
from tests.patience import PATIENCE_S

PATHS = ("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/kv_event_sources", "/get_load")


def test_a_router_learns_the_model_and_the_block_size(serve: Callable[..., Live]) -> None:
    live = serve(served_model_names=("parrot", "alias"))
    for path in ("/server_info", "/get_server_info"):
        info = httpx.get(live.url + path).json()
        assert info["model_id"] == info["model_path"] == info["served_model_name"] == "parrot"
        assert info["kv_block_size"] == CONFIG.block_size
        assert info["max_total_num_tokens"] == CONFIG.num_blocks * CONFIG.block_size
        assert info["instance_id"] == live.context.instance_id
        assert (info["tp_size"], info["dp_size"]) == (1, 1)  # tests/daemon/test_several_ranks.py has two
    for path in ("/model_info", "/get_model_info"):
        info = httpx.get(live.url + path).json()
        assert info["model_path"] == "parrot"
        assert info["is_generation"] is True


def test_without_events_there_is_no_source(serve: Callable[..., Live]) -> None:
    assert httpx.get(serve().url + "/kv_event_sources").json() == {}


def test_a_router_learns_where_events_are_published(serve: Callable[..., Live]) -> None:
    live = serve(kv_events=KVEvents(KVEventsConfig(endpoint="tcp://127.0.0.1:*", topic="kv"), CONFIG.block_size))
    sources = httpx.get(live.url + "/kv_event_sources").json()
    assert sources.keys() == {"0"}
    source = sources["0"]
    assert source["endpoint"].startswith("tcp://127.0.0.1:")
    assert (source["topic"], source["publisher"], source["replay_endpoint"]) == ("kv", "zmq", None)


def test_the_load_counts_what_runs_and_waits(serve: Callable[..., Live]) -> None:
    live = serve()
    assert httpx.get(live.url + "/get_load").json() == [
        {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    ]
    live.gate.close()
    body = {"model": "parrot", "prompt": "hello there", "max_tokens": 1}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, live.url + "/v1/completions", json=body, timeout=PATIENCE_S)
        eventually(lambda: httpx.get(live.url + "/get_load").json()[0]["num_tokens"] > 0)
        assert httpx.get(live.url + "/get_load").json()[0]["num_reqs"] == 1
        live.gate.open()
        assert answer.result().status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_key_is_needed(serve: Callable[..., Live], path: str) -> None:
    live = serve(api_keys=("k" * 16,))
    assert httpx.get(live.url + path).status_code == 401
    assert httpx.get(live.url + path, headers={"authorization": f"Bearer {'k' * 16}"}).status_code == 200
