"""deploy/kubernetes: every overlay is built by kubectl, and each object is valid where it will be applied."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from server.settings.settings import DECLARED, ENV_PREFIX, names_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kubernetes"
VERSIONS = ("1.32", "1.37")  # the oldest that the documents name, and the newest that the package knows
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml"))
COMPONENTS = sorted(path.parent.name for path in FOLDER.glob("components/*/kustomization.yaml"))
Object = dict[str, Any]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which builds overlays, is missing")


@cache
def build(folder: Path) -> list[Object]:
    """Return the objects of a kustomization."""
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return list(yaml.safe_load_all(built.stdout))


def named(objects: list[Object], kind: str, name: str = "quire") -> Object:
    return next(each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)


def container(objects: list[Object]) -> Object:
    return named(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]


def closed(schema: Any) -> Any:
    """Return a custom resource's schema as a JSON schema that forbids unknown fields, as Kubernetes prunes them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {key: closed(value) for key, value in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
        result["additionalProperties"] = False
    return result


@cache
def resources() -> dict[tuple[str, str], Any]:
    """Return the schemas of custom resources, by version and kind."""
    found = [json.loads(path.read_text()) for path in (Path(__file__).parent / "crds").glob("*.json")]
    return {(each["apiVersion"], each["kind"]): closed(each["schema"]) for each in found}


def check(each: Object) -> None:
    """Raise a ValidationError unless the API server would take the object."""
    own = resources().get((each["apiVersion"], each["kind"]))
    if own is None:
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)
    else:
        body = {key: value for key, value in each.items() if key != "metadata"}
        own = {**own, "properties": {**own["properties"], "metadata": {}}}
        jsonschema.validate(body, own)


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_of_an_overlay_is_valid(overlay: str) -> None:
    for each in build(FOLDER / "overlays" / overlay):
        check(each)


@needs_kubectl
@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_can_be_added_to_the_base(component: str, tmp_path: Path) -> None:
    """Kustomize takes relative paths only, so the folder is copied."""
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    own = tmp_path / "kubernetes/overlays/own"
    own.mkdir()
    (own / "kustomization.yaml").write_text(f"resources: [../../base]\ncomponents: [../../components/{component}]\n")
    for each in build(own):
        check(each)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("ScaledObject", {"spec": {"scaleTargetRef": {"name": "quire"}, "trigers": []}}),
        ("ServiceMonitor", {"spec": {"selector": {}, "endpoints": [{"port": 8000}]}}),
        ("InferencePool", {"spec": {"targetPorts": [{"number": 70000}]}}),
        ("RayService", {"spec": {"serveConfig": "x"}}),
        ("PrometheusRule", {"spec": {"groups": [{"rules": []}]}}),
        ("StatefulSet", {"apiVersion": "apps/v1", "spec": {"replica": 1}}),
    ],
)
def test_the_check_finds_a_wrong_field(kind: str, wrong: Object) -> None:
    version = next((version for version, each in resources() if each == kind), "apps/v1")
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check({"apiVersion": version, "kind": kind, "metadata": {"name": "quire"}, **wrong})


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_variable_is_a_setting(overlay: str) -> None:
    objects = build(FOLDER / "overlays" / overlay)
    maps = [each for each in objects if each["kind"] == "ConfigMap"]
    names = {name for each in maps for name in each["data"]} | {each["name"] for each in container(objects)["env"]}
    settings = {ENV_PREFIX + name.upper() for name in names_of(DECLARED)}
    assert {name for name in names if name.startswith(ENV_PREFIX)} <= settings


def test_the_ray_service_is_valid() -> None:
    """Its pods' specs are Kubernetes' own."""
    service = yaml.safe_load((ROOT / "deploy/ray/rayservice.yaml").read_text())
    check(service)
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]})
    assert yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"].keys() <= _arguments()
    assert (
        yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())["applications"][0]["args"].keys() <= _arguments()
    )


def _arguments() -> set[str]:
    """Return the arguments of the Ray application, from the table that describes them."""
    page = (ROOT / "docs/deploy/ray.md").read_text()
    table = page[page.index("| argument |") : page.index("Ray does not bind")]
    return {name for line in table.splitlines()[2:] if line for name in re.findall(r"`(\w+)`", line.split("|")[1])}


@needs_kubectl
def test_the_daemon_has_time_to_finish_its_streams() -> None:
    objects = build(FOLDER / "base")
    pod = named(objects, "StatefulSet")["spec"]["template"]["spec"]
    waits = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    drains = next(each.default for each in DECLARED if each.name == "shutdown_timeout")
    assert pod["terminationGracePeriodSeconds"] >= waits + drains + 30


@needs_kubectl
def test_what_selects_the_daemons_agrees_with_their_labels() -> None:
    objects = build(FOLDER / "base")
    labels = named(objects, "StatefulSet")["spec"]["template"]["metadata"]["labels"].items()
    assert named(objects, "StatefulSet")["spec"]["selector"]["matchLabels"].items() <= labels
    assert named(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels
    assert named(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert all(each["spec"]["selector"].items() <= labels for each in objects if each["kind"] == "Service")


def test_the_alerts_are_those_of_prometheus() -> None:
    rule = yaml.safe_load((FOLDER / "components/monitoring/alerts.yaml").read_text())
    alerts = yaml.safe_load((ROOT / "monitoring/alerts.yml").read_text())
    assert rule["spec"] == alerts, (
        "python monitoring/kubernetes.py > deploy/kubernetes/components/monitoring/alerts.yaml"
    )
