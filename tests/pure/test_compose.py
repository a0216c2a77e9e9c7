"""docker-compose.yml and .env.example against the settings, and against each other; no Docker engine here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.settings.setting import names_of
from server.settings.settings import DECLARED, ENV_PREFIX

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
EXAMPLE = (ROOT / ".env.example").read_text()
PROFILES = ("", "cpu", "gpu", "webui", "gpu-webui")
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-+])((?:[^${}]|\$\{[^{}]*\})*))?\}")


def interpolate(text: str, variables: dict[str, str]) -> str:
    """Return the text with its ${A}, ${A:-default} and ${A:+replacement} filled in, nested ones too."""

    def fill(found: re.Match[str]) -> str:
        value, operator, word = variables.get(found[1], ""), found[2], interpolate(found[3] or "", variables)
        return word if operator and bool(value) is (operator == "+") else "" if operator == "+" else value

    return _VARIABLE.sub(fill, text)


def active(profile: str) -> set[str]:
    """Return the services that Compose starts under one profile; "" is that of a command that names none."""
    return {name for name, service in SERVICES.items() if profile in service.get("profiles", [profile])}


def test_every_setting_reaches_the_daemon() -> None:
    settings = {ENV_PREFIX + name.upper() for name in names_of(DECLARED)}
    for daemon in ("quire-cpu", "quire-gpu"):
        passed = {name for name in SERVICES[daemon]["environment"] if name.startswith(ENV_PREFIX)}
        assert not settings - passed, "add these to x-settings in docker-compose.yml"
        assert not passed - settings, "remove these from x-settings in docker-compose.yml"


def test_a_variable_is_passed_on_only_if_it_is_set() -> None:
    environment = SERVICES["quire-cpu"]["environment"]
    fixed = {name: value for name, value in environment.items() if value is not None}
    assert fixed.keys() == {"QUIRE_HOST", "QUIRE_PORT", "QUIRE_ALLOWED_HOSTS"}
    assert {"HF_TOKEN", "HF_ENDPOINT", "QUIRE_MODEL", "QUIRE_API_KEY"} <= environment.keys()
    assert interpolate(fixed["QUIRE_ALLOWED_HOSTS"], {}) == "quire,quire-cpu,quire-gpu"
    assert interpolate(fixed["QUIRE_ALLOWED_HOSTS"], {"QUIRE_ALLOWED_HOSTS": "a.b"}).endswith(",quire-gpu,a.b")


def test_each_profile_starts_one_daemon_and_no_two_services_on_a_port() -> None:
    daemons = {profile: {name for name in active(profile) if name.startswith("quire-")} for profile in PROFILES}
    assert daemons == {
        "": {"quire-cpu"},
        "cpu": {"quire-cpu"},
        "webui": {"quire-cpu"},
        "gpu": {"quire-gpu"},
        "gpu-webui": {"quire-gpu"},
    }
    for profile in PROFILES:
        started = active(profile)
        assert {"prometheus", "grafana"} <= started
        assert ("open-webui" in started) is profile.endswith("webui")
        ports = [interpolate(port, {}) for name in started for port in SERVICES[name]["ports"]]
        assert len({port.split(":")[1] for port in ports}) == len(ports), profile


def test_every_port_is_on_loopback_and_can_be_chosen() -> None:
    for name, service in SERVICES.items():
        for port in service["ports"]:
            variable = re.search(r"\$\{(\w+_PORT):-", port)
            assert variable, name
            address, chosen, _ = interpolate(port, {variable[1]: "4711"}).split(":")
            assert (address, chosen) == ("127.0.0.1", "4711")


def test_open_webui_talks_to_the_daemon_with_a_key() -> None:
    environment = SERVICES["open-webui"]["environment"]
    host = environment["OPENAI_API_BASE_URL"].removeprefix("http://").partition(":")[0]
    for daemon in ("quire-cpu", "quire-gpu"):
        assert host in SERVICES[daemon]["networks"]["default"]["aliases"]
        assert host in interpolate(SERVICES[daemon]["environment"]["QUIRE_ALLOWED_HOSTS"], {}).split(",")
    keys = [{}, {"QUIRE_API_KEY": "a"}, {"QUIRE_API_KEY": "a,b", "OPEN_WEBUI_KEY": "b"}]
    assert [interpolate(environment["OPENAI_API_KEY"], given) for given in keys] == ["none", "a", "b"]


def test_containers_have_no_privileges_and_a_pinned_image() -> None:
    for name, service in SERVICES.items():
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service.get("cap_drop") == ["ALL"] or name == "open-webui", name
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists(), volume


def test_the_daemon_has_the_time_that_shutdown_takes() -> None:
    timeout = next(each.default for each in DECLARED if each.name == "shutdown_timeout")
    assert int(interpolate(SERVICES["quire-cpu"]["stop_grace_period"], {}).removesuffix("s")) >= float(timeout) + 30


def test_the_example_names_what_the_compose_file_reads() -> None:
    names = re.findall(r"(?m)^#?([A-Z_]+)=", EXAMPLE)
    text = (ROOT / "docker-compose.yml").read_text()
    read = set(re.findall(r"\$\{(\w+)", text)) | SERVICES["quire-cpu"]["environment"].keys() | {"COMPOSE_PROFILES"}
    assert set(names) <= read
    assert set(re.findall(r"\$\{(\w+)", text)) <= set(names)
    assert re.findall(r"(?m)^[A-Z_]+=.*", EXAMPLE) == ["COMPOSE_PROFILES=cpu"]
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    assert not (ROOT / ".git").exists() or not _tracked(".env")


def _tracked(path: str) -> bool:
    git = shutil.which("git")
    return bool(git and subprocess.run([git, "ls-files", path], cwd=ROOT, capture_output=True, check=False).stdout)


def _real_compose() -> list[str] | None:
    """Return Docker Compose's command; version 1 does not know what the file needs."""
    for command in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(command[0]):
            asked = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, check=False)
            if asked.returncode == 0 and not asked.stdout.startswith("1."):
                return command
    return None


def test_docker_compose_reads_it_so() -> None:
    compose = _real_compose()
    if compose is None:
        pytest.skip("Docker Compose 2 is not installed")
    variables = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "QUIRE_MODEL": "a/b", "HF_TOKEN": "t"}
    for profile in PROFILES:
        # --env-file hides a .env of the developer's; the service's env_file is optional and adds only variables.
        command = [*compose, "--env-file", os.devnull, *(("--profile", profile) if profile else ()), "config"]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        services = yaml.safe_load(done.stdout)["services"]
        assert services.keys() == active(profile)
        (daemon,) = (service for name, service in services.items() if name.startswith("quire-"))
        assert daemon["environment"]["QUIRE_MODEL"] == "a/b"
        assert daemon["environment"]["HF_TOKEN"] == "t"
        assert daemon["environment"]["QUIRE_ALLOWED_HOSTS"] == "quire,quire-cpu,quire-gpu"
        assert daemon["ports"][0]["host_ip"] == "127.0.0.1"
