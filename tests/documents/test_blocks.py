"""Every block of the documents is parsed: commands by the real parsers, bodies by the API's classes, code by its language."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from engine.text.fields.body import RequestBody
from loadtest.__main__ import COMMANDS as LOADTEST
from server import cli
from server.app import routers
from server.http.openapi import _body
from server.settings.flags import load_settings
from tests.documents.pages import PAGES, ROOT, Block, blocks, commands, name_of

SHELL = ("bash", "sh")
OTHERS = ("python", "c", "json", "jsonl", "yaml", "toml", "mermaid", "text", "javascript", "promql", "nginx", "ini", "")
OUTPUT = ("text", "")  # what programs print, and drawings
# Programs that a test cannot run here: a block with one needs a reason, unless its line is parsed below.
PARSED = ("quire", "make")
RUN = ("curl", "cat", "python", "echo", "sleep", "export", "quire", "jq", "head", "mkdir")

bodies: dict[str, type[RequestBody]] = {
    f"{method} {route.path_format}": body
    for router in routers()
    for route in router.routes
    if (body := _body(route)) is not None
    for method in route.methods
}


def every(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, *languages)]


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables set before a command, and its words up to a pipe or a redirection."""
    words = shlex.split(command, comments=True)
    variables = {}
    while words and (found := re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", words[0], re.DOTALL)):
        variables[found[1]] = found[2]
        words = words[1:]
    ends = [at for at, word in enumerate(words) if word in ("|", ">", ">>", "&", "&&", ";", "2>&1")]
    return variables, words[: ends[0]] if ends else words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_names_a_language_and_hides_no_command(page: Path) -> None:
    for block in blocks(page):
        assert block.language in SHELL + OTHERS, block
        if block.language in OUTPUT:
            hidden = re.search(
                r"^(?:\$ )?(?:curl |quire |python -m |pip install|docker |make )", block.text, re.MULTILINE
            )
            assert hidden is None, f"{block}: make it a block of bash"


@pytest.mark.parametrize("block", every(*SHELL), ids=str)
def test_a_command_is_understood(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in __import__("os").environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for command in commands(block.text):
        variables, words = words_of(command)
        if not words:
            continue
        if words[0] == "quire":
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                check_quire(words[1:])
        elif words[0] == "make":
            targets = (ROOT / "Makefile").read_text(encoding="utf-8")
            for word in words[1:]:
                assert "=" in word or re.search(rf"^{word}:", targets, re.MULTILINE), f"{block}: make {word}"
                if found := re.fullmatch(r"ARGS=(.*)", word):
                    check_make(words[1], found[1])
        elif words[0] == "curl" and "-d" in words:
            check_body(words)
        if not block.reason:
            assert words[0] in RUN + PARSED, f"{block}: say why no test runs it: <!-- not run: needs ... -->"


def check_quire(words: list[str]) -> None:
    """Parse `quire WORDS` as the command does, up to what needs files or a model."""
    if not words or words[0] in ("--version", "--help"):
        return
    name, rest = words[0], words[1:]
    assert name in cli.COMMANDS, name
    if "--help" in rest or any(word.startswith("--help=") for word in rest):
        return
    if name == "serve":
        if "--config" in rest:
            at = rest.index("--config")
            rest = rest[:at] + rest[at + 2 :]
        load_settings(rest).check_together()
    elif name in LOADTEST:
        parser = argparse.ArgumentParser(exit_on_error=False)
        LOADTEST[name][1](parser)
        parser.parse_args(rest)


def check_make(target: str, arguments: str) -> None:
    if target == "serve":
        check_quire(["serve", *shlex.split(arguments)])


def check_body(words: list[str]) -> None:
    """Validate the body of a curl command by the class of its endpoint."""
    address = next(word for word in words if word.startswith("http"))
    body = words[words.index("-d") + 1]
    path = re.sub(r"^https?://[^/]*", "", address)
    if "$" in body or body.startswith("@") or f"POST {path}" not in bodies:
        return
    bodies[f"POST {path}"].model_validate_json(body)


@pytest.mark.parametrize("block", every("python", "json", "jsonl", "yaml", "toml"), ids=str)
def test_a_block_is_of_its_language(block: Block) -> None:
    if block.language == "python":
        compile(block.text, str(block), "exec")
    elif block.language == "json":
        json.loads(re.sub(r"\.\.\.", "0", block.text) if "{..." in block.text else block.text)
    elif block.language == "jsonl":
        for line in block.text.splitlines():
            json.loads(line)
    elif block.language == "yaml":
        list(yaml.safe_load_all(block.text))
    elif sys.version_info >= (3, 11):
        import tomllib

        tomllib.loads(block.text)
