"""A real cluster of Ray on this machine, on loopback and free ports."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pytest_configure(config: pytest.Config) -> None:
    """Ray leaves its processes to the system, and pytest notices after the last test."""
    if find_spec("ray") is not None:
        config.addinivalue_line("filterwarnings", "ignore:subprocess .* is still running:ResourceWarning")
        config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: make ray")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a cluster's HTTP proxy, which serves whatever a test runs on it."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    import ray
    from ray import serve

    ray.init(
        num_cpus=8,  # each replica asks for one; they are not bound to cores
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
