"""A daemon that is killed in the middle of a batch, and the next one over the same folder. Real processes; fake model."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from pathlib import Path

import httpx
import openai
import pytest
from harness import eventually
from test_cli import outcome, quire, ready

NUM_LINES = 40


def lines() -> bytes:
    body = {"prompt": "hi", "max_tokens": 30, "ignore_eos": True, "temperature": 0}
    asked = [
        {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": f"say {i}"}}
        for i in range(NUM_LINES)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in asked)


def finished(folder: Path) -> dict[str, bytes]:
    """What the database holds of lines that have run; read while a daemon may be writing it."""
    db = sqlite3.connect(f"file:{folder / 'batches.sqlite'}?mode=ro", uri=True)
    try:
        return dict(db.execute("SELECT custom_id, entry FROM lines WHERE outcome"))
    finally:
        db.close()


def test_killed_in_the_middle_it_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    argv = ("serve", "--data-dir", str(folder))
    hold = tmp_path / "hold"
    hold.write_text("120")  # of at least 150 steps that the whole batch takes, more if lines come slowly
    with quire(*argv, FAKE_HOLD=str(hold)) as process:
        url = ready(process)
        with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
            file = client.files.create(file=lines(), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 6)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    before = finished(folder)
    assert 6 < len(before) < NUM_LINES
    (folder / "files" / ("file-" + "0" * 32 + ".tmp")).write_bytes(b"half of an upload")
    with quire(*argv) as process:
        url = ready(process)
        with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
            eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
            counts = client.batches.retrieve(batch.id).request_counts
            assert (counts.total, counts.completed, counts.failed) == (NUM_LINES, NUM_LINES, 0)
            output = client.files.content(client.batches.retrieve(batch.id).output_file_id).content.splitlines()
        names = [json.loads(line)["custom_id"] for line in output]
        assert names == [f"line-{i}" for i in range(NUM_LINES)]
        assert {name: line for name, line in zip(names, output, strict=True) if name in before} == before
        assert len(list((folder / "files").iterdir())) == 2
        assert httpx.get(f"{url}/metrics").status_code == 200


def test_told_to_leave_it_does_not_wait_for_a_batch(tmp_path: Path) -> None:
    argv = ("serve", "--data-dir", str(tmp_path))
    with quire(*argv, FAKE_STEP_S="0.05") as process:
        with openai.OpenAI(base_url=ready(process) + "/v1", api_key="any", max_retries=0) as client:
            file = client.files.create(file=lines().replace(b": 30", b": 3000"), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        process.send_signal(signal.SIGTERM)
        assert outcome(process)[0] == 0
    db = sqlite3.connect(tmp_path / "batches.sqlite")
    assert db.execute("SELECT count(*), max(attempts), max(outcome) FROM lines").fetchone() == (NUM_LINES, 0, 0)
    db.close()


def test_a_folder_has_one_daemon(tmp_path: Path) -> None:
    argv = ("serve", "--data-dir", str(tmp_path))
    with quire(*argv) as first:
        ready(first)
        with quire(*argv) as second:
            status, told = outcome(second)
    assert status == 2
    assert "which another daemon uses" in told


@pytest.mark.parametrize("name", ["data", "data/batches.sqlite", "data/files/folder/file"])
def test_a_folder_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("no database" * 100)
    with quire("serve", "--data-dir", str(tmp_path / "data")) as process:
        status, told = outcome(process)
    assert status == 2
    assert "--data-dir is" in told
    assert "cannot be used" in told
