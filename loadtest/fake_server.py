"""The real HTTP app, tokenizer and engine thread over a runner that only invents tokens, as a process of its own.

`python -m loadtest.fake_server STEP_MS [STEP_TOKENS]` prints its port once it accepts connections, and serves until
SIGTERM. It wires the server together, and nothing in loadtest/ imports it.
"""

from __future__ import annotations

import logging
import sys
import time

from engine.core.config import SchedulerConfig
from engine.core.fake_runner import CostModel, FakeRunner
from engine.core.scheduler import Scheduler
from engine.loop import Engine
from engine.model_source import find_model
from engine.text.tokenizer import load_tokenizer
from server.app import create_app
from server.daemon import run
from server.serve import bind, hide_from_collector
from server.settings.app_config import AppConfig


def main(step_ms: float, step_tokens: int = 8192) -> int:
    """Serve the default model's tokenizer over invented tokens, one step of at most `step_tokens` every `step_ms`."""
    logging.basicConfig(level=logging.ERROR)  # a benchmark sends fields without effect by the thousand
    source = find_model(None)
    tokenizer = load_tokenizer(source.path)
    config = SchedulerConfig(
        num_blocks=32768, block_size=16, max_model_len=8192, max_num_seqs=1024, max_num_batched_tokens=step_tokens
    )
    cost = CostModel(step_s=step_ms / 1e3, token_s=0.0)
    runner = FakeRunner(config, vocab_size=tokenizer.vocab_size, memory=False, cost=cost, sleep=time.sleep)
    engine = Engine(Scheduler(config), runner, vocab_size=tokenizer.vocab_size)
    app = create_app(engine, tokenizer, AppConfig(model="fake", served_model_names=("fake",)))
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        hide_from_collector()
        return run(app, listener, shutdown_timeout_s=1.0, on_ready=lambda: print(port, flush=True))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *map(int, sys.argv[2:])))
