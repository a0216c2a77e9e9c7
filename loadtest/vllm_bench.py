"""Reads command lines of `vllm bench serve` as ones of `quire bench`."""

from __future__ import annotations

from collections.abc import Sequence

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
_WITHOUT_EFFECT = {  # and whether a value follows
    "--tokenizer": True,
    "--percentile-metrics": True,
    "--metric-percentiles": True,
    "--random-range-ratio": True,
    "--result-dir": True,
    "--label": True,
    "--metadata": True,
    "--goodput": True,
    "--ready-check-timeout-sec": True,
    "--save-result": False,
    "--save-detailed": False,
    "--disable-tqdm": False,
    "--ignore-eos": False,
    "--trust-remote-code": False,
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
        self._made = ["bench"]
        self._address: dict[str, str] = {}
        self._endpoint = ""
        self._ignored: list[str] = []

    def read(self) -> tuple[list[str], list[str]]:
        """Return the translated line and the remarks."""
        while self._words:
            self._take(self._words.pop(0).replace("_", "-") if self._words[0][:2] == "--" else self._words.pop(0))
        if self._address:
            host, port = self._address.get("--host", "127.0.0.1"), self._address.get("--port", "8000")
            self._made += ["--base-url", f"http://{host}:{port}"]
        if self._endpoint:
            self._made += ["--endpoint", self._endpoint]
        return self._made, [f"no effect here: {', '.join(self._ignored)}"] if self._ignored else []

    def _take(self, flag: str) -> None:
        if flag in _WITHOUT_EFFECT:
            value = [self._value(flag)] if _WITHOUT_EFFECT[flag] else []
            self._ignored.append(" ".join([flag, *value]))
        elif flag in ("--host", "--port"):
            self._address[flag] = self._value(flag)
        elif flag in ("--backend", "--endpoint-type"):
            self._endpoint = self._endpoint or _BACKENDS.get(self._value(flag), "completions")
        elif flag == "--endpoint":
            path = self._value(flag)
            self._endpoint = _PATHS.get(path, path)
        elif flag == "--dataset-name":
            self._check_dataset(self._value(flag))
        elif flag == "--request-rate" and self._words[:1] == ["inf"]:
            self._words.pop(0)  # all together: --concurrency decides
        else:
            self._made.append(_NAMES.get(flag, flag))

    def _value(self, flag: str) -> str:
        if not self._words:
            raise LoadtestError(f"{flag} needs a value; write it behind the flag.")
        return self._words.pop(0)

    def _check_dataset(self, name: str) -> None:
        if name not in _DATASETS:
            raise LoadtestError(
                f"--dataset-name {name} is not read; --dataset takes JSON lines of "
                '{"prompt": ..., "max_tokens": ...}, and random words need no data set.'
            )
