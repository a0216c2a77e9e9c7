"""`quire connect`: each program's file, what it held before, and a daemon that wants a key."""

from __future__ import annotations

import errno
import importlib.util
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from harness import Live

from engine.core.errors import ConfigError
from server import connect
from server.connect import ENV, JSON, KEY, PROGRAMS, TOML, YAML, Daemon
from tests.fake_hub import refusing_url

DAEMON = Daemon("http://quire:8000", "qwen", 65_536, has_key=False)
needs_toml = pytest.mark.skipif(importlib.util.find_spec("tomllib") is None, reason="Python before 3.11 reads no TOML")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside a folder of the test is read or written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in (KEY, *(each["folder"][0] for each in PROGRAMS.values() if each["folder"][0])):
        monkeypatch.delenv(name, raising=False)


def run(live: Live, program: str, *flags: str) -> int:
    return connect.main([program, "--url", f"{live.url}/v1/", "--yes", *flags])


def read(path: Path) -> Any:
    text = path.read_text()
    return {".json": JSON, ".toml": TOML, ".env": ENV}.get(path.suffix or path.name, YAML).parse(text)


@pytest.mark.parametrize(
    "program", [name if name != "codex" else pytest.param(name, marks=needs_toml) for name in PROGRAMS]
)
def test_a_program_is_pointed_at_the_daemon(
    program: str, live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file is made, names what the daemon says of itself, and is left as it is the second time."""
    assert run(live, program) == 0
    path = connect.path_of(PROGRAMS[program], PROGRAMS[program]["files"][0])
    text = path.read_text()
    assert live.url in text
    assert "parrot" in text
    said = capsys.readouterr().out
    assert f"+++ {path.resolve()}" in said
    assert "A tool call was tried, and" in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert run(live, program) == 0
    assert "is set up for parrot already" in capsys.readouterr().out
    assert path.read_text() == text
    assert not list(tmp_path.rglob("*.bak"))


def test_a_file_is_where_its_program_looks_or_as_named(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    run(live, "opencode")
    assert (tmp_path / "xdg/opencode/opencode.json").exists()
    run(live, "aider", "--file", str(tmp_path / "project/aider.yml"))
    names = {path.name for path in (tmp_path / "project").iterdir()}
    assert names == {"aider.yml", ".aider.model.metadata.json"}


def test_a_model_that_is_not_loaded_has_no_context_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {"data": [{"id": "far", "max_model_len": None}, {"id": "near", "max_model_len": 512}]}
    monkeypatch.setattr(
        Daemon, "ask", lambda *_: httpx.Response(200, json=cards, request=httpx.Request("GET", "http://quire"))
    )
    assert connect.find_daemon("http://quire", None).model == "near"
    with pytest.raises(ConfigError, match=r"has not loaded 'far'.*send it a request first"):
        connect.find_daemon("http://quire", "far")
    # As /model_info of an embedder has it.
    asked = {"/v1/models": json.dumps(cards), "/model_info?model=near": '{"is_generation":false}'}
    request = httpx.Request("GET", "http://quire")
    monkeypatch.setattr(Daemon, "ask", lambda _, __, path: httpx.Response(200, text=asked[path], request=request))
    with pytest.raises(ConfigError, match=r"'near' generates nothing.*--model is another of far, near"):
        connect.find_daemon("http://quire", None)


def test_context_and_cap_are_the_daemons(live: Live, tmp_path: Path) -> None:
    run(live, "opencode", "--model", "bird")
    models = read(tmp_path / ".config/opencode/opencode.json")["provider"]["quire"]["models"]
    assert models == {"bird": {"name": "bird", "limit": {"context": 512, "output": 128}}}
    run(live, "aider")
    about = read(tmp_path / ".aider.model.metadata.json")["openai/parrot"]
    assert (about["max_input_tokens"], about["max_output_tokens"]) == (512, 128)
    run(live, "claude")
    env = read(tmp_path / ".claude/settings.json")["env"]
    assert (env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"], env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == ("512", "128")


@pytest.mark.parametrize(
    ("program", "name", "before", "kept"),
    [
        (
            "claude",
            ".claude/settings.json",
            '{"env": {"ANTHROPIC_MODEL": "other", "EDITOR": "vi"}, "hooks": [{"on": 1}]}',
            {"hooks": [{"on": 1}]},
        ),
        (
            "opencode",
            ".config/opencode/opencode.json",
            '{"provider": {"other": {"name": "x"}}, "theme": "dark"}',
            {"theme": "dark"},
        ),
        pytest.param(
            "codex",
            ".codex/config.toml",
            '# mine\nmodel = "other" # old\nnotify = [\n  "say",\n]\n\n[model_providers.quire]\nbase_url = "x"\n\n[tui]\n# quiet\nsound = false\n',
            {"notify": ["say"], "tui": {"sound": False}},
            marks=needs_toml,
        ),
        ("aider", ".aider.conf.yml", "# mine\nmodel: other # old\nread:\n- a.txt\n# end\n", {"read": ["a.txt"]}),
        (
            "continue",
            ".continue/config.yaml",
            "# mine\nname: Work\nmodels:\n  - name: Quire\n    model: old\n    mine: 1\n  - name: Other\n    model: x\n\nrules:\n  - be brief # yes\n",
            {"name": "Work", "rules": ["be brief"]},
        ),
        ("open-webui", ".env", "# mine\nexport OPENAI_API_KEY='x'\nPORT=3000\n", {"PORT": "3000"}),
    ],
)
def test_what_a_file_held_stays(
    program: str, name: str, before: str, kept: dict[str, Any], live: Live, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(before)
    path.chmod(0o640)
    old = read(path)
    assert run(live, program) == 0
    found = read(path)
    assert kept.items() <= found.items()
    assert set(old) <= set(found)
    assert [line for line in before.splitlines() if line.startswith("#")] == [
        line for line in path.read_text().splitlines() if line.startswith("#")
    ], "comments stay"
    (backup,) = path.parent.glob(f"{path.name}.*.bak")
    assert backup.read_text() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    if program == "continue":
        assert [each["name"] for each in found["models"]] == ["Quire", "Other"]
        assert (found["models"][0]["model"], found["models"][0]["mine"]) == ("parrot", 1)
        assert "be brief # yes" in path.read_text()
    assert run(live, program) == 0
    assert len(list(path.parent.glob("*.bak"))) == 1, "the second time nothing is written"


@pytest.mark.parametrize(
    ("program", "name", "text"),
    [
        ("claude", ".claude/settings.json", '{"env": {}, // mine\n}'),
        ("claude", ".claude/settings.json", "[]"),
        ("opencode", ".config/opencode/opencode.json", "\xff"),
        pytest.param("codex", ".codex/config.toml", "model = \n", marks=needs_toml),
        ("continue", ".continue/config.yaml", "models: [\n"),
    ],
)
def test_a_file_that_cannot_be_read_is_left_alone(
    program: str, name: str, text: str, live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    assert run(live, program) == 2
    assert "so it is left alone" in capsys.readouterr().err
    assert path.read_bytes() == text.encode("latin-1")
    assert [each for each in path.parent.iterdir() if each != path] == []


@needs_toml
def test_a_file_that_would_come_to_harm_is_left_alone(tmp_path: Path) -> None:
    """A value of several lines is no line that can be replaced."""
    path = tmp_path / "config.toml"
    path.write_text('model = """\nother"""\n')
    with pytest.raises(ConfigError, match="without harm"):
        connect.changed(path, TOML, {"model": "quire"}, {})


def test_nothing_is_written_without_a_yes(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert connect.main(["claude", "--url", live.url]) == 1
    assert "Nothing was written." in capsys.readouterr().out
    assert not (tmp_path / ".claude").exists()
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert connect.main(["claude", "--url", live.url]) == 0
    assert (tmp_path / ".claude/settings.json").exists()


def test_a_file_that_cannot_be_written_is_as_it_was_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.json"
    path.write_text("old")

    def fail(_: Path, __: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        connect.write(path, "old", "new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"


def test_a_link_stays_a_link(live: Live, tmp_path: Path) -> None:
    (tmp_path / "dotfiles").mkdir()
    (tmp_path / "dotfiles/aider.yml").write_text("dark-mode: true\n")
    (tmp_path / ".aider.conf.yml").symlink_to("dotfiles/aider.yml")
    run(live, "aider")
    assert (tmp_path / ".aider.conf.yml").is_symlink()
    assert yaml.safe_load((tmp_path / "dotfiles/aider.yml").read_text())["model"] == "openai/parrot"


def test_a_path_that_cannot_be_looked_up_is_left_alone(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ".aider.conf.yml"
    path.symlink_to(path)
    assert run(live, "aider") == 2
    assert f"{path} cannot be read, so it is left alone (Too many levels" in capsys.readouterr().err
    assert path.is_symlink()
    assert run(live, "aider", "--file", "x" * 300) == 2
    assert "cannot be read, so it is left alone (File name too long)" in capsys.readouterr().err


def test_a_key_is_named_and_never_written(
    serve: Callable[..., Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    live = serve(api_keys=("sesame-1234",))
    assert run(live, "claude") == 2
    assert f"not that of the variable {KEY}" in capsys.readouterr().err
    monkeypatch.setenv(KEY, "sesame-1234")
    (tmp_path / ".claude").mkdir()
    (tmp_path / ".claude/settings.json").write_text('{"env": {"ANTHROPIC_AUTH_TOKEN": "none"}}')
    programs = [each for each in PROGRAMS if each != "codex" or importlib.util.find_spec("tomllib")]
    for program in programs:
        assert run(live, program) == 0
    said = capsys.readouterr().out
    assert "sesame-1234" not in said
    assert f"OPENAI_API_KEY=${KEY} aider" in said
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if "sesame-1234" in path.read_text()]
    assert "ANTHROPIC_AUTH_TOKEN" not in read(tmp_path / ".claude/settings.json")["env"], "beside a helper it would win"
    assert [path.name for path in written if KEY in path.read_text()].count("settings.json") == 1
    assert len([path for path in written if KEY in path.read_text()]) == len(programs) - 1, (
        "aider's is in its environment"
    )


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            {"tool_calls": [{"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
            'works: get_weather({"city": "Paris"}).',
        ),
        ({"content": "It rains."}, "the model answered in words: 'It rains.'. Serve one that calls tools."),
        (None, "failed with 200: {"),
    ],
)
def test_how_a_tool_call_went(message: dict[str, Any] | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = {} if message is None else {"message": message}
    request = connect.httpx.Request("POST", "http://x")
    answer = connect.httpx.Response(200, json={"choices": [choice]}, request=request)
    monkeypatch.setattr(Daemon, "ask", lambda *_, **__: answer)
    assert connect.try_tool(DAEMON).startswith(f"A tool call was tried, and {told}")


def test_faults_are_one_sentence(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(live, "claude", "--model", "eagle") == 2
    assert "does not serve 'eagle'; --model is one of parrot, bird." in capsys.readouterr().err
    with refusing_url() as url:
        assert connect.main(["claude", "--url", url, "--yes"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert list(Path.home().iterdir()) == []


def test_all_keys_of_a_file_that_go_are_gone() -> None:
    assert connect.merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": None}, "e": {"f": None}}) == {
        "a": {"c": 2},
        "d": 3,
        "e": {},
    }
    assert json.loads(JSON.write("", {"é": 1}, {})) == {"é": 1}
