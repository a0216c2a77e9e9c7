"""Everything that is stored belongs to an account and is a 404 to any other: every route with an id, every field with one.

The tables below name them all; a route or a field that is added without a line here fails the tests of completeness.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_adapters import AdaptableParrot, read_adapter
from fastapi.routing import APIRoute
from harness import CONFIG, Live, eventually
from test_cli import quire, ready

from engine.adapters import Adapters
from engine.text.fields.body import RequestBody
from server.app import routers
from server.operations import unserved

FILE = """
tenants:
  - {name: ann, key: ann-key}
  - {name: bob, key: bob-key}
"""
NEVER = "0" * 32
KEYS = ("bob-key", "plain")  # another tenant's, and the operator's

# Every route with an id in its path, and what that is the id of.
ROUTES = {
    ("GET", "/v1/requests/{name:path}"): ("request", "answer"),
    ("GET", "/v1/responses/{response_id}"): ("response",),
    ("DELETE", "/v1/responses/{response_id}"): ("response",),
    ("GET", "/v1/responses/{response_id}/input_items"): ("response",),
    ("GET", "/v1/files/{file_id}"): ("file", "output"),
    ("GET", "/v1/files/{file_id}/content"): ("file", "output"),
    ("DELETE", "/v1/files/{file_id}"): ("file", "output"),
    ("GET", "/v1/batches/{batch_id}"): ("batch", "ended"),
    ("POST", "/v1/batches/{batch_id}/cancel"): ("batch", "ended"),
}
NOT_STORED = {"/v1/models/{name:path}", "/page/{name:path}"}  # names that the operator chose, and files of ours
NOT_STORED |= {"/v1/models/{name:path}/load", "/v1/models/{name:path}/unload"}
# Every field of a body that names something stored, and bodies it stands in.
FIELDS: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "previous_response_id": (
        "response",
        [("/v1/responses", {"input": "go on|"}), ("/v1/responses/input_tokens", {"input": "go on|"})],
    ),
    "input_file_id": ("file", [("/v1/batches", {"endpoint": "/v1/completions", "completion_window": "1h"})]),
}
NO_NAMES = {"call_id", "tool_use_id", "user_id"}  # fields that end like one, of what stands in the same body
NO_NAMES |= {"remote_request_id"}  # a parcel, which is held to its prompt and owner (test_handoff_http.py)
LISTS = {"/v1/files": "file", "/v1/batches": "batch"}


def upload(http: httpx.Client, *prompts: str, **fields: Any) -> str:
    body = {"max_tokens": 200, **fields}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}
        for i, prompt in enumerate(prompts)
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    answer = http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def begin_batch(http: httpx.Client, file_id: str) -> str:
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "1h"}
    answer = http.post("/v1/batches", json=asked)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def status(http: httpx.Client, batch: str) -> str:
    return str(http.get(f"/v1/batches/{batch}").json()["status"])


@dataclass
class World:
    """A server with two tenants and an operator, and the ids of all that one of them has stored."""

    live: Live
    ann: httpx.Client
    ids: dict[str, str]

    def seen(self) -> dict[str, Any]:
        """What its owner finds under each id."""
        found = {}
        for (method, route), kinds in ROUTES.items():
            if method == "GET":
                for kind in kinds:
                    answer = self.ann.get(filled(route, self.ids[kind]))
                    assert answer.status_code == 200, (route, answer.text)
                    is_moving = kind in ("batch", "request", "answer")
                    found[route, kind] = None if is_moving else answer.content
        return found


@pytest.fixture
def world(serve: Callable[..., Live], tmp_path: Path) -> Iterator[World]:
    (tmp_path / "tenants.yaml").write_text(FILE, encoding="utf-8")
    options = {"tenants": tmp_path / "tenants.yaml", "api_keys": ("plain",), "data_dir": tmp_path / "data"}
    live = serve(config=replace(CONFIG, policy="fair"), **options)
    with client(live, "ann-key") as ann:
        ended = begin_batch(ann, upload(ann, "hello|"))
        eventually(lambda: status(ann, ended) == "completed")
        document = ann.post("/v1/responses", json={"input": "a secret|"}).json()
        named = ann.post("/v1/completions", json={"prompt": "secret|"}, headers={"x-request-id": "mine"})
        file = upload(ann, "another secret|")
        live.gate.close()  # so that the batch stays open
        batch = begin_batch(ann, file)
        live.gate.open()
        ids = {
            "request": "mine",
            "answer": named.json()["id"],
            "response": document["id"],
            "item": document["output"][0]["id"],
            "file": file,
            "output": ann.get(f"/v1/batches/{ended}").json()["output_file_id"],
            "batch": batch,
            "ended": ended,
        }
        eventually(lambda: status(ann, batch) == "completed")
        yield World(live, ann, ids)


def client(live: Live, key: str) -> httpx.Client:
    return httpx.Client(base_url=live.url, headers={"authorization": f"Bearer {key}"})


def filled(route: str, name: str) -> str:
    begin, _, rest = route.partition("{")
    return begin + name + rest.partition("}")[2]


def anonymous(answer: httpx.Response, name: str) -> tuple[int, str]:
    """An answer without the id that it repeats."""
    return answer.status_code, answer.text.replace(name, "*")


def test_every_route_with_an_id_is_in_the_table(serve: Callable[..., Live]) -> None:
    def routes(router: Any) -> Iterator[APIRoute]:
        for route in router.routes:
            if isinstance(route, APIRoute):
                yield route
            else:  # FastAPI keeps a router that was included as one entry
                yield from routes(route.original_router)

    live = serve(page=True)
    live.app.state.add_rest()
    nothing_stored = {*NOT_STORED, *(route.path for route in routes(unserved.router))}
    with_ids = [route for route in routes(live.app) if "{" in route.path and route.path not in nothing_stored]
    assert {(method, route.path) for route in with_ids for method in route.methods} == set(ROUTES)


def test_every_field_that_names_something_is_in_the_table() -> None:
    def bodies(base: type[RequestBody]) -> Iterator[type[RequestBody]]:
        yield base
        for body in base.__subclasses__():
            yield from bodies(body)

    fields = {name for body in bodies(RequestBody) for name in body.model_fields if name.endswith(("_id", "_ids"))}
    assert {name for name in fields if not name.endswith("token_ids")} == set(FIELDS) | NO_NAMES


@pytest.mark.parametrize("key", KEYS)
def test_what_is_anothers_is_not_there(world: World, key: str) -> None:
    """The same answer, word for word, as for an id that never was; and nothing has changed by it."""
    before = world.seen()
    with client(world.live, key) as other:
        for (method, route), kinds in ROUTES.items():
            for kind in kinds:
                name = world.ids[kind]
                never = name.replace(name[-32:], NEVER)
                answer = other.request(method, filled(route, name))
                assert answer.status_code == 404, (method, route, kind, answer.text)
                assert anonymous(answer, name) == anonymous(other.request(method, filled(route, never)), never)
        for field, (kind, requests) in FIELDS.items():
            name = world.ids[kind]
            never = name.replace(name[-32:], NEVER)
            for path, body in requests:
                answer = other.post(path, json={**body, field: name})
                assert answer.status_code == 404, (path, field, answer.text)
                assert anonymous(answer, name) == anonymous(other.post(path, json={**body, field: never}), never)
        name = world.ids["item"]
        never = name.replace(name[-32:], NEVER)
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            answers = [
                other.post(path, json={"input": [{"type": "item_reference", "id": each}]}) for each in (name, never)
            ]
            assert answers[0].status_code == 404
            assert anonymous(answers[0], name) == anonymous(answers[1], never)
        for path, kind in LISTS.items():
            assert other.get(path).json()["data"] == []
            name = world.ids[kind]
            never = name.replace(name[-32:], NEVER)
            answer = other.get(path, params={"after": name})
            assert answer.status_code == 404
            assert anonymous(answer, name) == anonymous(other.get(path, params={"after": never}), never)
    assert world.seen() == before
    assert {file["id"] for file in world.ann.get("/v1/files").json()["data"]} >= {world.ids["file"]}
    assert len(world.ann.get("/v1/batches").json()["data"]) == 2


def test_the_owner_may_do_all_of_it(world: World) -> None:
    """The tables ask for what exists: the same requests with the owner's key are answered."""
    for field, (kind, requests) in FIELDS.items():
        for path, body in requests:
            answer = world.ann.post(path, json={**body, field: world.ids[kind]})
            assert answer.status_code == 200, (path, answer.text)
            if path == "/v1/batches":
                batch = str(answer.json()["id"])
                eventually(lambda batch=batch: status(world.ann, batch) == "completed")
    for (method, route), kinds in ROUTES.items():
        for kind in kinds:
            wanted = 409 if method == "POST" else 200  # what has ended cannot be cancelled
            assert world.ann.request(method, filled(route, world.ids[kind])).status_code == wanted, (method, route)
        if method == "DELETE" and "responses" in route:
            world.ids["response"] = world.ann.post("/v1/responses", json={"input": "again|"}).json()["id"]


def test_a_request_id_is_a_name_inside_an_account(world: World) -> None:
    """Another's `x-request-id` of the same name, or one that is an answer's id, neither finds nor shadows it."""
    mine = world.ann.get("/v1/requests/mine").json()
    with client(world.live, "bob-key") as bob:
        for name in ("mine", world.ids["answer"], world.ids["answer"].removeprefix("cmpl-")):
            bob.post("/v1/completions", json={"prompt": "of bob|"}, headers={"x-request-id": name})
            eventually(lambda name=name: bob.get(f"/v1/requests/{name}").json()["state"] == "finished")
            assert bob.get(f"/v1/requests/{name}").json()["tenant"] == "bob"
    assert world.ann.get("/v1/requests/mine").json() == mine
    assert world.ann.get(f"/v1/requests/{world.ids['answer']}").json() == mine


def test_the_list_of_requests_is_an_account_s_own(world: World) -> None:
    with client(world.live, "bob-key") as bob, client(world.live, "plain") as operator:
        bob.post("/tokenize", json={"prompt": 7})
        lists = [http.get("/v1/requests").json()["data"] for http in (world.ann, bob, operator)]
    names = [{each["tenant"] for each in found} for found in lists]
    assert names[:2] == [{"ann"}, {"bob"}]
    assert {"ann", "bob"} <= names[2]


def test_an_owner_that_asks_much_pushes_out_its_own(
    serve: Callable[..., Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.telemetry.request_log.RECENT", 4)
    (tmp_path / "tenants.yaml").write_text(FILE, encoding="utf-8")
    live = serve(tenants=tmp_path / "tenants.yaml", max_stored_responses=4)
    with client(live, "ann-key") as ann, client(live, "bob-key") as bob:
        kept = ann.post("/v1/responses", json={"input": "a secret|"}).json()["id"]
        for _ in range(9):
            bob.post("/v1/responses", json={"input": "more|"})
        assert ann.get(f"/v1/responses/{kept}").status_code == 200
        assert ann.get(f"/v1/requests/{kept}").status_code == 200
    assert len(live.context.request_log._records) == 2 * 4


def test_no_path_of_this_machine_reaches_a_tenant(serve: Callable[..., Live], tmp_path: Path) -> None:
    """Routes without parameters, errors and headers; the operator sees where the model is."""
    (tmp_path / "tenants.yaml").write_text(FILE, encoding="utf-8")
    model = str(tmp_path / "secret-place" / "model")
    adapters, place = Adapters(read_adapter, 2), tmp_path / "secret-place" / "by1"
    place.parent.mkdir()
    place.write_text("1")
    adapters.load("next", str(place))
    live = serve(tenants=tmp_path / "tenants.yaml", api_keys=("plain",), data_dir=tmp_path / "data", model=model,
                 adapters=adapters, runner=AdaptableParrot)  # fmt: skip
    paths = [
        route.path
        for each in routers()
        for route in each.routes
        if isinstance(route, APIRoute) and "GET" in route.methods and "{" not in route.path
    ]
    with client(live, "ann-key") as ann, client(live, "plain") as operator:
        for path in (*paths, "/v1/models/parrot", "/v1/models/next", "/v1/models/nobody", "/nowhere"):
            for headers in ({}, {"anthropic-version": "2023-06-01"}):
                answer = ann.get(path, headers=headers)
                assert "secret-place" not in answer.text + str(answer.headers), path
        for body in ({"model": "nobody", "prompt": "a"}, {"prompt": 1}, {"prompt": "a|" * 9_999}):
            assert "secret-place" not in ann.post("/v1/completions", json=body).text
        roots = {card["id"]: card["root"] for card in ann.get("/v1/models").json()["data"]}
        assert roots == {name: name for name in ("parrot", "bird", "next")}
        assert {card["root"] for card in operator.get("/v1/models").json()["data"]} == {model, str(place)}


def test_lines_of_a_batch_run_on_their_owners_account(
    serve: Callable[..., Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within its limits, beside its own clients and those of others, and what they store is its own."""
    terms = "tenants: [{name: ann, key: ann-key, max_concurrent_requests: 3, weight: 2}, {name: bob, key: bob-key}]"
    (tmp_path / "tenants.yaml").write_text(terms, encoding="utf-8")
    live = serve(tenants=tmp_path / "tenants.yaml", data_dir=tmp_path / "data")
    asked, most = [], 0
    add = live.scheduler.add

    def note(request: Any) -> None:
        nonlocal most
        asked.append((request.tenant, request.weight, request.is_background))
        most = max(most, live.context.tenancy.find(["ann-key"]).num_open)
        add(request)

    monkeypatch.setattr(live.scheduler, "add", note)
    with client(live, "ann-key") as ann, client(live, "bob-key") as bob:
        batches = [begin_batch(ann, upload(ann, *["endless"] * 12)), begin_batch(bob, upload(bob, *["hello|"] * 12))]
        eventually(lambda: live.context.tenancy.find(["ann-key"]).num_open == 2)
        here = ann.post("/v1/completions", json={"prompt": "hello|"})
        assert here.status_code == 200, "lines leave a place to clients"
        for http, batch in zip((ann, bob), batches, strict=True):
            eventually(lambda http=http, batch=batch: status(http, batch) == "completed")
        assert most <= 3
        assert asked.count(("ann", 2.0, True)) == 12
        assert asked.count(("bob", 1.0, True)) == 12
        output = bob.get(f"/v1/batches/{batches[1]}").json()["output_file_id"]
        line = json.loads(bob.get(f"/v1/files/{output}/content").text.splitlines()[0])
        name = line["response"]["request_id"]
        assert bob.get(f"/v1/requests/{name}").json()["tenant"] == "bob"
        assert ann.get(f"/v1/requests/{name}").status_code == 404
    eventually(lambda: live.context.tenancy.find(["ann-key"]).num_open == 0)


def test_a_tenant_without_tokens_holds_up_no_other_tenants_batch(
    serve: Callable[..., Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that its limit refuses leave their places, and no attempt of theirs is counted."""
    monkeypatch.setattr("server.batches.worker.RETRY_S", 0.02)
    terms = "tenants: [{name: ann, key: ann-key, tokens_per_minute: 30}, {name: bob, key: bob-key}]"
    (tmp_path / "tenants.yaml").write_text(terms, encoding="utf-8")
    live = serve(tenants=tmp_path / "tenants.yaml", data_dir=tmp_path / "data")
    with client(live, "ann-key") as ann, client(live, "bob-key") as bob:
        poor = begin_batch(ann, upload(ann, *["one hundred tokens, and then some"] * 40))
        eventually(lambda: live.context.tenancy.find(["ann-key"]).room_for_lines(0) == 0)
        other = begin_batch(bob, upload(bob, *["hello|"] * 20))
        eventually(lambda: status(bob, other) == "completed")
        assert status(ann, poor) == "in_progress"
        database = sqlite3.connect(f"file:{tmp_path / 'data/batches.sqlite'}?mode=ro", uri=True)
        query = "SELECT count(*), max(attempts) FROM lines WHERE outcome = 0"
        eventually(lambda: database.execute(query).fetchone()[1] == 0)
        assert database.execute(query).fetchone()[0] > 0
        database.close()
        ann.post(f"/v1/batches/{poor}/cancel")
        eventually(lambda: status(ann, poor) == "cancelled")


def test_after_a_restart_the_owner_is_found_by_its_name(tmp_path: Path) -> None:
    """A batch goes on for its tenant; of one that left the file everything is kept out of reach until it is back."""
    path = tmp_path / "tenants.yaml"
    path.write_text(FILE, encoding="utf-8")
    argv = ("serve", "--port", "0", "--tenants", str(path), "--data-dir", str(tmp_path / "data"), "--api-key", "plain")

    def known(url: str, key: str) -> tuple[int, int]:
        with httpx.Client(base_url=url, headers={"x-api-key": key}) as http:
            return len(http.get("/v1/files").json()["data"]), len(http.get("/v1/batches").json()["data"])

    with quire(*argv, FAKE_STEP_S="0.05") as process:
        url = ready(process)
        with httpx.Client(base_url=url, headers={"x-api-key": "ann-key"}) as ann:
            batch = begin_batch(ann, upload(ann, *["say"] * 20, ignore_eos=True))
            eventually(lambda: status(ann, batch) == "in_progress")
        process.kill()
        process.wait()
    path.write_text("tenants: [{name: bob, key: bob-key}]", encoding="utf-8")
    with quire(*argv) as process:
        url = ready(process)
        assert known(url, "bob-key") == known(url, "plain") == (0, 0)
        with httpx.Client(base_url=url, headers={"x-api-key": "bob-key"}) as bob:
            own = begin_batch(bob, upload(bob, "hi", max_tokens=2))
            eventually(lambda: status(bob, own) == "completed")
            assert bob.get(f"/v1/batches/{batch}").status_code == 404
    with quire(*argv[:3], "--data-dir", argv[6]) as process:  # without --tenants there is one account, the operator's
        assert known(ready(process), "any") == (0, 0)
    path.write_text(FILE.replace("ann-key", "new-key"), encoding="utf-8")
    with quire(*argv) as process:
        url = ready(process)
        assert known(url, "bob-key") == (2, 1)
        with httpx.Client(base_url=url, headers={"x-api-key": "new-key"}) as ann:
            eventually(lambda: status(ann, batch) == "completed")
            assert ann.get(f"/v1/batches/{batch}").json()["request_counts"]["completed"] == 20


LONG = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(100))  # 6 blocks of 16


def cached(live: Live, key: str, prompt: str, **fields: Any) -> int:
    with client(live, key) as http:
        answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **fields})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("shares", [False, True])
def test_no_tenant_can_tell_what_another_has_sent(serve: Callable[..., Live], tmp_path: Path, shares: bool) -> None:
    """Of another's prompt nothing is cached, unless --share-prefix-cache says so; one's own is."""
    (tmp_path / "tenants.yaml").write_text(FILE, encoding="utf-8")
    live = serve(tenants=tmp_path / "tenants.yaml", api_keys=("plain",), share_prefix_cache=shares)
    for salt in ("", "ann", "bob"):  # a salt is the tenant's own, whatever it says
        assert cached(live, "ann-key", LONG + "ask", cache_salt=salt) == 0
        assert cached(live, "ann-key", LONG + "ask again", cache_salt=salt) >= 96
        for key in KEYS:
            assert (cached(live, key, LONG + "ask", cache_salt=salt) >= 96) == shares, key


def test_the_live_view_shows_a_tenant_its_own_sequences(serve: Callable[..., Live], tmp_path: Path) -> None:
    """The operator is shown all; sums are of all."""
    (tmp_path / "tenants.yaml").write_text(FILE, encoding="utf-8")
    live = serve(tenants=tmp_path / "tenants.yaml", api_keys=("plain",), step_s=0.1)
    body = {"prompt": "endless", "max_tokens": 400, "stream": True}

    def look(key: str) -> dict[str, Any]:
        with client(live, key) as http:
            return dict(http.get("/v1/engine/live").json())

    def tags(key: str) -> list[str]:
        eventually(lambda: look(key)["requests"]["running"] == 1)
        return [sequence["tag"] for sequence in look(key)["sequences"]]

    with client(live, "ann-key") as ann, ann.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        own = tags("ann-key")
        assert len(own) == 1
        assert [tags(key) for key in KEYS] == [[], own]
    eventually(lambda: look("ann-key")["ended"] != [])
    assert [[end["tag"] for end in look(key)["ended"]] for key in KEYS] == [[], own]


def test_models_are_the_operators(serve: Callable[..., Live], tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(FILE, encoding="utf-8")
    with client(serve(tenants=tmp_path / "tenants.yaml", api_keys=("plain",)), "ann-key") as http:
        for action in ("load", "unload"):
            assert http.post(f"/v1/models/parrot/{action}").status_code == 403


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_adapters_are_the_operators(serve: Callable[..., Live], tmp_path: Path, path: str) -> None:
    (tmp_path / "tenants.yaml").write_text(FILE, encoding="utf-8")
    live = serve(tenants=tmp_path / "tenants.yaml", api_keys=("plain",), allow_runtime_lora_updating=True)
    body = {"lora_name": "x", "lora_path": str(tmp_path)}
    if "unload" in path:
        del body["lora_path"]
    for key, wanted in (("ann-key", 403), ("plain", 400)):
        with client(live, key) as http:
            answer = http.post(path, json=body)
            assert (answer.status_code == 403) == (wanted == 403), answer.text
            if wanted == 403:
                assert "adapters takes a key of --api-key" in answer.json()["error"]["message"]
