"""Measures the sources, a start and parts of the engine in this process; loadtest/ loads servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from loadtest.__main__ import Commands, run_command
from tools import (
    accuracy,
    drafts,
    encoders,
    formats,
    groups,
    house,
    loading,
    perplexity,
    scheduler,
    steps,
)

COMMANDS: Commands = {
    "house": ("measure the code itself", house.add_options, house.run),
    "formats": ("measure each format of weights on this machine", formats.add_options, formats.run),
    "loading": ("measure a start: first token and memory", loading.add_options, loading.run),
    "groups": ("count what a pool holds of models with sliding windows", groups.add_options, groups.run),
    "scheduler": ("time the scheduler alone", scheduler.add_options, scheduler.run),
    "steps": ("time the parts of a step of the real engine", steps.add_options, steps.run),
    "drafts": ("measure an MTP head's gain on this machine", drafts.add_options, drafts.run),
    "encoders": ("measure text encoders beside other libraries", encoders.add_options, encoders.run),
    "perplexity": ("score a text under settings of the daemon", perplexity.add_options, perplexity.run),
    "accuracy": ("measure what each format of weights costs", accuracy.add_options, accuracy.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; an error is one sentence on stderr."""
    return run_command(COMMANDS, "python -m tools", sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
