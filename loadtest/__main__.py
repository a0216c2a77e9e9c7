"""`quire bench`, `fit`, `simulate`, `calibrate` and `tune`, and the other benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from engine.core.errors import QuireError
from loadtest import bench, beside, compare, fit, hostile, images, sessions, texts, vllm_bench
from loadtest.arguments import refuse_unwritable
from loadtest.errors import LoadtestError
from loadtest.simulation import calibrate, command
from loadtest.tuning import command as tuning
from server.cli import tell_output_failed

Commands = dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]]

COMMANDS: Commands = {
    "bench": ("load an OpenAI-compatible server and measure it", bench.add_options, bench.run),
    "simulate": ("run the scheduler on a virtual clock", command.add_options, command.run),
    "calibrate": ("measure the time of steps here, for the simulator", calibrate.add_options, calibrate.run),
    "tune": ("find this machine's settings for a model", tuning.add_options, tuning.run),
    "fit": ("tell what a model needs and gives here, from its small files", fit.add_options, fit.run),
    "compare": ("drive Quire and its peers by the same requests", compare.add_options, compare.run),
    "hostile": ("send hostile and heavy bodies, and watch /health", hostile.add_options, hostile.run),
    "beside": ("measure requests beside a long prompt", beside.add_options, beside.run),
    "images": ("measure questions about images", images.add_options, images.run),
    "texts": ("measure embeddings, scores and verdicts, also beside streams", texts.add_options, texts.run),
    "sessions": ("drive servers with agents' sessions, and count what they reuse", sessions.add_options, sessions.run),
}

_QUIRES = ("bench", "fit", "simulate", "calibrate", "tune")  # the `quire` command has these too


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; an error is one sentence on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        words, remarks = vllm_bench.translate(words)
    except LoadtestError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    for remark in remarks:
        print(f"quire: {remark}", file=sys.stderr)
    return run_command(COMMANDS, "python -m loadtest", words)


def run_command(commands: Commands, program: str, words: Sequence[str]) -> int:
    """Run one of the commands and return its exit status; an error is one sentence on stderr."""
    parser = argparse.ArgumentParser(prog=program)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (summary, add_options, run) in commands.items():
        command = subparsers.add_parser(
            name,
            prog=f"{'quire' if name in _QUIRES else program} {name}",
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
        )
        add_options(command)
        command.set_defaults(run=run, fail=command.error)
    options, unknown = parser.parse_known_args(words)
    if unknown:  # argparse would name the program around the command
        options.fail(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        refuse_unwritable(options)
        status: int = options.run(options)
    except (QuireError, LoadtestError, OSError) as error:
        if isinstance(error, OSError) and tell_output_failed(error):
            return 1
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quire: Interrupted.", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
