"""Runs `quire doctor`: checks whether this machine can serve, and prints a table of what to do where it cannot."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing

from engine.core.errors import QuireError
from engine.startup.doctor import Finding, State, check_machine
from server.settings.flags import load_settings
from server.settings.settings import ENV_PREFIX, Settings

_EXTRAS = {
    "triton": "CUDA kernels",
    "opentelemetry.sdk": "quire-serve[otel]: traces",
    "matplotlib": "quire-serve[plot]: pictures",
}
_HUB_PATIENCE_S = 5.0
_LAST_PORT = 65535


def main(argv: Sequence[str]) -> int:
    """Check the machine and print the findings. Returns 0 if it can serve, 1 if not."""
    options = make_parser().parse_args(argv)
    settings, found = _settings(options.config)
    host = options.host or (settings.host if settings else "127.0.0.1")
    port = (settings.port if settings else 8000) if options.port is None else options.port
    findings = [*check_machine(), *found, *_port(host, port), *_extras(), *(_hub() if options.online else ())]
    failed = any(finding.state is State.FAILED for finding in findings)
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))  # noqa: T201 - the command's output
    else:
        _print_table(findings)
        print("This machine cannot serve yet." if failed else "This machine can serve.")  # noqa: T201
    return int(failed)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command, which the reference lists."""
    parser = argparse.ArgumentParser("quire doctor", description="Check whether this machine can serve.")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--online", action="store_true", help="ask the model hub too")
    parser.add_argument("--config", metavar="FILE", help="check this file of settings, with the QUIRE_ variables")
    parser.add_argument("--host", help="address to serve on; default: that of the settings")
    parser.add_argument("--port", type=int, help="port to serve on; default: that of the settings")
    return parser


def _settings(path: str | None) -> tuple[Settings | None, list[Finding]]:
    """Return the settings, if some are given and right, and the finding on them.

    Everything that `quire serve` checks before it binds the port is checked; weights are not read.
    """
    if path is None and not any(name.startswith(ENV_PREFIX) for name in os.environ):
        return None, []
    from server.serve import prepare_all

    try:
        settings = load_settings([] if path is None else ["--config", path])
        prepare_all(settings)
    except QuireError as error:
        return None, [Finding("settings", State.FAILED, f"of {path or 'the variables'} are wrong", str(error))]
    given = ", ".join(sorted(settings.origins))
    return settings, [Finding("settings", State.OK, f"{len(settings.origins)} given: {given}")]


def _port(host: str, port: int) -> Iterator[Finding]:
    from server.serve import bind

    if not 0 <= port <= _LAST_PORT:
        yield Finding("port", State.FAILED, f"{port} is no port", f"choose one from 1 to {_LAST_PORT} with --port")
        return
    try:
        with closing(bind(host, port)):
            yield Finding("port", State.OK, f"{port} on {host} is free")
    except QuireError as error:
        fault, _, advice = str(error).partition("; ")
        yield Finding("port", State.NOTE, fault, advice)


def _extras() -> Iterator[Finding]:
    for module, purpose in _EXTRAS.items():
        package = module.partition(".")[0]
        is_there = importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None
        yield Finding(package, State.OK, f"{'installed' if is_there else 'not installed'} ({purpose})")


def _hub() -> Iterator[Finding]:
    import httpx
    from huggingface_hub.constants import ENDPOINT

    try:
        status = httpx.head(ENDPOINT, timeout=_HUB_PATIENCE_S, follow_redirects=True).status_code
    except httpx.HTTPError as error:
        advice = "check the network and HF_ENDPOINT; local models and HF_HUB_OFFLINE=1 need no hub"
        yield Finding("model hub", State.NOTE, f"{ENDPOINT} does not answer: {error}", advice)
    else:
        yield Finding("model hub", State.OK if status < 500 else State.NOTE, f"{ENDPOINT} answers with {status}")


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    colours = {State.OK: "green", State.NOTE: "yellow", State.FAILED: "red"}
    table = Table("check", "", "found", "what to do", box=None, padding=(0, 2, 0, 0))
    for check, state, found, advice in findings:
        table.add_row(
            check, f"[{colours[state]}]{state.value}[/]", *(text.replace("[", r"\[") for text in (found, advice))
        )
    width = shutil.get_terminal_size((140, 24)).columns if not sys.stdout.isatty() else None
    Console(width=width, highlight=False).print(table)
