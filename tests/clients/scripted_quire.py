"""The `quire` command with a script in place of a trained model; tokenizer, template, scheduler, parsers and HTTP are real.

A conversation that has a line `SCRIPT name {"argument": ...}` is answered with words and a call of that tool, and once the
tool has answered, with what it said. Any other conversation is answered with a word. What the model reads comes back
through the paged memory of FakeRunner, so an answer is right only if the whole prompt arrived.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import Progress
from engine.handle import EngineFacts
from engine.loop import Engine
from engine.settings.engine_config import EngineConfig
from engine.text.tokenizer_files import load_tokenizer
from loadtest.fake_runner import FakeRunner

TURN = "<|im_start|>assistant\n"
SCRIPT = re.compile(r"SCRIPT (\w+) (\{.*?\})(?:<\|im_end\|>|\n|$)")
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def answer_to(prompt: str) -> str:
    """Return what the scripted model says."""
    scripts = list(SCRIPT.finditer(prompt))
    if not scripts:
        return "Hello."
    script = scripts[-1]
    results = RESULT.findall(prompt, script.end())
    if results:
        return f"The tool said: {results[-1]}"
    name, arguments = script.groups()
    return f'I will call {name}.\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def build_engine(
    config: EngineConfig, report: Callable[[Progress], None], _memory: object = None, **_: object
) -> Engine:
    tokenizer = load_tokenizer(config.model)
    turn = tokenizer.encode(TURN, add_special_tokens=False)
    [end] = tokenizer.encode("<|im_end|>", add_special_tokens=False)

    @lru_cache(maxsize=16)
    def script(prompt: tuple[int, ...]) -> list[int]:
        text = answer_to(tokenizer.decode(prompt, skip_special_tokens=False))
        return [*tokenizer.encode(text, add_special_tokens=False), end]

    def choose(history: Sequence[int], seed: int) -> int:
        begin = next(at for at in range(len(history), 0, -1) if list(history[at - len(turn) : at]) == turn)
        said = script(tuple(history[:begin]))
        at = len(history) - begin
        return said[at] if at < len(said) else end

    length = config.max_model_len or 65536
    scheduler = SchedulerConfig(
        num_blocks=2 * length // 16, block_size=16, max_model_len=length, max_num_seqs=8, max_num_batched_tokens=4096
    )
    report(Progress("kv_pool", "scripted"))
    runner = FakeRunner(scheduler, vocab_size=tokenizer.vocab_size, choose=choose)
    return Engine(Scheduler(scheduler), runner, EngineFacts(tokenizer.vocab_size))


if __name__ == "__main__":
    stand_in = types.ModuleType("engine.startup.build")
    stand_in.build_engine = build_engine  # type: ignore[attr-defined]  # a module made here
    sys.modules["engine.startup.build"] = stand_in
    from server.cli import main

    sys.exit(main())
