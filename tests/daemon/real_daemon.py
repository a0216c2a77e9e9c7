"""The real `quire serve` with a real model, in a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.forked import Forked
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SMALL = ("--max-model-len", "512", "--num-gpu-blocks-override", "91")  # as many in float32 as in bfloat16


class Daemon:
    """A running daemon: its log so far, and requests to it."""

    def __init__(self, process: subprocess.Popen[str] | Forked) -> None:
        assert process.stderr is not None
        self.log: list[str] = []
        self.status = 0  # that it is to end with
        for line in process.stderr:
            self.log.append(line)
            if found := re.search(r"ready in [\d.]+ s: (\S+)", line):
                break
        else:
            raise AssertionError(f"the daemon did not start: {self.written}")
        # The pipe has to be emptied, or the daemon would wait when it is full.
        self._reader = threading.Thread(target=self.log.extend, args=(process.stderr,), daemon=True)
        self._reader.start()
        self._process, self.pid = process, process.pid
        self.url = found.group(1)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    @property
    def written(self) -> str:
        """Its log so far."""
        return "".join(self.log)

    def complete(self, prompt: str = "The capital of France is", **fields: Any) -> dict[str, Any]:
        """Return a greedy completion of 8 tokens, or as `fields` ask."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0} | fields
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def text(self, prompt: str = "The capital of France is", **fields: Any) -> str:
        """Return the text of the first choice."""
        return self.complete(prompt, **fields)["choices"][0]["text"]

    def cached(self, prompt: str, **fields: Any) -> dict[str, int]:
        """Return the prompt's usage details after completing it."""
        return self.complete(prompt, **fields)["usage"]["prompt_tokens_details"]

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples whose labels include these."""
        total, found = 0.0, False
        for line in self.http.get("/metrics").text.splitlines():
            if re.match(rf"{name}(\{{| )", line) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total, found = total + float(line.rpartition(" ")[2]), True
        assert found, f"there is no metric {name} {labels}"
        return total

    def wait(self) -> None:
        """Wait until it ends by itself."""
        self._process.wait(timeout=PATIENCE_S)

    def stop(self) -> None:
        """Send SIGTERM and wait for an orderly end."""
        self.http.close()
        self._process.terminate()
        assert self._process.wait(timeout=PATIENCE_S) == self.status, self.written
        self._reader.join()
        assert "Traceback" not in self.written, self.written


def start(*argv: str | Path, program: str = "server", **variables: str) -> subprocess.Popen[str] | Forked:
    """Start `quire serve` with these arguments, on a free port; by exec if it is to say what it imports.

    `program` is the name of a module that runs as `server` does.

    Its default is one thread either way (tests/preloaded.py).
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
    env = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    arguments = ["serve", "--port", "0", *map(str, argv)]
    if "PYTHONPROFILEIMPORTTIME" not in variables:
        return Forked(program, arguments, ROOT, env)
    command = [sys.executable, "-m", program, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)


@contextmanager
def serve(*argv: str | Path, program: str = "server", **variables: str) -> Iterator[Daemon]:
    """A daemon that is ready, and stops in order at the end; `argv` are the arguments of `quire serve`."""
    process = start(*argv, program=program, **variables)
    try:
        daemon = Daemon(process)
        yield daemon
        daemon.stop()
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def refused(*argv: str | Path, **variables: str) -> tuple[int, str]:
    """Return the exit status of a daemon that does not start, and all that it logs."""
    process = start(*argv, **variables)
    try:
        _, written = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (1, 2), written
    assert "Traceback" not in written
    return process.returncode, written


def refusal(*argv: str | Path) -> str:
    """Return the last line that `quire serve` writes where it refuses to start."""
    return refused(*argv)[1].splitlines()[-1]
