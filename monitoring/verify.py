"""Checks dashboard and alerts against a real daemon and a real Prometheus.

`python monitoring/verify.py [--url http://host:port]` starts a daemon (unless --url names one) and Prometheus (Debian's
package, or --prometheus PATH) with the repository's configuration, sends requests of every kind, and fails if a panel's
PromQL is an error or finds nothing, or if an alert names a series that does not exist. Exit status 0 means that no
panel is empty.
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
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from loadtest.bench import Asking, closed_loop  # noqa: E402 - the repository's own package, from a script beside it
from loadtest.client import Client, ClientError, Outcome, Target  # noqa: E402 - likewise
from loadtest.workload import Length, synthetic  # noqa: E402 - likewise

VARIABLES = {"$model_name": ".*", "$instance": ".*", "$__rate_interval": "15s", "$__interval": "5s"}
SERIES = re.compile(r"\b(?:quire_\w+|up|process_\w+)\b")


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
            process.terminate()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - our own loopback addresses
            return True
    except OSError:
        return False


@contextlib.contextmanager
def daemon(url: str | None, work: Path) -> Iterator[str]:
    """Yield the address of a daemon: the given one, or one that is started here."""
    if url:
        yield url
        return
    port = free_port()
    # A small pool, so that preemption happens too.
    command = [sys.executable, "-m", "server", "serve", "--port", str(port), "--kv-cache-memory-bytes", "16MiB"]
    with running(command, f"http://127.0.0.1:{port}/ready", work / "daemon.log", 120):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def prometheus(binary: str, target: str, work: Path) -> Iterator[str]:
    """Run Prometheus with the repository's configuration, another target and faster scrapes."""
    config = yaml.safe_load((HERE / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["rule_files"] = [str(HERE / "alerts.yml")]
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


async def load(url: str, seconds: float) -> list[Outcome]:
    """Send requests of every kind: shared prefixes, an unknown field, an aborted stream."""
    client = Client(Target.parse(url))
    model = (await client.get("/v1/models"))["data"][0]["id"]
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + seconds
    seed = 0
    while time.monotonic() < deadline:
        seed += 1
        jobs = synthetic(6, prompt=Length(4, 60), output=Length(4, 24), seed=seed, prefix_len=48)
        await closed_loop(client, Asking(model), jobs, 6, outcomes.append)
        unknown = Asking(model).body(jobs[0]) | {"a_field_nobody_knows": 1}
        outcomes.append(await client.stream("/v1/completions", unknown))
        leaving = Asking(model).body(jobs[0]) | {"max_tokens": 400, "min_tokens": 400}
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.stream("/v1/completions", leaving), 0.3)
    client.close()
    return outcomes


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
    dashboard = json.loads((HERE / "dashboards" / "quire.json").read_text())
    for variable in dashboard["templating"]["list"]:
        if match := re.match(r"label_values\((.*), \w+\)", variable.get("definition", "")):
            yield f"variable {variable['name']}", match[1]
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def alerts() -> Iterator[tuple[str, str]]:
    """Return (name, PromQL) of every alert and of every series that it names."""
    rules = yaml.safe_load((HERE / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        yield rule["alert"], f"({rule['expr']}) or vector(0)"
        for series in sorted(set(SERIES.findall(rule["expr"]))):
            yield f"{rule['alert']}: {series}", f"count({series})"


def rules_in_prometheus(api: str) -> Check:
    """Check that Prometheus loaded every alert and evaluated it without an error."""
    groups = get(f"{api}/api/v1/rules")["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    bad = [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] == "err"]
    return Check("alerts as loaded", "", len(rules), "; ".join(bad) or ("" if rules else "none loaded"))


def main() -> int:
    """Run the whole check; return 1 if a query found nothing, 2 if it could not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a daemon that runs already; default: start one on the default model")
    parser.add_argument("--prometheus", default="prometheus", help="the binary; default: the one on the PATH")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load; default %(default)s")
    options = parser.parse_args()
    binary = shutil.which(options.prometheus)
    try:
        if binary is None:
            raise VerifyError(f"{options.prometheus} is not installed; on Debian: apt-get install prometheus.")
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            with daemon(options.url, work) as url, prometheus(binary, url, work) as api:
                outcomes = asyncio.run(load(url, options.seconds))
                time.sleep(2.5)  # two scrapes
                checks = [evaluate(api, *query) for query in (*panels(), *alerts())]
                checks.append(rules_in_prometheus(api))
    except (VerifyError, ClientError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for check in checks:
        sys.stdout.write(f"{'FAIL' if check.fault else 'ok':<5}{check.found:>4} series  {check.where}\n")
        if check.fault:
            sys.stdout.write(f"          {check.fault}: {check.query}\n")
    bad = [check for check in checks if check.fault]
    failed = [outcome.error for outcome in outcomes if outcome.error]
    sys.stdout.write(f"{len(checks)} queries, {len(bad)} bad; {len(outcomes)} requests, {len(failed)} failed\n")
    for sentence in failed[:3]:
        sys.stdout.write(f"  {sentence}\n")
    return 1 if bad or failed else 0


if __name__ == "__main__":
    sys.exit(main())
