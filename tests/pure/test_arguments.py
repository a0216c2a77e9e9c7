"""What the command lines refuse before they measure anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.__main__ import COMMANDS, main
from tools.__main__ import main as tools


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tune", "-o", "{}/none/quire.yaml"], "--output is '{}/none/quire.yaml', and there is no folder '{}/none'"),
        (["tune", "-o", "{}"], "--output is '{}', which is a folder"),
        (["simulate", "replay", "steady", "--plot", "{}/costs.gif"], "must end in .png, .svg or .pdf"),
        (["simulate", "replay", "steady", "--json", "{}/none/a.json"], "--json is '{}/none/a.json', and there is no"),
        (["simulate", "replay", "steady", "--save-trace", "{}"], "--save-trace is '{}', which is a folder"),
        (["bench", "--plot", "{}/none/a.png"], "--plot is '{}/none/a.png', and there is no folder"),
        (["bench", "--json", "/proc/version/a.json"], "there is no folder '/proc/version'"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = str(tmp_path)
    assert main([argument.replace("{}", here) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("quire: ")
    assert told.replace("{}", here) in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("tune --context 0", "--context: it is '0', and must be a whole number from 1"),
        ("tune --block-sizes 16 24", "--block-sizes: it is '24', and must be a power of two from 1 to 1024"),
        ("tune --target-itl-ms soon", "--target-itl-ms: it is 'soon', and must be a number above 0"),
        ("simulate replay steady --num 1e3", "--num: it is '1e3', and must be a whole number from 1"),
        ("simulate fleet steady --share 99%", "--share: it is '99%', and must be a number above 0, at most 1"),
    ],
)
def test_a_number_that_cannot_be_is_told_as_it_was_written(
    arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("command", "name"), [("tune", "quire tune"), ("steps", "python -m tools steps")])
def test_help_tells_how_a_command_is_called(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        (main if command in COMMANDS else tools)([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {name} ")


def test_an_interrupt_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "tune", (*COMMANDS["tune"][:2], interrupted))
    assert main(["tune"]) == 130
    assert capsys.readouterr().err == "quire: Interrupted.\n"
