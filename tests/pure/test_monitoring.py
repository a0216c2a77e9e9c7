"""The dashboard and the alerts against the code they describe; no Prometheus, Grafana or Docker here.

monitoring/verify.py does the same against a real Prometheus, where one is installed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.core.config import SchedulerConfig
from engine.core.fake_runner import FakeRunner
from engine.core.scheduler import Scheduler
from engine.loop import Engine
from server.telemetry.events import FieldIgnored, HttpAnswered
from server.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "monitoring"
SERIES = re.compile(r"\bquire_\w+")


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """Every name of a sample that /metrics can show."""
    config = SchedulerConfig(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=8)
    metrics = Metrics(Engine(Scheduler(config), FakeRunner(config), vocab_size=16), "m", compat_vllm=False)
    metrics.listeners[0](HttpAnswered("id", "/", "GET", 200, 0.0, None))
    metrics.listeners[0](FieldIgnored("x"))
    lines = metrics.render()[0].decode().splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def queries() -> list[str]:
    dashboard = json.loads((MONITORING / "dashboards" / "quire.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    alerts = [rule["expr"] for rule in load("monitoring/alerts.yml")["groups"][0]["rules"]]
    assert len(expressions) > 40
    assert len(alerts) >= 8
    return expressions + alerts


def test_queries_name_only_series_that_exist(exposed: set[str]) -> None:
    named = {name for query in queries() for name in SERIES.findall(query)}
    assert named - exposed == set()


def test_no_histogram_goes_unseen(exposed: set[str]) -> None:
    histograms = {name.removesuffix("_bucket") for name in exposed if name.endswith("_bucket")}
    shown = " ".join(queries())
    assert {name for name in histograms if name not in shown} == {"quire_http_request_duration_seconds"}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    dashboard = json.loads((MONITORING / "dashboards" / "quire.json").read_text())
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_every_alert_is_tested_both_ways() -> None:
    names = {rule["alert"] for rule in load("monitoring/alerts.yml")["groups"][0]["rules"]}
    quiet, loud = (
        {case["alertname"] for case in test["alert_rule_test"] if bool(case["exp_alerts"]) is fires}
        for test, fires in zip(load("monitoring/alerts_test.yml")["tests"], (False, True), strict=True)
    )
    assert quiet == loud == names


def test_prometheus_finds_its_rules_and_its_target() -> None:
    compose = load("docker-compose.yml")["services"]
    for name in ("prometheus.yml", "prometheus.compose.yml"):
        config = load(f"monitoring/{name}")
        assert all((MONITORING / rules).exists() for rules in config["rule_files"])
        assert [job["job_name"] for job in config["scrape_configs"]] == ["quire"]
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["quire:8000"]}]
    for daemon in ("quire-gpu", "quire-cpu"):
        assert compose[daemon]["networks"]["default"]["aliases"] == ["quire"]


def test_every_service_has_a_health_check() -> None:
    for name, service in load("docker-compose.yml")["services"].items():
        assert "healthcheck" in service or name.startswith("quire-"), name  # the image has its own


def test_grafana_is_provisioned_with_what_compose_runs() -> None:
    provisioning = "monitoring/grafana/provisioning"
    (source,) = load(f"{provisioning}/datasources/prometheus.yml")["datasources"]
    (provider,) = load(f"{provisioning}/dashboards/quire.yml")["providers"]
    services = load("docker-compose.yml")["services"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    mounted = {volume.split(":")[1] for volume in services["grafana"]["volumes"]}
    assert {provider["options"]["path"], "/etc/grafana/provisioning"} <= mounted
