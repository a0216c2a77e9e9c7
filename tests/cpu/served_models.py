"""Tiny random checkpoints with a tokenizer, and the real `quire serve` in a process over them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.cpu.test_models_families import SIZES, Case, save_tiny
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def save_servable(case: Case, folder: Path) -> Any:
    """Save a random model of transformers and a tokenizer with one word for each of its ids; returns the model."""
    model = save_tiny(case, folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of the words w0, w1, w3, ...; 2 is the end."""
    words = {"</s>" if token_id == 2 else f"w{token_id}": token_id for token_id in range(SIZES["vocab_size"])}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')


def say(token_ids: torch.Tensor) -> str:
    """The text of some ids."""
    return " ".join(f"w{token_id}" for token_id in token_ids.tolist())


def start(*argv: str, **variables: str) -> subprocess.Popen[str]:
    """`quire serve` with these arguments, on a free port."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "server", "serve", *argv, "--port", "0"],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), **variables},
        stderr=subprocess.PIPE,
        text=True,
    )


def refusal(*argv: str, **variables: str) -> tuple[int, str]:
    """The exit status of a daemon that does not start, and all that it logs."""
    process = start(*argv, **variables)
    try:
        _, written = process.communicate(timeout=PATIENCE_S)
        return process.returncode, written
    finally:
        process.kill()
        process.communicate()


@contextmanager
def serving(*argv: str, **variables: str) -> Iterator[str]:
    """The address of a daemon that is ready; it must end well."""
    process = start(*argv, **variables)
    assert process.stderr is not None
    written: list[str] = []
    try:
        for line in process.stderr:
            written.append(line)
            if found := re.search(r"ready in [\d.]+ s: (\S+)", line):
                break
        else:
            raise AssertionError(f"the daemon did not start: {''.join(written)}")
        reader = threading.Thread(target=written.extend, args=(process.stderr,))  # so that its pipe is never full
        reader.start()
        yield found.group(1)
        process.terminate()
        assert process.wait(timeout=PATIENCE_S) == 0, "".join(written)
        reader.join()
        assert "Traceback" not in "".join(written)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
