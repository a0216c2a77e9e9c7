"""The process: what it prints, how it ends. Real sockets and signals; only the model is fake."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fake_quire
import httpx
import pytest
from harness import byte_tokenizer

from engine.core.errors import ConfigError
from engine.loop import Engine
from engine.text.tokenizer import TextTokenizer
from loadtest.errors import LoadtestError
from loadtest.fake_runner import FakeRunner
from loadtest.vllm_bench import translate
from server import app, daemon, load, serve
from server.cli import main
from server.plan import prepare_all
from server.settings.flags import load_settings
from tests.forked import Forked
from tests.patience import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
LONG = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}


Process = subprocess.Popen[str] | Forked


@contextmanager
def quire(*argv: str, around: tuple[str, ...] = (), **variables: str) -> Iterator[Process]:
    """A process of fake_quire.py, on a free port unless `argv` names one; `around` is a command that starts it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
    program = str(ROOT / "tests/http/fake_quire.py")
    env = {**kept, "QUIRE_PORT": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    process: Process
    if around:
        command = [*around, sys.executable, program, *argv]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    else:
        process = Forked(program, argv, ROOT, env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def outcome(process: Process) -> tuple[int, str]:
    """Exit status and what was written to standard error."""
    _, written = process.communicate(timeout=PATIENCE_S)
    return process.returncode, written


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Wait for a line that matches; returns its first group."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(pattern, line):
            return found.group(1)
    raise AssertionError(f"the process ended without a line like {pattern}")


def ready(process: Process) -> str:
    return read_until(process, r"ready in [\d.]+ s: (\S+)")


# -- the command -------------------------------------------------------------------------------------------------------


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("serve", "bench", "simulate"))
    assert main(["--version"]) == 0
    assert re.fullmatch(r"quire \d\S*( \(\S+\))?\n", capsys.readouterr().out)
    assert main([]) == 2


def test_an_unknown_option_of_bench_names_bench(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--url", "http://127.0.0.1"])
    assert "quire bench: error: unrecognized arguments: --url" in capsys.readouterr().err


def test_a_line_of_vllms_bench_is_read() -> None:
    line = (
        "bench serve --backend vllm --model m --dataset-name random --random-input-len 100 --random-output-len=20 --port 9 "
        "--num-prompts 10 --request-rate inf --max-concurrency 4 --tokenizer t --save-result --endpoint /v1/completions"
    )
    words, remarks = translate(line.split())
    assert " ".join(words) == (
        "bench --endpoint completions --model m --input-len 100 --output-len 20 --num-prompts 10 --concurrency 4 "
        f"--base-url http://{HOST}:9 --respect-eos"
    )
    assert remarks == ["no effect here: --tokenizer t, --save-result"]
    for given, made in (
        (
            "--request-rate inf --num-prompts 8 --ignore-eos",
            "--num-prompts 8 --input-len 1024 --output-len 128 --concurrency 8",
        ),
        ("--ignore-eos", "--num-prompts 1000 --input-len 1024 --output-len 128 --concurrency 1000"),
        (
            "--backend openai-chat --request_rate 2 --num-prompts 9 --goodput ttft:9 tpot:8 --random-input-len 100 --random-output-len 10 --random-range-ratio 0.5",
            "--endpoint chat --request-rate 2 --num-prompts 9 --input-len 50:150 --output-len 5:15 --respect-eos",
        ),
    ):
        assert " ".join(translate(["bench", "serve", *given.split()])[0]) == f"bench {made}"
    assert translate(["bench", "--model", "serve"]) == (["bench", "--model", "serve"], [])
    with pytest.raises(LoadtestError, match="--dataset-name sharegpt is not read; --dataset takes JSON lines"):
        translate(["bench", "serve", "--dataset-name", "sharegpt"])
    with pytest.raises(LoadtestError, match="--random-range-ratio is '2', and must be"):
        translate(["bench", "serve", "--random-range-ratio", "2"])
    with pytest.raises(LoadtestError, match="'8000' belongs to no flag"):
        translate(["bench", "serve", "8000"])
    with pytest.raises(LoadtestError, match="--port needs a value"):
        translate(["bench", "serve", "--port"])


def test_an_unknown_command_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (
            ["dance"],
            "'dance' is not a command; choose one of serve, fit, connect, bench, tune, simulate, calibrate, doctor, completion, or see `quire --help`.",
        ),
        (["collect-env"], "'collect-env' is a command of vLLM; run `quire doctor`."),
        (
            ["bench", "latency"],
            "`bench latency` is a command of vLLM; bench the daemon with `quire bench --concurrency 1`.",
        ),
        (["server"], "'server' is not a command; did you mean `quire serve`?"),
        (
            ["--port", "9000"],
            "--port needs a command before it, such as `quire serve --port`; see `quire --help`.",
        ),
    ):
        assert main(words) == 2
        assert capsys.readouterr().err == f"quire: {sentence}\n"


def test_help_and_version_are_also_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(["help"]), main(["--help"]), main(["version"]), main(["--version"])] == [0] * 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == lines[-2]
    assert lines[: len(lines) // 2 - 1] == lines[len(lines) // 2 - 1 : -2]


def test_a_full_or_closed_output_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with Path("/dev/full").open("w") as full, os.fdopen(writing, "w") as closed:
        for words in (["--version"], ["simulate", "replay", "steady", "--num", "1"]):
            for output, said in (
                (full, "quire: The output cannot be written: No space left on device.\n"),
                (closed, ""),
            ):
                done = subprocess.run(
                    [sys.executable, "-m", "server", *words],
                    stdout=output,
                    stderr=subprocess.PIPE,
                    text=True,
                    check=False,
                    cwd=ROOT,
                )
                assert (done.returncode, "".join(done.stderr.partition("quire: ")[1:])) == (1, said)


def test_help_about_no_setting_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=zzz"]) == 2
    assert capsys.readouterr().err == "quire: No setting has 'zzz' in its name; `quire serve --help=all` lists them.\n"


# -- faults at start ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "status", "sentence"),
    [
        (["--port", "x"], 2, "quire: --port is 'x'; it must be a whole number."),
        (["--host", "192.0.2.1"], 2, "--host is '192.0.2.1', which is no address of this machine"),
        (["/no/model"], 1, "'/no/model' does not exist"),
        (["--kv-cache-memory-bytes", "1"], 1, "--kv-cache-memory-bytes is 1, too little for one block."),
    ],
)
def test_a_fault_is_one_line_and_an_exit_status(argv: list[str], status: int, sentence: str) -> None:
    with quire("serve", *argv) as process:
        returned, written = outcome(process)
    assert returned == status
    assert sentence in written.splitlines()[-1]
    assert "Traceback" not in written


def test_a_start_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    with quire("serve", around=("sh", "-c", f'cd "{tmp_path}" && rmdir "{tmp_path}" && exec "$@"', "sh")) as process:
        status, written = outcome(process)
    assert (status, written) == (2, "quire: The current folder has been deleted; change to another one.\n")


def test_the_traceback_is_there_for_who_wants_it() -> None:
    with quire("serve", "/no/model", "--log-level", "debug") as process:
        assert "Traceback" in outcome(process)[1]


# -- a life ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["tokenizer", "application", "serving"])
def test_a_start_that_fails_behind_the_model_releases_it(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks are processes."""
    closed: list[FakeRunner] = []
    is_built = threading.Event()

    def build_engine(*args: Any, **options: Any) -> Engine:
        engine = fake_quire.build_engine(*args, **options)
        is_built.set()
        return engine

    def close(runner: FakeRunner) -> None:
        closed.append(runner)

    def load_tokenizer(_: object) -> TextTokenizer:
        is_built.wait(PATIENCE_S)
        if fails == "tokenizer":
            fail()
        return byte_tokenizer()

    def start() -> None:
        with serve.bind("127.0.0.1", 0) as listener:
            serve._serve(prepare_all(load_settings(["--port", "0"])), listener)

    def fail(*_: object) -> None:
        is_built.wait(PATIENCE_S)
        raise ConfigError("made to fail")

    stand_in = types.ModuleType("engine.startup.build")
    stand_in.build_engine = build_engine  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "engine.startup.build", stand_in)
    monkeypatch.setattr(fake_quire.MortalRunner, "close", close)
    for module in (serve, load):
        monkeypatch.setattr(module, "begin_weights", lambda _: None)
    monkeypatch.setattr(load, "_load_tokenizer", load_tokenizer)
    monkeypatch.setattr(daemon, "run", fail)
    monkeypatch.setattr(app, "make_app", fail if fails == "application" else lambda *_: None)
    with pytest.raises(ConfigError, match="made to fail"):
        start()
    assert len(closed) == 1


def test_http_answers_while_the_model_is_loaded(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    with quire("serve", FAKE_LOAD=str(hold)) as process, httpx.Client(timeout=PATIENCE_S) as http:
        url = read_until(process, r"listening on (\S+)")
        for path in ("/health", "/ready", "/tokenizer_info"):
            refused = http.get(url + path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading"), path
        for path in ("/v1/completions", "/v1/models/SmolLM2-135M-Instruct/load"):
            refused = http.post(url + path, json={"prompt": "hi", "stream": True})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
            assert refused.headers["retry-after"] == "1"
        assert http.get(f"{url}/v1/models").json()["data"][0]["status"] == {"value": "loading"}
        assert 'quire_model_loaded{model_name="SmolLM2-135M-Instruct"} 0.0' in http.get(f"{url}/metrics").text
        hold.unlink()
        assert ready(process) == url
        assert http.get(f"{url}/ready").status_code == 200
        assert http.post(f"{url}/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert outcome(process)[0] == 0


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "imports"])
def test_a_signal_ends_the_load_of_the_start(tmp_path: Path, answers: bool) -> None:
    (tmp_path / "hold").touch()
    with quire("serve", FAKE_LOAD=str(tmp_path / "hold")) as process:
        url = read_until(process, r"listening on (\S+)")
        assert not answers or httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 503
        process.send_signal(signal.SIGTERM)
        status, written = outcome(process)
    assert status == 130
    assert written.splitlines()[-1].endswith("Stopped while starting.")


def test_an_interrupt_while_it_imports_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.import_module", Mock(side_effect=KeyboardInterrupt))
    try:
        assert main(["doctor"]) == 130
    finally:
        gc.enable()


def test_a_signal_while_it_imports_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel keeps a signal without a handler from a container's first process."""
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def load_torch_libraries() -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the start goes on")

    monkeypatch.setattr("engine.startup.torch_ahead.load_torch_libraries", load_torch_libraries)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert main(["serve"]) == 130
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        gc.enable()


def test_a_second_signal_ends_a_start_without_a_word() -> None:
    program = """if True:
        import signal
        from engine.startup import torch_ahead
        from server.cli import main

        def load_torch_libraries():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                try:
                    signal.raise_signal(signal.SIGINT)
                finally:
                    print("it goes on")

        torch_ahead.load_torch_libraries = load_torch_libraries
        main(["serve"])
    """
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_start_without_standard_streams_keeps_their_numbers(tmp_path: Path) -> None:
    with quire("serve", around=("sh", "-c", 'exec "$@" <&- >&-', "sh")) as process:
        url = ready(process)
        assert httpx.get(f"{url}/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        status, written = outcome(process)
        assert status == 0, written
    with quire("serve", "--port", "x", around=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")) as process:
        assert outcome(process) == (2, "")


def test_more_clients_than_a_shell_allows_files() -> None:
    with quire("serve", around=("sh", "-c", 'ulimit -S -n 64; exec "$@"', "sh")) as process, ExitStack() as stack:
        url = ready(process)
        clients = [stack.enter_context(httpx.Client(timeout=PATIENCE_S)) for _ in range(80)]
        assert [client.get(f"{url}/ready").status_code for client in clients] == [200] * 80


def test_the_story_ends_with_a_line_that_can_be_pasted() -> None:
    with quire("serve") as process:
        url = ready(process)
        command = shlex.split(read_until(process, r"try: (curl .*)"))
        assert command[1] == f"{url}/v1/chat/completions"
        body = json.loads(command[command.index("-d") + 1])
        answer = httpx.post(command[1], json=body)
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] == 37  # SmolLM2's own template, with its system prompt
        process.send_signal(signal.SIGTERM)
        status, written = outcome(process)
    assert status == 0
    assert "POST /v1/chat/completions 200" in written


def test_a_daemon_on_all_addresses_names_one_to_try() -> None:
    with quire("serve", "--host", "0.0.0.0") as process:
        ready(process)
        command = shlex.split(read_until(process, r"try: (curl .*)"))
        assert command[1].startswith("http://127.0.0.1:")
        assert httpx.get(command[1].replace("/v1/chat/completions", "/ready")).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert outcome(process)[0] == 0


def test_the_first_signal_lets_open_answers_finish(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.write_text("5")
    with quire("serve", "--shutdown-timeout", "600", FAKE_HOLD=str(hold)) as process:
        url = ready(process)
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "max_tokens": 600}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            read_until(process, "(SIGINT): finishing 1 open requests within 600 s")
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "hi"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            hold.unlink()
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        status, written = outcome(process)
    assert status == 0
    assert "stopped: every open request has finished" in written


@pytest.mark.parametrize("num_signals", [1, 2])
def test_the_timeout_or_a_second_signal_ends_them(num_signals: int) -> None:
    timeout = "0.1" if num_signals == 1 else "60"
    with quire("serve", "--shutdown-timeout", timeout, FAKE_STEP_S="0.02") as process:
        url = ready(process)
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            if num_signals == 2:
                read_until(process, "(SIGTERM): finishing")
                process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        status, written = outcome(process)
    assert status == 0
    cause = "--shutdown-timeout 0.1" if num_signals == 1 else "a second signal"
    assert written.count(f"stopped: the shutdown cut 1 sequences short ({cause})") == 1


@pytest.mark.parametrize("late", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_late_signal_changes_no_exit_status(late: signal.Signals, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    with quire("serve", FAKE_EXIT=str(hold)) as process:
        ready(process)
        process.send_signal(signal.SIGTERM)
        eventually(hold.with_suffix(".ending").exists)
        for _ in range(3):
            process.send_signal(late)
        hold.unlink()
        status, written = outcome(process)
    assert status == 0
    assert "Traceback" not in written
    assert "Stopped while starting" not in written


@pytest.mark.parametrize(
    ("failure", "num_before", "expected"),
    [(KeyboardInterrupt(), 1, [130]), (None, 1, []), (None, 2, [1]), (ConfigError("x"), 1, [])],
)
def test_signals_behind_the_server_end_what_waits(
    failure: BaseException | None, num_before: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that does not hear that it is not wanted, or a thread."""
    ended = list[int]()
    monkeypatch.setattr(os, "_exit", ended.append)
    daemon.Daemon._on_late_signal(Mock(failure=failure, _num_signals=num_before))
    assert ended == expected


def test_when_the_engine_dies_streams_hear_it_and_the_process_fails() -> None:
    with quire("serve", FAKE_STEPS="20") as process:
        url = ready(process)
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG) as answer:
            events = [line for line in answer.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        assert "the device fell off the bus" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
        status, written = outcome(process)
    assert status == 1
    assert "Traceback" not in written


def test_json_logs_are_one_object_a_line() -> None:
    with quire("serve", "--log-format", "json") as process:
        read_until(process, r'"message": "(ready)')
        process.send_signal(signal.SIGTERM)
        status, written = outcome(process)
    assert status == 0
    lines = [json.loads(line) for line in written.splitlines()]
    assert {"time", "level", "logger", "message"} <= lines[-1].keys()
    assert any("SIGTERM" in line["message"] for line in lines)
