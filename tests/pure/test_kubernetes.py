"""deploy/kubernetes: every overlay is built by kubectl, and each object is valid where it will be applied."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from engine.core.errors import ConfigError
from engine.settings.setting import names_of
from server.settings.flags import load_settings
from server.settings.settings import DECLARED, ENV_PREFIX

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
    return list(yaml.load_all(built.stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


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
    check_once(json.dumps(each, default=str))


@cache  # most objects are those of several overlays
def check_once(text: str) -> None:
    """Check an object that is written as JSON."""
    each = json.loads(text)
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


def pod(objects: list[Object], kind: str = "StatefulSet", name: str = "quire") -> Object:
    return named(objects, kind, name)["spec"]["template"]["spec"]


def variables(objects: list[Object]) -> dict[str, str]:
    """Return a daemon's variables: those of the ConfigMap, and above them its container's."""
    [config] = [each for each in objects if each["kind"] == "ConfigMap" and "QUIRE_LOG_FORMAT" in each["data"]]
    return config["data"] | {each["name"]: each.get("value", "") for each in container(objects)["env"]}


def ports_of(objects: list[Object]) -> set[str]:
    """Return the ports that the daemons' container, their Services and their policies agree on."""
    names = {each["name"] for each in container(objects)["ports"]}
    served = {each["targetPort"] for each in named(objects, "Service", "quire-daemons")["spec"]["ports"]}
    assert served <= names
    return served


def sources(objects: list[Object], port: str) -> list[Object]:
    """Return who may reach a port of the daemons."""
    labels = named(objects, "StatefulSet")["spec"]["template"]["metadata"]["labels"].items()
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    mine = [each for each in policies if each["podSelector"]["matchLabels"].items() <= labels]
    rules = [rule for each in mine for rule in each.get("ingress", ()) if {"port": port} in rule["ports"]]
    return [source for rule in rules for source in rule["from"]]


def has_gpus(objects: list[Object], number: int, memory: str) -> None:
    resources = container(objects)["resources"]
    assert resources["limits"] == {"memory": memory, "nvidia.com/gpu": number}
    assert resources["requests"]["memory"] == memory
    assert container(objects)["image"] == "quire:cuda"
    assert pod(objects)["tolerations"][0]["key"] == "nvidia.com/gpu"


def is_base(objects: list[Object], added: set[str]) -> None:
    """Check what holds whatever is added."""
    assert {"podSelector": {"matchLabels": {"quire-client": "true"}}} in sources(objects, "http")
    limits, requests = (container(objects)["resources"][name]["memory"] for name in ("limits", "requests"))
    assert limits == requests
    assert int(limits.removesuffix("Gi")) >= 4
    [spread] = pod(objects)["topologySpreadConstraints"]
    labels = named(objects, "StatefulSet")["spec"]["template"]["metadata"]["labels"].items()
    assert spread["labelSelector"]["matchLabels"].items() <= labels
    assert "http" in ports_of(objects)


def is_gpu(objects: list[Object], added: set[str]) -> None:
    if "tensor-parallel" not in added:
        has_gpus(objects, 1, "16Gi")


def is_tensor_parallel(objects: list[Object], added: set[str]) -> None:
    has_gpus(objects, 2, "32Gi")
    assert variables(objects)["QUIRE_TENSOR_PARALLEL_SIZE"] == "2"
    shm = next(each for each in pod(objects)["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"]["sizeLimit"] == "8Gi"


def is_kv_folder(objects: list[Object], added: set[str]) -> None:
    config = json.loads(variables(objects)["QUIRE_KV_OFFLOAD_CONFIG"])
    mounts = {each["name"]: each["mountPath"] for each in container(objects)["volumeMounts"]}
    assert config["folder"].startswith(mounts["state"])
    [claim] = named(objects, "StatefulSet")["spec"]["volumeClaimTemplates"]
    assert int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) >= 20 + config["disk_gib"]


def is_monitoring(objects: list[Object], added: set[str]) -> None:
    assert named(objects, "ServiceMonitor")["spec"]["endpoints"][0]["port"] == "http"
    assert named(objects, "PrometheusRule")
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert prometheus in sources(objects, "http")


def is_autoscaling(objects: list[Object], added: set[str]) -> None:
    assert named(objects, "ScaledObject")["spec"]["scaleTargetRef"]["name"] == "quire"
    assert "replicas" not in named(objects, "StatefulSet")["spec"]


def is_inference_pool(objects: list[Object], added: set[str]) -> None:
    assert named(objects, "InferencePool")
    assert {"podSelector": {}} in sources(objects, "http")
    assert variables(objects)["QUIRE_METRICS_COMPAT"] == "vllm"
    assert variables(objects)["QUIRE_PROTECT_METRICS"] == "false"


def is_kv_events(objects: list[Object], added: set[str]) -> None:
    config = json.loads(variables(objects)["QUIRE_KV_EVENTS_CONFIG"])
    bound = {each["name"]: each["containerPort"] for each in container(objects)["ports"]}
    for port, key in (("kv-events", "endpoint"), ("kv-replay", "replay_endpoint")):
        assert config[key] == f"tcp://*:{bound[port]}"
        assert port in ports_of(objects)
        assert sources(objects, port) == [{"podSelector": {"matchLabels": {"quire-router": "true"}}}]


def is_handover(objects: list[Object], added: set[str]) -> None:
    assert "handover" in ports_of(objects)
    [source] = sources(objects, "handover")
    labels = named(objects, "StatefulSet")["spec"]["template"]["metadata"]["labels"].items()
    assert source["podSelector"]["matchLabels"].items() <= labels
    [rule] = named(objects, "NetworkPolicy", "quire-handover")["spec"]["egress"]
    assert {"port": "handover"} in rule["ports"]


def is_router(objects: list[Object], added: set[str]) -> None:
    spec = pod(objects, "Deployment", "quire-router")
    labels = named(objects, "Deployment", "quire-router")["spec"]["template"]["metadata"]["labels"]
    assert labels["quire-client"] == labels["quire-router"] == "true"
    nginx, router = spec["containers"]
    conf = next(each["data"]["quire.conf"] for each in objects if "quire.conf" in each.get("data", ()))
    urls = {each.removeprefix("http://") for each in router["args"] if each.startswith("http://")}
    assert urls == set(re.findall(r"server (quire-\d+:\d+)", conf))
    assert len(urls) == named(objects, "StatefulSet")["spec"]["replicas"]
    for name, _, port in (each.partition(":") for each in urls):
        service = named(objects, "Service", name)["spec"]
        assert service["selector"]["statefulset.kubernetes.io/pod-name"] == name
        assert service["ports"][0]["port"] == int(port)
    assert f"listen {nginx['ports'][0]['containerPort']};" in conf
    assert "server 127.0.0.1:9000;" in conf
    assert {"--host=127.0.0.1", "--port=9000"} <= set(router["args"])
    assert named(objects, "Service", "quire-router")["spec"]["selector"].items() <= labels.items()


ESSENTIALS = {
    "gpu": is_gpu,
    "tensor-parallel": is_tensor_parallel,
    "kv-folder": is_kv_folder,
    "monitoring": is_monitoring,
    "autoscaling": is_autoscaling,
    "inference-pool": is_inference_pool,
    "kv-events": is_kv_events,
    "handover": is_handover,
    "router": is_router,
}
# Pairs that docs/deploy/kubernetes.md excludes.
APART = {frozenset(("tensor-parallel", "kv-folder")), frozenset(("autoscaling", "router"))}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[Object]]:
    """Each component alone, and each pair in both orders, all built by one call: each is in a namespace of its own."""
    added = [(each,) for each in COMPONENTS]
    added += [pair for pair in permutations(COMPONENTS, 2) if frozenset(pair) not in APART]
    overlays = tmp_path_factory.mktemp("kustomize") / "kubernetes/overlays"
    shutil.copytree(FOLDER, overlays.parent)  # kustomize takes relative paths only
    for number, names in enumerate(added):
        folder = overlays / f"pair-{number}"
        folder.mkdir()
        lines = "".join(f"- ../../components/{name}\n" for name in names)
        text = f"namespace: pair-{number}\nresources: [../../base]\ncomponents:\n{lines}"
        (folder / "kustomization.yaml").write_text(text)
    (overlays / "all").mkdir()
    lines = "".join(f"- ../pair-{number}\n" for number in range(len(added)))
    (overlays / "all/kustomization.yaml").write_text(f"resources:\n{lines}")
    built: dict[str, list[Object]] = {}
    for each in build(overlays / "all"):
        built.setdefault(each["metadata"].pop("namespace"), []).append(each)
    return {names: built[f"pair-{number}"] for number, names in enumerate(added)}


@needs_kubectl
@pytest.mark.parametrize("first", COMPONENTS)
def test_components_keep_each_others_values(
    first: str, pairs: dict[tuple[str, ...], list[Object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one alone, and before each of the others; the other order is another test's."""
    for each in pairs[first,]:
        check(each)
    for names, objects in pairs.items():
        if names[0] != first:
            continue
        is_base(objects, set(names))
        for name in names:
            ESSENTIALS[name](objects, set(names))
        starts(variables(objects), monkeypatch)


def starts(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise ConfigError if a daemon with these variables would not start."""
    with monkeypatch.context() as scoped:
        for name, value in environment.items():
            scoped.setenv(name, value or "x")
        load_settings([]).engine_config("some/model")


def test_components_that_do_not_go_together_are_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/deploy/kubernetes.md").read_text()
    for first, second in map(sorted, APART):
        assert re.search(rf"\| `({first}|{second})` \|.*not with `({first}|{second})`", page), (first, second)
    offload = json.dumps({"host_gib": 1, "folder": "/var/lib/quire/kv", "disk_gib": 10})
    with pytest.raises(ConfigError, match="one device"):
        starts({"QUIRE_TENSOR_PARALLEL_SIZE": "2", "QUIRE_KV_OFFLOAD_CONFIG": offload}, monkeypatch)


def test_the_roles_of_the_page_start(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/deploy/kubernetes.md").read_text()
    values = re.findall(r"QUIRE_KV_TRANSFER_CONFIG, value: '(.*?)'", page)
    assert {json.loads(value)["role"] for value in values} == {"prefill", "decode"}
    for value in values:
        starts({"QUIRE_KV_TRANSFER_CONFIG": value, "QUIRE_API_KEY": "x"}, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("ScaledObject", {"spec": {"scaleTargetRef": {"name": "quire"}, "trigers": []}}),
        ("ServiceMonitor", {"spec": {"selector": {}, "endpoints": [{"port": 8000}]}}),
        ("InferencePool", {"spec": {"targetPorts": [{"number": 70000}]}}),
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
