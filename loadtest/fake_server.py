"""Serves the real app and engine thread over a runner that invents tokens.

`python -m loadtest.fake_server STEP_MS [STEP_TOKENS] --port N`; loadtest/daemon.py starts it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.handle import EngineFacts
from engine.loop import Engine
from engine.sources.model_source import find_model
from engine.text.tokenizer_files import load_tokenizer
from loadtest.fake_runner import CostModel, FakeRunner
from server.app import create_app
from server.daemon import run
from server.serve import bind, hide_from_collector
from server.settings.app_config import AppConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Serve steps of at most STEP_TOKENS tokens that take STEP_MS."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.fake_server")
    parser.add_argument("step_ms", type=float)
    parser.add_argument("step_tokens", type=int, nargs="?", default=8192)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)  # requests with unknown fields would be logged
    source = find_model(None)
    tokenizer = load_tokenizer(source.path)
    config = SchedulerConfig(
        num_blocks=32768,
        block_size=16,
        max_model_len=8192,
        max_num_seqs=1024,
        max_num_batched_tokens=options.step_tokens,
    )
    cost = CostModel(step_s=options.step_ms / 1e3, token_s=0.0)
    runner = FakeRunner(config, vocab_size=tokenizer.vocab_size, memory=False, cost=cost, sleep=time.sleep)
    engine = Engine(Scheduler(config), runner, EngineFacts(tokenizer.vocab_size))
    app = create_app(engine, tokenizer, AppConfig(model="fake", served_model_names=("fake",)))
    with bind("127.0.0.1", options.port) as listener:
        hide_from_collector()
        return run(app, listener, shutdown_timeout_s=1.0, on_ready=lambda: None)


if __name__ == "__main__":
    sys.exit(main())
