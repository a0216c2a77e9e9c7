"""Models that requests load, over fake engines: who waits for whom, and what a stream and an operator are told."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn

from engine.arbiter import Arbiter
from engine.core.errors import ModelLoadError, NotWantedError
from engine.core.scheduling.scheduler import Scheduler
from engine.handle import EngineFacts
from engine.loop import Engine
from loadtest.fake_runner import CostModel, FakeRunner
from server.answers import models
from server.answers.model_memory import Memory
from server.answers.models import Entry, LoadedModel, Models
from server.app import make_app
from server.http import bodies
from server.http.connection import Connection
from tests.http.harness import APP, CONFIG, VOCAB_SIZE, Gate, byte_tokenizer, parrot
from tests.patience import PATIENCE_S, eventually


class World:
    """Three models of 10 bytes, whose loads wait for `opened` and whose engines for `gate`."""

    def __init__(self, *, limit: int | None = None, **app: Any) -> None:
        self.arbiter, self.gate, self.num_alive = Arbiter(), Gate(), 0
        self.opened, self.loads = threading.Event(), list[str]()
        self.opened.set()
        self.broken: Exception | None = None
        config = replace(APP, model="some", **app)
        served = []
        for name in "abc":
            own = replace(config, served_model_names=(name,), model_aliases=(f"{name}-*", f"/srv/{name}"))
            kept = name in config.keep
            entry = Entry(config=own, load=self.loader(name), is_kept=kept, memory=Memory(weights=10))
            served.append((entry, self.make() if kept else None))
        self.app = make_app(served, limit)
        self.models: Models = self.app.state.models

    def make(self) -> LoadedModel:
        runner = FakeRunner(CONFIG, vocab_size=VOCAB_SIZE, choose=parrot, cost=CostModel(0.0, 0.0), sleep=self.gate)
        engine = Engine(Scheduler(CONFIG), runner, EngineFacts(VOCAB_SIZE), arbiter=self.arbiter)
        self.num_alive += 1
        return LoadedModel(engine, byte_tokenizer(), load_s=1.0)

    def loader(self, name: str) -> Callable[[Callable[[], bool]], LoadedModel]:
        def load(is_wanted: Callable[[], bool]) -> LoadedModel:
            self.loads.append(name)
            while not self.opened.wait(0.001):
                if not is_wanted():
                    raise NotWantedError
            if self.broken is not None:
                raise self.broken
            return self.make()

        return load

    @contextmanager
    def serving(self) -> Iterator[httpx.Client]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(self.app, loop="asyncio", http=Connection, ws="none", lifespan="on", log_config=None)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            eventually(lambda: server.started)
            with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=PATIENCE_S) as client:
                self.client = client
                yield client
                eventually(lambda: [entry.num_users for entry in self.models.entries] == [0, 0, 0])
        finally:
            self.opened.set()
            self.gate.open()
            server.should_exit = True
            thread.join(PATIENCE_S)
            listener.close()
        assert not thread.is_alive()

    def ask(self, model: str, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": model, "prompt": "hi|", "max_tokens": 9, **fields})

    def states(self) -> list[str]:
        return [card["status"]["value"] for card in self.client.get("/v1/models").json()["data"]]


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_request_loads_its_model_and_the_others_stay() -> None:
    world = World(keep=("a",))
    with world.serving() as client:
        assert world.states() == ["loaded", "unloaded", "unloaded"]
        assert [entry.load_s for entry in world.models.entries] == [1.0, 0.0, 0.0]  # which decides who leaves
        assert client.get("/v1/models/b").json()["max_model_len"] is None
        assert client.get("/health?model=b").text == "unloaded\n"
        assert client.get("/tokenizer_info?model=b").json()["error"]["code"] == "model_not_loaded"
        unknown = world.ask("z").json()["error"]["message"]
        assert unknown == "The model 'z' is not served here; use a or a-* or b or b-* or c or c-*."
        assert text(world.ask("b-7")) == "hi"
        assert world.states() == ["loaded", "loaded", "unloaded"]
        assert client.get("/v1/models/b").json()["max_model_len"] == 512
        assert text(world.ask("a")) == "hi"
        assert world.loads == ["b"]
        metrics = client.get("/metrics").text
        assert 'quire_model_loaded{model_name="b"} 1.0' in metrics
        assert 'quire_model_loads_total{model_name="c"} 0.0' in metrics


def test_requests_wait_for_one_load_and_a_stream_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LOADING_S", 0.01)
    world = World(keep=("a",))
    world.opened.clear()
    with ThreadPoolExecutor() as pool, world.serving() as client:
        others = [pool.submit(world.ask, "b") for _ in range(3)]
        body = {"model": "b", "prompt": "hi|", "max_tokens": 9, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = (line for line in answer.iter_lines() if line)
            assert [next(lines), next(lines)] == [": loading b"] * 2
            assert world.states() == ["loaded", "loading", "unloaded"]
            assert text(world.ask("a")) == "hi"
            world.opened.set()
            events = [line for line in lines if line != ": loading b"]
        assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"].startswith("h")
        assert events[-1] == "data: [DONE]"
        assert [text(each.result()) for each in others] == ["hi"] * 3
    assert world.loads == ["b"]


def test_a_failed_load_is_that_models_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its reason names files without their folders, which are the operator's to know."""
    monkeypatch.setattr(bodies, "LOADING_S", 0.01)
    world = World(keep=("a",))
    world.broken = ModelLoadError(
        "/srv/models/b.gguf is short, see https://quire.example/a/b; folder '/srv/b' and/or ~/b/c"
    )
    why = "b.gguf is short, see https://quire.example/a/b; folder 'b' and/or c"
    world.opened.clear()
    with world.serving() as client:
        body = {"model": "b", "prompt": "hi|", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines) == ": loading b"
            world.opened.set()
            *_, event, data = lines
        assert event == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["code"] == "model_failed"
        refused = world.ask("b")
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == f"The model 'b' could not be loaded: {why}"
        assert "/srv/models/b.gguf is short" in caplog.text
        assert client.get("/v1/models/b").json()["status"] == {"value": "failed", "reason": why}
        assert client.get("/health?model=b").status_code == 503
        assert client.get("/health").status_code == 200
        assert text(world.ask("a")) == "hi"
        assert world.loads == ["b"]  # a failure is remembered for a while
        world.broken = None
        assert client.post("/v1/models/b/load").json() == {"value": "loaded"}
        assert text(world.ask("b")) == "hi"
        world.broken = ValueError()
        monkeypatch.setattr(models, "RETRY_S", 0.0)
        assert world.ask("c").json()["error"]["message"].endswith("ValueError")
        world.broken = None
        assert text(world.ask("c")) == "hi"


def test_the_list_says_what_a_model_takes_before_it_is_loaded() -> None:
    """The page offers pictures by it; what a loaded one lacks, as an image processor, is then known."""
    world = World()
    for entry in world.models.entries:
        entry.takes_images = entry.name == "b"

    def taken() -> list[bool]:
        return ["image" in card["input_modalities"] for card in world.client.get("/v1/models").json()["data"]]

    with world.serving():
        assert taken() == [False, True, False]
        assert text(world.ask("b")) == "hi"
        assert taken() == [False] * 3


def test_bodies_that_wait_for_a_load_are_bounded() -> None:
    """Small ones are not: each has 64 KiB for nothing, as a connection may have that it only begins to send."""
    world = World(keep=("a",), max_body_bytes=100_000)
    world.opened.clear()
    with ThreadPoolExecutor(40) as pool, world.serving() as client:
        waiting = [pool.submit(world.ask, "b", prompt="x" * 90_000) for _ in range(40)]
        eventually(lambda: any(each.done() for each in waiting))
        assert text(world.ask("a")) == "hi"
        world.opened.set()
        codes = [each.result().json()["error"]["code"] for each in waiting]
        assert set(codes) == {"body_not_read", "context_length_exceeded"}
        assert client.post("/v1/models/b/load", content=b"x" * 100_000).status_code == 413


def test_an_upload_keeps_no_model_loaded(tmp_path: Path) -> None:
    """It may take hours, and names none."""
    world = World(models_max=1, data_dir=tmp_path)
    with world.serving() as client:
        assert text(world.ask("a")) == "hi"
        with socket.create_connection(("127.0.0.1", client.base_url.port or 0)) as upload:
            upload.sendall(
                b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99\r\n"
                b"content-type: multipart/form-data; boundary=b\r\nexpect: 100-continue\r\n\r\n"
            )
            assert upload.recv(65536).startswith(b"HTTP/1.1 100")
            assert not any(entry.num_users for entry in world.models.entries)
            assert text(world.ask("b")) == "hi"


def test_a_load_that_all_have_left_is_given_up() -> None:
    world = World(keep=("a",))
    world.opened.clear()
    with world.serving() as client:
        for number, stream in enumerate((False, True), start=1):
            body = json.dumps({"model": "b", "prompt": "x", "stream": stream})
            with closing(HTTPConnection("127.0.0.1", client.base_url.port)) as line:
                line.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                eventually(lambda number=number: len(world.loads) == number)
            eventually(lambda: world.states()[1] == "unloaded")
        world.opened.set()
        assert text(world.ask("b")) == "hi"


@pytest.mark.parametrize("limits", [{"models_max": 2}, {"limit": 20}])
def test_room_is_made_by_the_least_useful_and_never_by_one_with_work(limits: dict[str, int]) -> None:
    world = World(keep=("a",), **limits)
    with ThreadPoolExecutor() as pool, world.serving() as client:
        assert text(world.ask("b")) == "hi"
        assert text(world.ask("c")) == "hi"
        assert world.states() == ["loaded", "unloaded", "loaded"]
        world.gate.close()
        with client.stream("POST", "/v1/completions", json={"model": "c", "prompt": "x", "stream": True}) as answer:
            waiting = pool.submit(world.ask, "b")  # for c, which has work, and takes no more
            eventually(lambda: world.states()[1] == "loading")
            behind = pool.submit(world.ask, "c")
            eventually(lambda: world.states()[2] == "loading")
            assert world.models.entries[2].parts is not None
            world.gate.open()
            assert answer.read().endswith(b"[DONE]\n\n")
        assert text(waiting.result()) == text(behind.result()) == "hi"
        assert world.loads == ["b", "c", "b", "c"]
        with ThreadPoolExecutor(8) as many:
            assert {text(each) for each in many.map(world.ask, "abcbcabccb" * 3)} == {"hi"}


def test_the_one_that_had_no_work_for_longest_leaves() -> None:
    world = World(models_max=2)
    with world.serving():
        for name, states in (("a", "luu"), ("b", "llu"), ("a", "llu"), ("c", "lul"), ("b", "ull")):
            assert text(world.ask(name)) == "hi"
            assert "".join(state[0] for state in world.states()) == states


@pytest.mark.parametrize(("load_s", "num_bytes", "states"), [(1.0, 10, "ull"), (1e6, 10, "lul"), (1.0, 10**7, "lul")])
def test_what_takes_long_to_load_or_has_few_bytes_stays(load_s: float, num_bytes: int, states: str) -> None:
    """Beside one that had work later."""
    world = World(models_max=2)
    with world.serving():
        for name in "ab":
            assert text(world.ask(name)) == "hi"
        first, second, _ = world.models.entries
        first.load_s, second.memory = load_s, Memory(weights=num_bytes)
        assert text(world.ask("c")) == "hi"
        assert "".join(state[0] for state in world.states()) == states


def test_a_model_that_never_fits_is_refused() -> None:
    world = World(keep=("a", "b"), limit=25)
    with world.serving():
        assert "it needs 10 B beside the models that stay" in world.ask("c").json()["error"]["message"]


def test_models_without_work_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_LOOK_S", 0.01)
    world = World(keep=("a",), idle_unload=0.01)
    with world.serving():
        assert text(world.ask("b")) == "hi"
        eventually(lambda: world.states() == ["loaded", "unloaded", "unloaded"])
        assert text(world.ask("b")) == "hi"


def test_an_operator_loads_and_unloads() -> None:
    world = World(keep=("a",), models_autoload=False, api_keys=("key",))
    with world.serving() as client:
        assert client.post("/v1/models/b/load").status_code == 401
        client.headers["authorization"] = "Bearer key"
        error = world.ask("b").json()["error"]
        assert error["code"] == "model_not_loaded"
        assert error["message"].endswith("POST /v1/models/b/load."), "asking loads nothing"
        assert client.post("/v1/models/b/load").json() == {"value": "loaded"}
        assert text(world.ask("b")) == "hi"
        for _ in range(2):
            assert client.post("/v1/models/a/unload").json() == {"value": "unloaded"}
        assert client.get("/health").status_code == 200
        assert client.post("/v1/models/other/unload").status_code == 404
        assert world.ask("a").status_code == 503


def test_a_tenant_loads_nothing_but_by_asking(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text("tenants: [{name: a, key: secret}]")
    world = World(keep=("a",), tenants=tmp_path / "tenants.yaml", api_keys=("key",))
    with world.serving() as client:
        client.headers["authorization"] = "Bearer secret"
        for path in ("/v1/models/b/load", "/v1/models/a/unload"):
            refused = client.post(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
        assert world.states() == ["loaded", "unloaded", "unloaded"]
        assert text(world.ask("b")) == "hi"


def test_a_gpus_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps what is freed behind the engine's end, such as a vision tower, from other processes."""
    torch = Mock()
    monkeypatch.setitem(sys.modules, "torch", torch)
    models.give_memory_back()
    torch.cuda.empty_cache.assert_called_once()
    torch.cuda.is_initialized.return_value = False
    models.give_memory_back()
    torch.cuda.empty_cache.assert_called_once()


def test_no_request_brings_back_what_an_operator_unloads() -> None:
    """Where none may load a model, one that arrives while it leaves does not either."""
    world = World(keep=("a", "b"), models_autoload=False)
    with ThreadPoolExecutor() as pool, world.serving() as client:
        world.gate.close()
        working = pool.submit(world.ask, "b")
        eventually(lambda: world.models.entries[1].num_users == 1)
        leaving = pool.submit(client.post, "/v1/models/b/unload")
        eventually(lambda: world.models.entries[1].is_leaving)
        assert world.ask("b").json()["error"]["code"] == "model_not_loaded"
        world.gate.open()
        assert text(working.result()) == "hi"
        assert leaving.result().json() == {"value": "unloaded"}
        assert world.loads == []


def test_an_adapter_takes_no_other_models_name() -> None:
    with World(keep=("a",), allow_runtime_lora_updating=True).serving() as client:
        answer = client.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "/"})
        assert answer.status_code == 409
        assert "'b' is what a model here is called" in answer.text


def test_a_batch_loads_its_models_and_one_that_fails_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_batch(client: httpx.Client, models: str) -> str:
        body = {"prompt": "hi|", "max_tokens": 9}
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"model": model, **body}}
            for i, model in enumerate(models)
        ]
        file = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)))}
        file_id = client.post("/v1/files", files=file, data={"purpose": "batch"}).json()["id"]
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(client.post("/v1/batches", json=asked).json()["id"])

    def counts(client: httpx.Client, batch_id: str) -> dict[str, Any]:
        eventually(lambda: client.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")
        return dict(client.get(f"/v1/batches/{batch_id}").json()["request_counts"])

    world = World(keep=("a",), data_dir=tmp_path)
    world.gate.close()
    with world.serving() as client:
        left = start_batch(client, "abb")
    world = World(data_dir=tmp_path)
    with world.serving() as client:  # no model is loaded, and no request names one
        assert counts(client, left) == {"total": 3, "completed": 3, "failed": 0}
        text(world.ask("b"))  # is loaded from here on: the lines may have been answered as the first daemon stopped
        world.broken = ModelLoadError("the file is short")
        assert counts(client, start_batch(client, "c" * 40 + "b")) == {"total": 41, "completed": 1, "failed": 40}
    world = World(data_dir=tmp_path)
    with world.serving() as client:
        assert counts(client, start_batch(client, "b")) == {"total": 1, "completed": 1, "failed": 0}
    assert world.loads == ["b"], "the batch itself needs no model"
    world = World(data_dir=tmp_path, keep=("a", "b"), models_autoload=False)
    with world.serving() as client:
        runner = world.models.find("b").now().engine._runner  # type: ignore[attr-defined]
        monkeypatch.setattr(runner, "run", Mock(side_effect=RuntimeError("the device is lost")))
        assert counts(client, start_batch(client, "c" * 40 + "b" * 40 + "a")) == {
            "total": 81,
            "completed": 1,
            "failed": 80,
        }


def test_a_stop_ends_a_load() -> None:
    world = World(keep=("a",))
    world.opened.clear()
    with ThreadPoolExecutor() as pool, world.serving():
        waiting = pool.submit(world.ask, "b")
        eventually(lambda: world.loads == ["b"])
        world.models.order_stop(0.0)
        assert waiting.result().json()["error"]["code"] == "shutting_down"
