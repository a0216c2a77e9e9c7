"""The routers that a fleet can run behind, and the policies under which each does a job.

Neither is installed with Quire: a flag names the command.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loadtest.peers.process import Command


class RouterKind(NamedTuple):
    """How one router's command line is written."""

    command: str
    flags: Sequence[str]  # of every run
    blind: str  # the policy that sees neither prompts nor loads
    least_loaded: str
    aware: str  # the policy that follows prefixes
    simulated: Mapping[str, str] = {}  # policies that the simulator has under another name


_EVERY = (
    *("--host", "127.0.0.1", "--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
    *("--cb-timeout-duration-secs", "3"),  # after which a daemon that failed is tried again; a minute by default
)

KINDS = {
    "vllm": RouterKind(
        "vllm-router", (*_EVERY, "--worker-startup-check-interval", "1"), "round_robin", "power_of_two", "kv_aware"
    ),
    "sglang": RouterKind(
        "sglang-router launch",
        (*_EVERY, "--log-level", "warn"),
        "round_robin",
        "power_of_two",
        "cache_aware",
        {"power_of_two": "random"},  # it compares loads that it fetches every 30 s
    ),
}


class Routing(NamedTuple):
    """A router with one of its policies."""

    kind: str
    policy: str
    binary: str = ""  # "": the router's usual command
    flags: Sequence[str] = ()

    @property
    def name(self) -> str:
        return f"{self.kind} {self.policy}"

    @property
    def has_events(self) -> bool:
        """Return whether the router listens to KV events."""
        return self.policy == "kv_aware"

    @property
    def simulated(self) -> str:
        """Return the simulator's name of the policy."""
        return KINDS[self.kind].simulated.get(self.policy, self.policy)

    def command(self, port: int, metrics_port: int, workers: Sequence[str]) -> Command:
        """Return the command that routes to these daemons."""
        kind = KINDS[self.kind]
        ports = ["--port", str(port), "--prometheus-port", str(metrics_port)]
        start = shlex.split(self.binary or kind.command)
        return Command(
            [*start, "--worker-urls", *workers, "--policy", self.policy, *ports, *kind.flags, *self.flags], {}
        )
