"""`quire serve --record`: what a real daemon writes replays to the same plans."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from real_daemon import SMALL, refusal, serve

from loadtest.simulation.recording import replay_recording

FLAGS = ("--max-model-len", "512", "--num-gpu-blocks-override", "34", "--max-num-batched-tokens", "128")


def test_a_recorded_daemon_replays_plan_for_plan(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with serve(*FLAGS, "--swap-space", "0.1", "--record", path) as daemon:
        first = daemon.text(max_tokens=40)
        with ThreadPoolExecutor(6) as pool:
            prompts = [f"The capital of France is{first} {number}: and so on" * 4 for number in range(6)]
            list(pool.map(lambda prompt: daemon.text(prompt, max_tokens=40, n=2, temperature=1, seed=1), prompts))
        assert daemon.metric("quire_preemptions_total") > 0
        num_requests = 7
    done = replay_recording(path)
    assert (done.difference, done.end, done.num_requests) == ("", "the daemon stopped", num_requests)
    assert done.stats.preemptions > 0
    assert done.stats.prefix_hit_tokens > 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    assert "--record is" in refusal(*SMALL, "--record", tmp_path / "nowhere" / "history.jsonl")
    assert "--kv-offload-config" in refusal(
        *SMALL,
        "--record",
        tmp_path / "it",
        "--kv-offload-config",
        json.dumps({"host_gib": 0.1, "folder": str(tmp_path / "kv")}),
    )
