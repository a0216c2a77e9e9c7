"""Reads command lines of `vllm bench serve` as ones of `quire bench`, with vLLM's defaults.

Without a rate, or with `inf`, vLLM sends all requests together, at most --max-concurrency concurrently. That is a closed loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.shown import shorten
from loadtest.errors import LoadtestError

_NAMES = {
    "--random-input-len": "--input-len",
    "--random-output-len": "--output-len",
    "--sharegpt-output-len": "--output-len",
    "--custom-output-len": "--output-len",
    "--random-prefix-len": "--prefix-len",
    "--dataset-path": "--dataset",
    "--max-concurrency": "--concurrency",
    "--result-filename": "--json",
    "--served-model-name": "--model",
    "--num-warmup-requests": "--num-warmups",
}
_WITHOUT_EFFECT = {  # and the values that follow: none, one or several
    "--tokenizer": "1",
    "--tokenizer-mode": "1",
    "--percentile-metrics": "1",
    "--metric-percentiles": "1",
    "--result-dir": "1",
    "--label": "1",
    "--metadata": "+",
    "--goodput": "+",
    "--ready-check-timeout-sec": "1",
    "--save-result": "",
    "--save-detailed": "",
    "--disable-tqdm": "",
    "--trust-remote-code": "",
}
_OTHERS = {
    "throughput": "bench the daemon with `quire bench --concurrency 64`, or time LLM.generate in a script",
    "latency": "bench the daemon with `quire bench --concurrency 1`",
    "startup": "the daemon's line `ready in ... s` says how long a start takes",
    "sweep": "give several values: `quire bench --concurrency 1 4 16`",
}
_PATHS = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
_BACKENDS = {"openai-chat": "chat", "vllm-chat": "chat"}  # others are completions
_DATASETS = ("random", "custom")
_DEFAULTS = {"--num-prompts": "1000", "--input-len": "1024", "--output-len": "128"}


def translate(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command line in Quire's flags, and remarks. Raises LoadtestError for one that cannot be followed."""
    if list(words[:1]) != ["bench"] or len(words) < 2 or words[1].startswith("-"):
        return list(words), []
    if words[1] in _OTHERS:
        raise LoadtestError(f"`bench {words[1]}` is a command of vLLM; {_OTHERS[words[1]]}.")
    if words[1] != "serve":
        return list(words), []
    return _Reader(words[2:]).read()


class _Reader:
    def __init__(self, words: Sequence[str]) -> None:
        self._words = [part for word in words for part in (word.split("=", 1) if word[:2] == "--" else [word])]
        self._options: dict[str, list[str]] = {}  # of `quire bench`, by flag; "" for a word that is none
        self._address: dict[str, str] = {}
        self._range = 0.0
        self._respects_eos = True
        self._ignored: list[str] = []

    def read(self) -> tuple[list[str], list[str]]:
        """Return the translated line and the remarks."""
        while self._words:
            self._take(self._words.pop(0))
        options = self._options
        for flag, value in _DEFAULTS.items():
            options.setdefault(flag, [value])
        if "--request-rate" not in options:
            options.setdefault("--concurrency", options["--num-prompts"])
        if self._range:
            for flag in ("--input-len", "--output-len"):
                options[flag] = [self._spread(flag, options[flag])]
        if self._address:
            host, port = self._address.get("--host", "127.0.0.1"), self._address.get("--port", "8000")
            options.setdefault("--base-url", [f"http://{host}:{port}"])
        if self._respects_eos:
            options["--respect-eos"] = []
        line = ["bench", *(word for flag, values in options.items() for word in (flag, *values))]
        return line, [f"no effect here: {', '.join(self._ignored)}"] if self._ignored else []

    def _take(self, word: str) -> None:
        flag = word.replace("_", "-") if word[:2] == "--" else word
        if flag in _WITHOUT_EFFECT:
            values = [self._value(flag)] if _WITHOUT_EFFECT[flag] else []
            values += self._rest() if _WITHOUT_EFFECT[flag] == "+" else []
            self._ignored.append(" ".join([flag, *values]))
        elif flag == "--ignore-eos":
            self._respects_eos = False
        elif flag in ("--host", "--port"):
            self._address[flag] = self._value(flag)
        elif flag in ("--backend", "--endpoint-type"):
            self._options.setdefault("--endpoint", [_BACKENDS.get(self._value(flag), "completions")])
        elif flag == "--endpoint":
            path = self._value(flag)
            self._options[flag] = [_PATHS.get(path, path)]
        elif flag == "--dataset-name":
            self._check_dataset(self._value(flag))
        elif flag == "--random-range-ratio":
            self._range = self._ratio(self._value(flag))
        elif flag == "--request-rate" and self._words[:1] == ["inf"]:
            self._words.pop(0)
        elif flag[:2] == "--":
            self._options[_NAMES.get(flag, flag)] = self._rest()
        else:
            raise LoadtestError(f"{shorten(word)!r} belongs to no flag; leave it out.")

    def _value(self, flag: str) -> str:
        if not self._words:
            raise LoadtestError(f"{flag} needs a value; write it behind the flag.")
        return self._words.pop(0)

    def _rest(self) -> list[str]:
        """Take the words up to the next flag."""
        end = next((at for at, word in enumerate(self._words) if word[:2] == "--"), len(self._words))
        taken, self._words = self._words[:end], self._words[end:]
        return taken

    def _spread(self, flag: str, values: list[str]) -> str:
        try:
            length = int(values[0])
        except (ValueError, IndexError):
            raise LoadtestError(f"{flag} must be a whole number beside --random-range-ratio.") from None
        return f"{max(int(length * (1 - self._range)), 1)}:{max(int(length * (1 + self._range)), 1)}"

    def _ratio(self, text: str) -> float:
        try:
            ratio = float(text)
        except ValueError:
            ratio = -1.0
        if not 0 <= ratio < 1:
            raise LoadtestError(f"--random-range-ratio is {shorten(text)!r}, and must be a number from 0, below 1.")
        return ratio

    def _check_dataset(self, name: str) -> None:
        if name not in _DATASETS:
            raise LoadtestError(
                f"--dataset-name {name} is not read; --dataset takes JSON lines of "
                '{"prompt": ..., "max_tokens": ...}, and random words need no data set.'
            )
