"""Checks dashboard and alerts against a real daemon and a real Prometheus.

`python monitoring/verify.py` starts a daemon with every feature that has panels (tenants, an adapter, speculation, cache tiers,
targets, traces) and Prometheus (Debian's package, or --prometheus PATH) with the repository's rules. It sends requests of every
kind, evaluates the PromQL of every panel and alert, overloads the daemon until QuireKvFull fires, waits until that is over, and stops the
daemon until QuireDown fires. It fails if a query is an error or finds nothing, or if an alert does not fire.

With --url it uses a daemon that runs already: panels of features that are off there may be empty, and no alert is provoked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from safetensors.numpy import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from loadtest.bench import Asking, closed_loop  # noqa: E402 - the repository's own package
from loadtest.client import Client, ClientError, Outcome, Target  # noqa: E402 - the repository's own package
from loadtest.workload import Length, synthetic  # noqa: E402 - the repository's own package

VARIABLES = {
    "$model_name": ".*",
    "$instance": ".*",
    "$tenant": ".*",
    "$__rate_interval": "15s",
    "$__interval": "5s",
}
SERIES = re.compile(r"\b(?:quire_\w+|up|process_\w+)\b")
# Panels that stay empty without a second daemon.
EMPTY = {"Hand-overs": "quire_handoffs_total is counted on a decode daemon"}
PATIENCE_S = 120.0  # for an alert that must fire
ADAPTER = "an-adapter"
TENANTS = """
tiers: {small: {max_concurrent_requests: 1}}
tenants:
  - {name: acme, key: acme-key, weight: 4}
  - {name: hobby, key: hobby-key, tier: small}
"""


class VerifyError(Exception):
    """The check could not run; the message is one sentence."""


class Check(NamedTuple):
    """One evaluated query; `fault` is empty if it found what it should."""

    where: str
    query: str
    found: int
    fault: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get(url: str) -> Any:
    """GET a JSON document, also from the body of an HTTP error."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own loopback addresses
            body = answer.read()
    except urllib.error.HTTPError as error:
        body = error.read()
    return json.loads(body or b"null")


@contextlib.contextmanager
def running(command: list[str], ready_url: str, log: Path, limit_s: float) -> Iterator[None]:
    """Run a process, from the first successful answer of its URL to the end of the scope."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)  # noqa: S603 - our own commands
        try:
            deadline = time.monotonic() + limit_s
            while not _is_ready(ready_url):
                if process.poll() is not None or time.monotonic() > deadline:
                    tail = log.read_text(errors="replace")[-2000:]
                    raise VerifyError(f"{command[0]} did not become ready; its log ends:\n{tail}")
                time.sleep(0.2)
            yield
        finally:
            has_ended = process.poll() is not None
            process.terminate()
            process.wait()
            if has_ended:
                sys.stderr.write(f"{command[0]} ended; its log ends:\n{log.read_text(errors='replace')[-2000:]}\n")


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - our own loopback addresses
            return True
    except OSError:
        return False


def _write_adapter(folder: Path) -> None:
    """Write a LoRA adapter of zeros for the default model."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {
        f"{name}.lora_A.weight": np.zeros((4, 576), np.float32),
        f"{name}.lora_B.weight": np.zeros((576, 4), np.float32),
    }
    save_file(weights, folder / "adapter_model.safetensors")


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Run a collector of traces that takes everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def daemon(port: int, traces: str, work: Path) -> Iterator[None]:
    """Run a daemon with everything that has panels, and a small pool, so that it fills."""
    (work / "tenants.yaml").write_text(TENANTS)
    _write_adapter(work / "adapter")
    settings = {
        "port": port,
        "kv-cache-memory-bytes": "16MiB",
        "swap-space": 0.05,
        "kv-offload-config": {"host_gib": 0.05, "folder": str(work / "tier"), "disk_gib": 0.1},
        "tenants": str(work / "tenants.yaml"),
        "lora-modules": [f"{ADAPTER}={work / 'adapter'}"],
        "speculative-config": {"method": "ngram", "num_speculative_tokens": 3},
        "target-ttft-ms": 500,
        "otlp-traces-endpoint": traces,
    }
    (work / "quire.yaml").write_text(yaml.safe_dump(settings))
    (work / "tier").mkdir()
    command = [sys.executable, "-m", "server", "serve", "--config", str(work / "quire.yaml")]
    with running(command, f"http://127.0.0.1:{port}/ready", work / "daemon.log", 300):
        yield


@contextlib.contextmanager
def prometheus(binary: str, target: str, work: Path, key: str = "") -> Iterator[str]:
    """Run Prometheus with the repository's rules, faster scrapes, and alerts that do not wait."""
    config = yaml.safe_load((HERE / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    rules = yaml.safe_load((HERE / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "2s"
    (work / "alerts.yml").write_text(yaml.safe_dump(rules))
    config["rule_files"] = [str(work / "alerts.yml")]
    if key:
        config["scrape_configs"][0]["authorization"] = {"credentials": key}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [urllib.parse.urlsplit(target).netloc]
    (work / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        binary,
        f"--config.file={work / 'prometheus.yml'}",
        f"--storage.tsdb.path={work / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command, f"http://127.0.0.1:{port}/-/ready", work / "prometheus.log", 30):
        yield f"http://127.0.0.1:{port}"


async def load(url: str, seconds: float, keys: tuple[str, ...]) -> list[Outcome]:
    """Send requests of every kind: shared prefixes, an adapter, an unknown field, a grammar, an aborted stream."""
    clients = [Client(Target.parse(url, key)) for key in keys]
    client = clients[0]
    names = [model["id"] for model in (await client.get("/v1/models"))["data"]]
    asking = Asking(names[0])
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + seconds
    seed = 0
    while time.monotonic() < deadline:
        seed += 1
        jobs = synthetic(6, prompt=Length(4, 60), output=Length(4, 24), seed=seed, prefix_len=48)
        await closed_loop(client, asking, jobs, 6, outcomes.append)
        unusual: list[dict[str, Any]] = [
            {"a_field_nobody_knows": 1},
            {"structured_outputs": {"regex": f"[a-z]{{{seed}}}"}, "ignore_eos": False, "min_tokens": 0},
        ]
        if ADAPTER in names:
            unusual.append({"model": ADAPTER})
        outcomes += [await client.stream(asking.path, asking.body(jobs[0]) | fields) for fields in unusual]
        for other in clients[1:]:  # of two at the same time one exceeds the tenant's limit
            both = await asyncio.gather(*(other.stream(asking.path, asking.body(jobs[1])) for _ in range(2)))
            outcomes += [outcome for outcome in both if not outcome.error]
        leaving = asking.body(jobs[0]) | {"max_tokens": 300, "min_tokens": 300}
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.stream(asking.path, leaving), 0.3)
    for each in clients:
        each.close()
    return outcomes


async def overload(url: str, key: str, is_enough: Callable[[], bool]) -> None:
    """Keep the KV pool full, with requests waiting, until it is enough."""
    client = Client(Target.parse(url, key))
    asking = Asking((await client.get("/v1/models"))["data"][0]["id"])
    deadline = time.monotonic() + PATIENCE_S
    seed = 0

    async def endless() -> None:
        nonlocal seed
        while True:
            seed += 1
            (job,) = synthetic(1, prompt=Length(60, 60), output=Length(250, 250), seed=seed, prefix_len=0)
            await client.stream(asking.path, asking.body(job))

    tasks = [asyncio.create_task(endless()) for _ in range(16)]
    while not await asyncio.to_thread(is_enough) and time.monotonic() < deadline:  # noqa: ASYNC110 - Prometheus is polled
        await asyncio.sleep(1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    client.close()


def wait_for_scrapes(api: str) -> None:
    """Wait until the last 10 seconds have two scrapes, which rates need. Raises VerifyError."""
    deadline = time.monotonic() + PATIENCE_S
    while evaluate(api, "", "count_over_time(quire_engine_steps_total[10s]) >= 2").fault:
        if time.monotonic() > deadline:
            raise VerifyError(f"Prometheus got no metrics from the daemon within {PATIENCE_S:g} s.")
        time.sleep(0.5)


def evaluate(api: str, where: str, query: str) -> Check:
    """Evaluate a query now; it must find at least one number."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    answer = get(f"{api}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
    if answer["status"] != "success":
        return Check(where, query, 0, answer["error"])
    values = [float(series["value"][1]) for series in answer["data"]["result"]]
    if not values:
        return Check(where, query, 0, "found nothing")
    return Check(where, query, len(values), "" if any(map(math.isfinite, values)) else "found only NaN")


def panels() -> Iterator[tuple[str, str]]:
    """Return (title, PromQL) of every query of the dashboard and its variables."""
    described = json.loads((HERE / "dashboards" / "quire.json").read_text())
    for variable in described["templating"]["list"]:
        if match := re.match(r"label_values\((.*), \w+\)", variable.get("definition", "")):
            yield f"variable {variable['name']}", match[1]
    for panel in described["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def alerts() -> Iterator[tuple[str, str]]:
    """Return (name, PromQL) of every rule and of every series that it names."""
    for group in yaml.safe_load((HERE / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            yield name, f"({rule['expr']}) or vector(0)"
            if "alert" in rule:
                for series in sorted(set(SERIES.findall(rule["expr"])) - {"quire_handoffs_total"}):
                    yield f"{name}: {series}", f"count({series})"


def rules_in_prometheus(api: str) -> Check:
    """Check that Prometheus loaded every rule and evaluated it without an error."""
    groups = get(f"{api}/api/v1/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    bad = [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] == "err"]
    return Check("rules as loaded", "", len(rules), "; ".join(bad) or ("" if rules else "none loaded"))


def firing(api: str) -> dict[str, str]:
    """Return the alerts that fire now, with their summaries."""
    alerts = get(f"{api}/api/v1/alerts")["data"]["alerts"]
    return {each["labels"]["alertname"]: each["annotations"]["summary"] for each in alerts if each["state"] == "firing"}


def wait_for(api: str, name: str, *, fires: bool) -> Check:
    """Wait until an alert fires, or no longer does."""
    deadline = time.monotonic() + PATIENCE_S
    while (name in (now := firing(api))) is not fires and time.monotonic() < deadline:
        time.sleep(1)
    what = "fires" if fires else "is over"
    fault = "" if (name in now) is fires else f"it did not come about within {PATIENCE_S:g} s"
    return Check(f"{name} {what}: {now.get(name, '')}", "", len(now), fault)


def check_own(binary: str, work: Path, seconds: float) -> tuple[list[Check], list[Outcome]]:
    """Check with a daemon of our own, and provoke two alerts."""
    port = free_port()
    url, seen = f"http://127.0.0.1:{port}", dict[str, str]()
    with prometheus(binary, url, work) as api:
        with collector() as traces, daemon(port, traces, work):
            outcomes = asyncio.run(load(url, seconds, ("acme-key", "hobby-key")))
            wait_for_scrapes(api)
            checks = [evaluate(api, *query) for query in (*panels(), *alerts())]
            checks = [
                check._replace(fault="") if check.where in EMPTY and not check.found else check for check in checks
            ]
            checks.append(rules_in_prometheus(api))

            def is_full() -> bool:
                seen.update(firing(api))
                return "QuireKvFull" in seen

            asyncio.run(overload(url, "acme-key", is_full))
            checks.append(
                Check(f"QuireKvFull fires: {seen.get('QuireKvFull', '')}", "", 1, "" if seen else "it did not")
            )
            checks.append(wait_for(api, "QuireKvFull", fires=False))
        checks.append(wait_for(api, "QuireDown", fires=True))
        seen |= firing(api)
    for name, summary in sorted(seen.items()):
        sys.stdout.write(f"fired: {name}: {summary}\n")
    return checks, outcomes


def check_given(binary: str, work: Path, seconds: float, url: str, key: str) -> tuple[list[Check], list[Outcome]]:
    """Check with a daemon that runs already; an empty panel is no fault."""
    with prometheus(binary, url, work, key) as api:
        outcomes = asyncio.run(load(url, seconds, (key,)))
        wait_for_scrapes(api)
        checks = [evaluate(api, *query) for query in (*panels(), *alerts())]
        checks = [check if check.found or "found" not in check.fault else check._replace(fault="") for check in checks]
        return [*checks, rules_in_prometheus(api)], outcomes


def main() -> int:
    """Run the whole check; return 1 if something is wrong, 2 if it could not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a daemon that runs already; default: start one on the default model")
    parser.add_argument("--api-key", default="", help="a key of that daemon")
    parser.add_argument("--prometheus", default="prometheus", help="the binary; default: the one on the PATH")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load; default %(default)s")
    options = parser.parse_args()
    binary = shutil.which(options.prometheus)
    try:
        if binary is None:
            raise VerifyError(f"{options.prometheus} is not installed; on Debian: apt-get install prometheus.")
        with tempfile.TemporaryDirectory() as folder:
            if options.url:
                checks, outcomes = check_given(binary, Path(folder), options.seconds, options.url, options.api_key)
            else:
                checks, outcomes = check_own(binary, Path(folder), options.seconds)
    except (VerifyError, ClientError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for check in checks:
        state = "FAIL" if check.fault else "ok" if check.found else "empty"
        sys.stdout.write(f"{state:<6}{check.found:>4} series  {check.where}\n")
        if check.fault:
            sys.stdout.write(f"          {check.fault}: {check.query}\n")
    bad = [check for check in checks if check.fault]
    failed = [outcome.error for outcome in outcomes if outcome.error]
    sys.stdout.write(f"{len(checks)} checks, {len(bad)} bad; {len(outcomes)} requests, {len(failed)} failed\n")
    for sentence in failed[:3]:
        sys.stdout.write(f"  {sentence}\n")
    return 1 if bad or failed else 0


if __name__ == "__main__":
    sys.exit(main())
