"""The dashboard, the alerts and the runbook against the code they describe.

promtool tests the alerts where it is installed. monitoring/verify.py evaluates everything against a real daemon and a real
Prometheus.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.handle import EngineFacts
from engine.loop import Engine
from engine.text.chat.history import HistoryCounts
from loadtest.fake_runner import FakeRunner
from server.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "monitoring"
DASHBOARD = json.loads((MONITORING / "dashboards" / "quire.json").read_text())
# Metrics without a panel, by the beginning of their names, and why.
WITHOUT_PANEL = {
    "python_": "the interpreter's garbage collector and version, of use only in a search for a leak",
    "process_": "the process; its memory, CPU and files have panels, its start time and virtual memory say nothing as a graph",
}
SERIES = re.compile(r"\bquire_\w+")
SELECTED = re.compile(r"\b(quire_\w+)\{([^}]*)\}")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
PROMETHEUS_LABELS = {"instance", "job", "le"}


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


class Counts:
    """Stands for the spans' counts, without OpenTelemetry."""

    def __init__(self) -> None:
        self.sent = 0
        self.dropped = {"queue_full": 0}
        self.entries = [SimpleNamespace(name="m", parts=None, reason="", num_loads=0)]


@pytest.fixture(scope="module")
def families() -> dict[str, tuple[str, set[str]]]:
    """Every family that /metrics can have: its type and its labels."""
    config = SchedulerConfig(num_blocks=8, block_size=4, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=8)
    metrics = Metrics(compat_vllm=False).add_model(
        "m", Engine(Scheduler(config), FakeRunner(config), EngineFacts(16)), HistoryCounts()
    )
    metrics.add_rows("spans", Counts())
    metrics.add_rows("models", Counts())
    found: dict[str, tuple[str, set[str]]] = {}
    for line in metrics.render()[0].decode().splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            if not name.endswith("_created"):  # the client library adds one for each metric
                found[name] = kind, set()
        elif not line.startswith("#") and name in found:
            found[name][1].update(re.findall(r'(\w+)="', line))
    for collector, names in metrics.registry._collector_to_names.items():
        for name in set(names) & found.keys():  # a metric with labels has no sample before it is counted
            found[name][1].update(getattr(collector, "_labelnames", ()))
    return found


@pytest.fixture(scope="module")
def exposed(families: dict[str, tuple[str, set[str]]]) -> dict[str, set[str]]:
    """Every series of Quire's own, with its labels."""
    return {
        name + suffix: labels
        for name, (kind, labels) in families.items()
        for suffix in SUFFIXES.get(kind, ("",))
        if name.startswith("quire_")
    }


def rules() -> list[dict[str, Any]]:
    return [rule for group in load("monitoring/alerts.yml")["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def shown() -> list[str]:
    """The PromQL of all panels."""
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def queries() -> list[str]:
    return [*shown(), *(rule["expr"] for rule in rules())]


def test_queries_name_only_series_and_labels_that_exist(exposed: dict[str, set[str]]) -> None:
    assert len(queries()) > 100
    for query in queries():
        assert set(SERIES.findall(query)) <= exposed.keys(), query
        for name, selector in SELECTED.findall(query):
            assert set(re.findall(r"(\w+)[=!]", selector)) <= exposed[name] | PROMETHEUS_LABELS, query


def test_recorded_series_exist() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    named = {name for query in queries() for name in re.findall(r"quire:[\w:]+", query)}
    assert named == recorded


def test_every_metric_has_a_panel_or_a_reason(families: dict[str, tuple[str, set[str]]]) -> None:
    text = " ".join(shown())
    missing = {name for name in families if not re.search(rf"\b{name}(_bucket|_sum|_count)?\b", text)}
    unexplained = {name for name in missing if not name.startswith(tuple(WITHOUT_PANEL))}
    assert unexplained == set(), "give it a panel in monitoring/dashboards/quire.json, or a reason in WITHOUT_PANEL"
    assert all(any(name.startswith(start) for name in missing) for start in WITHOUT_PANEL), (
        "a reason that nothing needs"
    )


def test_panels_are_described_and_have_a_unit() -> None:
    panels = DASHBOARD["panels"]
    titles = [panel["title"] for panel in panels if panel["type"] != "row"]
    assert len(set(titles)) == len(titles)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for step in panel.get("fieldConfig", {}).get("defaults", {}).get("thresholds", {}).get("steps", ())[:1]:
            assert step["value"] is None, panel["title"]
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == [
        "datasource",
        "model_name",
        "instance",
        "tenant",
    ]


def _slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def test_every_alert_has_an_entry_in_the_runbook(families: dict[str, tuple[str, set[str]]]) -> None:
    """Its heading is the alert's name, and it says what the alert means, what to check and what to do."""
    text = (ROOT / "docs/observe/runbook.md").read_text()
    entries = dict(re.findall(r"(?ms)^### (\w+)\n(.*?)(?=^#|\Z)", text))
    assert entries.keys() == {alert["alert"] for alert in alerts()}
    for alert in alerts():
        path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert path == "docs/observe/runbook.md"
        assert anchor == _slug(alert["alert"])
        body = entries[alert["alert"]]
        for part in ("**Meaning.**", "**Check.**", "**Act.**"):
            assert part in body, f"{alert['alert']}: {part}"
        assert body.strip().startswith(f"*{alert['labels']['severity']}* "), alert["alert"]
    assert set(SERIES.findall(text)) <= families.keys()


def test_every_alert_is_tested_both_ways() -> None:
    names = {alert["alert"] for alert in alerts()}
    quiet, loud = (
        {case["alertname"] for case in test["alert_rule_test"] if bool(case["exp_alerts"]) is fires}
        for test, fires in zip(load("monitoring/alerts_test.yml")["tests"][:2], (False, True), strict=True)
    )
    assert quiet == loud == names


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize("command", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_accepts_the_alerts(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], check=False, cwd=MONITORING, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = DASHBOARD["panels"]
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


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
