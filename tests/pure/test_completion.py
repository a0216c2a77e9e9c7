"""`quire completion` completes what the tables of commands and settings have, and --help shows the essential ones."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from engine.settings.setting import names_of, to_flag
from server.cli import COMMANDS
from server.completion import SHELLS, main
from server.settings.flags import make_parser
from server.settings.settings import DECLARED


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([shell]) == 0
    return capsys.readouterr().out


def complete(code: str, *words: str) -> list[str]:
    """What bash offers for the last of some words."""
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_quire; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "-c", f"{code}\n{ask}", "bash", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_offers_commands_flags_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    code = script("bash", capsys)
    assert complete(code, "quire", "se") == ["serve"]
    assert complete(code, "quire", "completion", "") == list(SHELLS)
    flags = set(complete(code, "quire", "serve", "--"))
    assert {to_flag(name) for name in names_of(DECLARED) if name != "model"} <= flags
    assert "--no-enable-prefix-caching" in flags
    assert complete(code, "quire", "serve", "--dtype", "fl") == ["float32", "float16"]
    assert "--config" in complete(code, "quire", "doctor", "--")
    assert "pyproject.toml" in complete(f"cd {Path(__file__).parents[2]}; {code}", "quire", "serve", "pyp")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_every_command_and_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = script(shell, capsys)
    names = [name for name in names_of(DECLARED) if name != "model"]
    assert all((f"-l {to_flag(name)[2:]} " if shell == "fish" else to_flag(name)) in code for name in names)
    assert all(name in code for name in COMMANDS)
    if shutil.which(shell):
        subprocess.run(
            [shell, "-n", "-c" if shell != "fish" else "/dev/stdin", code], input=code, text=True, check=True
        )


def test_an_unknown_shell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tcsh"]) == 2
    assert "{bash,zsh,fish}" in capsys.readouterr().err


def test_help_shows_the_essential_settings_and_says_how_to_see_all() -> None:
    essential = {each.name for each in DECLARED if each.setting.is_essential}
    assert 12 <= len(essential) <= 16
    short, full = make_parser(shown="").format_help(), make_parser().format_help()
    assert len(short.splitlines()) < 80 < len(full.splitlines())
    assert "--help=all" in short
    for name in names_of(DECLARED):
        if name != "model":
            assert f"\n  {to_flag(name)}" in full
            assert (f"\n  {to_flag(name)}" in short) == (name in essential)
    found = make_parser(shown="prefix").format_help()
    assert "--enable-prefix-caching" in found
    assert "--dtype" not in found
