"""Claude Code, Codex CLI and Continue, unmodified, as people point them at a server of their own. `make clients` installs them.

They work against a scripted model (scripted_quire.py), which calls their tools and reads the results, and against the
embedded model with instructions and tools cut to what fits into 4,096 tokens.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from daemons import ROOT, SERVE, serving

from tests.documents.pages import ADDRESS
from tests.nginx import NGINX, nginx

HERE = Path(__file__).parent
PAGES = HERE.parents[1] / "docs/integrations"
PROGRAMS = HERE / "agents/node_modules/.bin"
PATIENCE_S = 900.0  # for what has to happen; never a measurement
SAYS = "The tool said: parrot"


def block(page: str, language: str, start: str) -> str:
    """Return the block of a page in docs/integrations/ that begins with a text."""
    (text,) = (
        found
        for found in re.findall(rf"^```{language}\n(.*?)^```$", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)
        if found.startswith(start)
    )
    return str(text)


def names_for_claude() -> tuple[str, ...]:
    """Return the flags that the page gives the daemon, for the model `smol`."""
    words = shlex.split(block("claude-code.md", "bash", "quire serve"))
    return tuple("smol" if word == "MODEL" else word for word in words[words.index("--served-model-name") :])


def variables_for_claude(url: str) -> dict[str, str]:
    """Return the variables that the page sets, with a daemon's address."""
    words = shlex.split(block("claude-code.md", "bash", "ANTHROPIC_BASE_URL"))
    assert words[-1] == "claude"
    return {name: value.replace(ADDRESS, url) for name, _, value in (w.partition("=") for w in words[:-1])}


def needs(program: str, package: str) -> pytest.MarkDecorator:
    """Skip where npm has not installed a program."""
    return pytest.mark.skipif(
        not (PROGRAMS / program).exists() or shutil.which("node") is None,
        reason=f"needs {package}: npm install --no-package-lock --prefix tests/clients/agents, as `make clients` does",
    )


claude_code = needs("claude", "@anthropic-ai/claude-code")
codex_cli = needs("codex", "@openai/codex")
continue_cli = needs("cn", "@continuedev/cli")


@pytest.fixture(scope="module")
def scripted() -> Iterator[str]:
    """A scripted model of 65,536 positions; it has the one further name that people need for Claude Code."""
    flags = names_for_claude()
    with serving(*flags, command=[str(HERE / "scripted_quire.py")]) as url:
        yield url


@pytest.fixture(scope="module")
def embedded() -> Iterator[str]:
    """The embedded model, with room for instructions and a short answer."""
    with serving(*names_for_claude(), "--max-model-len", "4096", "--kv-cache-memory-bytes", "128MiB") as url:
        yield url


def run(
    program: str, *arguments: str, cwd: Path, env: Mapping[str, str], stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the program to its end, with nothing but a home of its own."""
    home = cwd.parent / "home"
    home.mkdir(parents=True, exist_ok=True)
    cwd.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [str(PROGRAMS / program), *arguments],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **env},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def ask_claude(url: str, folder: Path, prompt: str, *flags: str, stdin: str = "", **env: str) -> dict[str, Any]:
    """Have Claude Code answer, with access to no server but this one."""
    quiet = ("DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "DISABLE_ERROR_REPORTING")
    variables = {
        **variables_for_claude(url),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **dict.fromkeys(quiet, "1"),
        **env,
    }
    done = run("claude", "-p", prompt, "--output-format", "json", *flags, cwd=folder, env=variables, stdin=stdin)
    answer = json.loads(done.stdout)
    is_cut = "output token maximum" in answer["result"]  # by a model that does not come to an end
    assert is_cut or (done.returncode == 0 and not answer["is_error"]), f"{answer}\n{done.stderr}"
    return answer


def ask_codex(url: str, folder: Path, prompt: str, settings: str = "") -> list[dict[str, Any]]:
    """Have Codex answer; the events it prints. An answer may fill the context, since Codex sets no other limit to it."""
    config = folder.parent / "home/.codex/config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    page = block("codex.md", "toml", "model = ").replace('"MODEL"', '"smol"').replace(ADDRESS, url)
    window = "model_context_window = 65536\n"
    assert window in page
    config.write_text(page.replace(window, settings or window))
    # It is to run commands, and has a folder of its own for that.
    flags = ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--json")
    done = run("codex", *flags, prompt, cwd=folder, env={})
    events = [json.loads(line) for line in done.stdout.splitlines()]
    is_cut = "max_output_tokens" in str(events[-1])
    assert is_cut or (done.returncode == 0 and events[-1]["type"] == "turn.completed"), f"{events}\n{done.stderr}"
    return events


@continue_cli
def test_continue_with_the_embedded_model(embedded: str, tmp_path: Path) -> None:
    """Continue's command line reads the page's file; its extension reads the same one."""
    config = tmp_path / "config.yaml"
    page = block("continue.md", "yaml", "name: ").replace("SmolLM2-135M-Instruct", "smol")
    config.write_text(page.replace(ADDRESS, embedded))
    asked = ("--config", str(config), "-p", "What is the capital of Japan?")
    done = run("cn", *asked, cwd=tmp_path / "work", env={"CONTINUE_TELEMETRY_ENABLED": "0"})
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout


def connect(program: str, url: str, folder: Path) -> None:
    """Have `quire connect` write the program's settings into the home of `run`."""
    home = folder.parent / "home"
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    python = os.environ.get("DAEMON_PYTHON", sys.executable)
    command = [python, *SERVE, "connect", program, "--url", url, "--yes"]
    done = subprocess.run(
        command, cwd=ROOT, env={**kept, "HOME": str(home)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@claude_code
def test_claude_code_as_connect_sets_it_up(scripted: str, tmp_path: Path) -> None:
    """No variable says where the model is, or its name: the file does."""
    folder = tmp_path / "work"
    connect("claude", scripted, folder)
    prompt = 'Write the file. SCRIPT Bash {"command": "echo parrot > out.txt; cat out.txt"}'
    flags = ("-p", prompt, "--output-format", "json", "--allowedTools", "Bash")
    done = run("claude", *flags, cwd=folder, env={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"})
    answer = json.loads(done.stdout)
    assert (answer["result"], answer["num_turns"]) == (SAYS, 2), done.stderr
    assert set(answer["modelUsage"]) == {"smol"}, "the daemon's own name, not a pattern"


@codex_cli
def test_codex_as_connect_sets_it_up(scripted: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    connect("codex", scripted, folder)
    flags = ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--json")
    done = run("codex", *flags, 'SCRIPT exec_command {"cmd": "echo parrot"}', cwd=folder, env={})
    assert "parrot" in words([json.loads(line) for line in done.stdout.splitlines()])[-1], done.stderr


def words(events: list[dict[str, Any]]) -> list[str]:
    return [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]


@claude_code
def test_claude_code_closes_the_tool_loop(scripted: str, tmp_path: Path) -> None:
    """With no model named: it asks for its own, and for as many tokens as that one can write."""
    folder = tmp_path / "work"
    prompt = 'Write the file. SCRIPT Bash {"command": "echo parrot > out.txt; cat out.txt"}'
    answer = ask_claude(scripted, folder, prompt, "--allowedTools", "Bash")
    assert (folder / "out.txt").read_text() == "parrot\n"
    assert (answer["result"], answer["num_turns"]) == (SAYS, 2)
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] > 20_000, "of two requests"
    again = ask_claude(scripted, folder, "Say hello.", "--allowedTools", "Bash")
    assert again["usage"]["input_tokens"] < 5000, "sessions share instructions and tools in the prefix cache"


@claude_code
def test_claude_code_finds_a_deferred_tool(scripted: str, tmp_path: Path) -> None:
    """The model reads its definition in the result of a search, behind a prompt that is cached."""
    answer = ask_claude(scripted, tmp_path / "work", 'SCRIPT ToolSearch {"query": "select:WebFetch", "max_results": 1}')
    assert answer["num_turns"] == 2
    assert '"name": "WebFetch", "parameters": {' in answer["result"]
    assert answer["usage"]["cache_read_input_tokens"] > 10_000


@claude_code
def test_claude_code_compacts_what_is_too_long(scripted: str, tmp_path: Path) -> None:
    folder, page = tmp_path / "work", "word " * 18_000
    first = ask_claude(scripted, folder, "Read this.", stdin=page)
    ask_claude(scripted, folder, "Read on.", "--continue", stdin=page)
    last = ask_claude(scripted, folder, "Read on.", "--continue", stdin=page)
    assert last["session_id"] == first["session_id"]
    assert last["usage"]["input_tokens"] < 3 * 18_000, "what came before has been summed up"


MCP_SERVER = """
import json, sys
tool = {"name": "parrot", "inputSchema": {"type": "object", "properties": {"word": {"type": "string"}}}}
for asked in filter(lambda message: "id" in message, map(json.loads, sys.stdin)):
    answer = {"tools": [tool]}
    if asked["method"] == "initialize":
        answer = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        answer["serverInfo"] = {"name": "birds", "version": "1"}
    elif asked["method"] == "tools/call":
        answer = {"content": [{"type": "text", "text": asked["params"]["arguments"]["word"] + ", said the parrot"}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answer}), flush=True)
"""


@codex_cli
def test_codex_calls_a_tool_of_an_mcp_server(scripted: str, tmp_path: Path) -> None:
    """Codex sends these tools in a namespace, which the call has to name."""
    server = f"[mcp_servers.birds]\ncommand = {json.dumps(sys.executable)}\nargs = {json.dumps(['-c', MCP_SERVER])}\n"
    approved = 'default_tools_approval_mode = "approve"\n'
    settings = f"model_context_window = 65536\n\n{server}{approved}"
    events = ask_codex(scripted, tmp_path / "work", 'SCRIPT mcp__birds__parrot {"word": "Hello"}', settings)
    assert "Hello, said the parrot" in words(events)[-1]


@codex_cli
def test_codex_closes_the_tool_loop(scripted: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    prompt = 'Write the file. SCRIPT exec_command {"cmd": "echo parrot > out.txt; cat out.txt"}'
    events = ask_codex(scripted, folder, prompt)
    assert (folder / "out.txt").read_text() == "parrot\n"
    first, last = words(events)
    assert first == "I will call exec_command."
    assert last.startswith("The tool said: ")
    assert "parrot" in last


@claude_code
@codex_cli
@pytest.mark.skipif(NGINX is None, reason="nginx is missing: apt-get install nginx-light")
def test_agents_work_with_two_daemons_behind_nginx(tmp_path: Path) -> None:
    flags, command = names_for_claude(), [str(HERE / "scripted_quire.py")]
    with serving(*flags, command=command) as first, serving(*flags, command=command) as second:
        (tmp_path / "nginx").mkdir()
        addresses = [each.removeprefix("http://") for each in (first, second)]
        with nginx(tmp_path / "nginx", addresses, addresses[0]) as url:
            answer = ask_claude(
                url, tmp_path / "claude/work", 'SCRIPT Bash {"command": "echo parrot"}', "--allowedTools", "Bash"
            )
            assert (answer["result"], answer["num_turns"]) == (SAYS, 2)
            events = ask_codex(url, tmp_path / "codex/work", 'SCRIPT exec_command {"cmd": "echo parrot"}')
            assert "parrot" in words(events)[-1]


@claude_code
def test_claude_code_with_the_embedded_model(embedded: str, tmp_path: Path) -> None:
    cut = ("--system-prompt", "Answer briefly.", "--tools", "Read")
    answer = ask_claude(
        embedded, tmp_path / "work", "What is the capital of Japan?", *cut, CLAUDE_CODE_MAX_OUTPUT_TOKENS="64"
    )
    assert answer["result"]


@codex_cli
def test_codex_with_the_embedded_model(embedded: str, tmp_path: Path) -> None:
    instructions = tmp_path / "instructions.md"
    instructions.write_text("Answer briefly.")
    settings = f'model_instructions_file = "{instructions}"\nmodel_context_window = 4096\nweb_search = "disabled"\n'
    settings += "[agents]\nenabled = false\n[features]\ngoals = false\n"
    assert words(ask_codex(embedded, tmp_path / "work", "What is the capital of Japan?", settings))
