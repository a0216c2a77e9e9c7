"""`server.ray_serve` on a real cluster: daemons with the default model, of one thread each."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cpu.test_rank_processes import workers
from tests.patience import PATIENCE_S, eventually

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
FLAGS = ["--num-threads", "1", "--kv-cache-memory-bytes", "128MiB", "--served-model-name", "smol"]
LONG = {"model": "smol", "prompt": "hi", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def run(**options: Any) -> None:
    from ray import serve

    from server.ray_serve.deployment import build

    serve.run(build({"flags": FLAGS, **options}), name="quire", route_prefix="/")


def num_running() -> int:
    from ray import serve

    states = serve.status().applications["quire"].deployments["Daemon"].replica_states
    return {str(getattr(state, "value", state)): count for state, count in states.items()}.get("RUNNING", 0)


def daemons() -> set[int]:
    """Return the processes of this cluster's daemons."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _is_ours(int(entry.name)):
            found.add(int(entry.name))
    return found


def _is_ours(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/cmdline").read_bytes()
        if not name.startswith(b"ray::ServeReplica:quire:Daemon"):
            return False
        while pid > 1 and pid != os.getpid():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return False
    return pid == os.getpid()


def events(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@contextmanager
def asked_all_along(url: str) -> Iterator[Callable[[], list[tuple[int, str]]]]:
    """Ask short questions without a pause; calling what is yielded stops, and returns status and last event of each."""
    is_over = threading.Event()
    found: list[tuple[int, str]] = []

    def ask(number: int) -> None:
        while not is_over.is_set():
            body = {"model": "smol", "prompt": f"{number}: one two three", "max_tokens": 8, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
                found.append((answer.status_code, (events(answer.iter_lines()) or [""])[-1]))

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, number) for number in range(4)]

        def stop() -> list[tuple[int, str]]:
            is_over.set()
            for each in asked:
                each.result()
            return found

        try:
            yield stop
        finally:
            is_over.set()


def test_the_sdk_streams_through_two_replicas(cluster: str) -> None:
    run(replicas=2)
    with openai.OpenAI(base_url=f"{cluster}/v1", api_key="any") as client, ThreadPoolExecutor(4) as pool:

        def ask(_: int) -> str:
            stream = client.chat.completions.create(
                model="smol",
                messages=[{"role": "user", "content": "What is the capital of Japan?"}],
                temperature=0,
                max_tokens=24,
                stream=True,
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        assert set(pool.map(ask, range(8))) == {"The capital of Japan is Tokyo."}
    assert len(daemons()) == 2
    answer = httpx.post(f"{cluster}/v1/completions", json={"prompt": "hi", "max_tokens": "x"})
    assert answer.status_code == 400  # the daemon's own words
    assert answer.json()["error"]["param"] == "max_tokens"
    assert httpx.get(f"{cluster}/v1/files").status_code == 404


def test_a_lost_daemon_ends_its_streams_and_is_replaced(cluster: str) -> None:
    run(replicas=2)
    before = daemons()
    with ThreadPoolExecutor(4) as pool:
        begun = threading.Barrier(5)

        def stream(number: int) -> list[str]:
            body = {**LONG, "prompt": f"{number} is a number " * 20}
            with httpx.stream("POST", f"{cluster}/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                begun.wait()
                return events(lines)

        asked = [pool.submit(stream, number) for number in range(4)]
        begun.wait()
        os.kill(min(before), signal.SIGKILL)
        answers = [each.result() for each in asked]
    assert all(answer[-1] == "[DONE]" for answer in answers)
    lost = [answer for answer in answers if "error" in answer[-2]]
    assert 0 < len(lost) < 4, "a stream of each daemon"
    assert all(json.loads(answer[-2])["error"]["code"] == "daemon_lost" for answer in lost)
    eventually(lambda: len(daemons()) == 2 and min(before) not in daemons() and num_running() == 2)
    assert httpx.post(f"{cluster}/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200


def test_a_client_that_leaves_is_noticed_by_its_daemon(cluster: str) -> None:
    """Its request would else run for its 1,500 tokens, and the daemon could not stop."""
    run(replicas=1)
    with httpx.stream("POST", f"{cluster}/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
    answer = httpx.post(f"{cluster}/v1/completions", json={**LONG, "stream": False, "max_tokens": 4})
    assert answer.status_code == 200


def groups() -> list[dict[str, Any]]:
    """Return the placement groups of the cluster that are not removed."""
    from ray.util import placement_group_table

    return [each for each in placement_group_table().values() if each["state"] != "REMOVED"]


def test_a_daemon_may_be_two_processes(cluster: str) -> None:
    """It has a placement group on one node, and the same answers, through shared memory and through gloo."""
    body = {"model": "smol", "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    texts = []
    for size, kernels in ((1, "auto"), (2, "off"), (2, "auto")):
        run(tensor_parallel_size=size, flags=[*FLAGS, "--dtype", "float32", "--cpu-kernels", kernels])
        eventually(lambda: len(daemons()) == 1)
        texts.append(httpx.post(f"{cluster}/v1/completions", json=body).json()["choices"][0]["text"])
        eventually(lambda size=size: len(groups()) == size - 1)
    assert len(set(texts)) == 1
    assert "Paris" in texts[0]
    [group] = groups()
    assert (group["state"], group["strategy"], group["bundles"]) == ("CREATED", "STRICT_PACK", {0: {"CPU": 2.0}})

    [daemon] = daemons()
    [rank] = workers(daemon)
    with httpx.stream("POST", f"{cluster}/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(rank, signal.SIGKILL)
        last = events(lines)
    assert last[-1] == "[DONE]"
    assert json.loads(last[-2])["error"]["code"] == "engine_dead"
    eventually(lambda: daemon not in daemons() and num_running() == 1)
    assert httpx.post(f"{cluster}/v1/completions", json=body).json()["choices"][0]["text"] == texts[0]
    [other] = groups()
    assert other["placement_group_id"] != group["placement_group_id"]


def test_a_hung_engine_is_replaced(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process goes on answering Ray. After the stall limit its health is red: its requests end, and Ray replaces it."""
    from server.ray_serve import deployment
    from tests.ray_cluster.hanging import HangingDaemon

    monkeypatch.setattr(deployment, "Daemon", HangingDaemon)
    run(replicas=2, ingress_replicas=2, drain_s=1.0, flags=[*FLAGS, "--stall-limit", "20"])
    eventually(lambda: len(daemons()) == 2)
    before = daemons()
    body = {"model": "smol", "prompt": "a number is a number " * 20, "max_tokens": 4}
    ask = partial(httpx.post, f"{cluster}/v1/completions", timeout=PATIENCE_S)
    answer = ask(json={**body, "stream": True}, headers={"x-hang": "1"})
    error = json.loads(events(iter(answer.text.splitlines()))[-2])["error"]
    assert error["code"] == "engine_dead"
    assert "made no step for 20 s" in error["message"]
    eventually(
        lambda: ask(json=body).status_code == 200
    )  # of the other daemon; until it is replaced, this one answers 503
    eventually(lambda: bool(daemons() - before))
    eventually(lambda: len(daemons()) == 2 and len(before & daemons()) == 1 and num_running() == 2)


def test_a_daemon_that_answers_no_check_is_replaced(cluster: str) -> None:
    run(replicas=2, drain_s=1.0)
    eventually(lambda: len(daemons()) == 2)
    before = daemons()
    os.kill(min(before), signal.SIGSTOP)
    eventually(lambda: bool(daemons() - before))
    eventually(lambda: len(daemons()) == 2 and min(before) not in daemons() and num_running() == 2)


def test_an_update_under_load_fails_no_request(cluster: str) -> None:
    run(replicas=2)
    before = daemons()
    with asked_all_along(cluster) as stop:
        run(replicas=2, drain_s=31.0, flags=[*FLAGS, "--max-num-seqs", "16"])
        eventually(lambda: not before & daemons())
        answers = stop()
    assert len(answers) > 8
    assert set(answers) == {(200, "[DONE]")}


def test_daemons_come_and_go_with_the_load(cluster: str) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 1}
    run(autoscaling={**scaling, "downscale_delay_s": 2, "look_back_period_s": 2})
    eventually(lambda: num_running() == 1)
    with asked_all_along(cluster) as stop:
        eventually(lambda: num_running() == 2)
        answers = stop()
    assert set(answers) == {(200, "[DONE]")}
    eventually(lambda: num_running() == 1)
