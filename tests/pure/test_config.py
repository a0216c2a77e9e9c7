"""Settings: one spelling each, four sources in order, faults as sentences, secrets kept."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ConfigError, ModelLoadError
from engine.llm.arguments import engine_config
from engine.settings.engine_config import EngineConfig, LoraModule
from engine.settings.setting import declared, names_of, to_flag
from engine.settings.setting import fault as fault_of
from engine.sources.model_source import check_embedded, find_model
from server.settings.app_config import AppConfig
from server.settings.flags import GROUPS, load_settings, make_parser, name_origins
from server.settings.serve_config import ServeConfig
from server.settings.settings import DECLARED, Settings, make_model, read_sources
from server.settings.tls import read_tls
from server.settings.yaml_files import read_yaml
from tests.examples.setting import ExampleConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("QUIRE_"):
            monkeypatch.delenv(name)


def fault(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(argv)
    return str(caught.value)


# -- one spelling ------------------------------------------------------------------------------------------------------


def test_every_engine_setting_can_be_set_and_has_the_engines_default() -> None:
    settings = Settings()
    for field in fields(EngineConfig):
        if field.name not in ("model", "most_pool_bytes"):
            assert getattr(settings, field.name) == field.default, field.name


def test_every_application_setting_has_the_applications_default() -> None:
    made = Settings().app_config("m", "m")
    assert made == AppConfig(model="m", served_model_names=("m",))


def test_a_setting_is_declared_once_and_under_a_known_heading() -> None:
    names = [each.name for each in DECLARED]
    assert len(names) == len(set(names))
    assert {each.setting.group for each in DECLARED} == set(GROUPS)


def test_a_setting_is_added_by_one_field(tmp_path: Path) -> None:
    """Its flag, variable, YAML key, type, bounds and line of --help follow from it."""
    settings = (*DECLARED, *declared(ExampleConfig))
    model = make_model(settings)
    assert "--max-wishes N" in make_parser(settings).format_help()
    given = vars(make_parser(settings).parse_args(["--max-wishes", "4"]))
    file = tmp_path / "quire.yaml"
    file.write_text("max-wishes: 6\n")
    for flags, variables, value in (
        (given, {"QUIRE_MAX_WISHES": "5"}, 4),
        ({}, {"QUIRE_MAX_WISHES": "5", "QUIRE_CONFIG": str(file)}, 5),
        ({"config": str(file)}, {}, 6),
        ({}, {}, None),
    ):
        assert model(**read_sources(settings, flags, variables).values).max_wishes == value
    assert fault_of(declared(ExampleConfig)[0], 0) == "it must be at least 1"


def attributes_read(folder: Path, *owners: str) -> set[str]:
    """The names read as `owner.name` or `something.owner.name` anywhere below a folder."""
    nodes = (node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and (node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")) in owners
    }


def test_every_setting_is_read_by_somebody() -> None:
    """EngineConfig's fields in the engine, the others in the server."""
    engine = {field.name for field in fields(EngineConfig)}
    unread = engine - attributes_read(ROOT / "engine", "config", "self")
    assert unread == set()
    ours = {each.attribute for each in declared(AppConfig, ServeConfig)}
    read = attributes_read(ROOT / "server", "config", "app_config", "serve_config", "app", "settings", "self", "serve")
    assert ours - read - {"config", "models_dir", "models_preset"} == set()  # these are read before settings are made


def test_every_setting_has_a_flag_and_a_line_of_help() -> None:
    text = make_parser().format_help()
    assert all((to_flag(name) if name != "model" else "MODEL") in text for name in names_of(DECLARED))
    assert all(each.setting.help for each in DECLARED)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from server.settings.flags import make_parser; make_parser().format_help(); import server.cli; "
        "print(sorted({'torch', 'transformers', 'fastapi', 'tokenizers', 'numpy', 'rich'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


# -- four sources ------------------------------------------------------------------------------------------------------


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("port: 1\nmax-num-seqs: 1\nblock_size: 32\nseed: null\ndata-dir: ~/x\n")
    monkeypatch.setenv("QUIRE_PORT", "2")
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "2")
    settings = load_settings(["--config", str(file), "--port", "3"])
    assert (settings.port, settings.max_num_seqs, settings.block_size, settings.seed) == (3, 2, 32, 0)
    assert settings.data_dir == Path.home() / "x"


@pytest.mark.parametrize(
    "text",
    ["a=/x, b=/y", '[{"name": "a", "path": "/x"}, {"name": "b", "path": "/y"}]', '["a=/x", "b=/y"]'],
)
def test_adapters_are_understood_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    expected = (LoraModule("a", "/x"), LoraModule("b", "/y"))
    file = tmp_path / "quire.yaml"
    for content in (f"lora-modules: {text}", "lora-modules:\n- a=/x\n- {name: b, path: /y}"):
        file.write_text(content)
        assert load_settings(["--config", str(file)]).engine_config("m").lora_modules == expected
    monkeypatch.setenv("QUIRE_LORA_MODULES", text)
    assert load_settings([]).lora_modules == expected


def test_a_length_of_auto_is_understood_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quire.yaml"
    for auto in ("auto", "-1"):
        file.write_text(f"max-model-len: {auto}\n")
        assert load_settings(["--config", str(file)]).max_model_len is None
    for auto in ("auto", "-1", -1):  # of LLM
        assert engine_config("m", {"max_model_len": auto}).max_model_len is None
    file.write_text("max-model-len: 1000\n")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "auto")
    assert load_settings(["--config", str(file)]).engine_config("m").max_model_len is None


def test_the_file_can_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("served-model-name: [a, b]\napi-key: k1, k2\nmodel: some/model\n")
    monkeypatch.setenv("QUIRE_CONFIG", str(file))
    settings = load_settings([])
    assert settings.served_model_name == ("a", "b")
    assert settings.model == "some/model"
    assert settings.app_config("m", "m").api_keys == ("k1", "k2")


def test_an_empty_variable_and_an_empty_file_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("")
    monkeypatch.setenv("QUIRE_SEED", "")
    monkeypatch.setenv("QUIRE_PORT", "")
    settings = load_settings(["--config", str(file)])
    assert all(getattr(settings, each.name) == each.default for each in DECLARED if each.name != "config")


PROTECTIVE = [each.name for each in DECLARED if each.setting.group == "Security"]


@pytest.mark.parametrize("name", PROTECTIVE)
@pytest.mark.parametrize("empty", ["", " ", "\t"])
def test_an_empty_variable_opens_nothing(name: str, empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"quire_{name}" if name == "tenants" else f"QUIRE_{name.upper()}", empty)
    assert fault().endswith("is empty, but a setting that protects needs a value; set it, or unset it.")


@pytest.mark.parametrize("name", PROTECTIVE)
def test_a_key_of_the_file_without_a_value_opens_nothing(name: str, tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(f"{name.replace('_', '-')}:\n")
    assert "to nothing, but a setting that protects needs a value" in fault("--config", str(file))


@pytest.mark.parametrize(
    "value", ['""', "[]", '[""]', '" "', "[k, ' ']", '"k,"', '",k"', '"k,,l"', "[k, null]", "['k ']"]
)
def test_an_empty_key_in_the_file_is_refused(value: str, tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(f"api-key: {value}\n")
    assert fault("--config", str(file)).startswith("--api-key is not understood")


@pytest.mark.parametrize("keys", [[""], [" "], ["\t"], ["k", ""], [" k"], ["a\nb"], ["a\udcff"]])
def test_a_key_that_no_client_sends_is_refused(keys: list[str]) -> None:
    sentence = (
        "a key is empty, or begins or ends with a space, or has a character that no client sends; give every key, "
    )
    assert fault("--api-key", *keys) == f"--api-key is not understood; {sentence}or leave the setting out."


@pytest.mark.parametrize(
    "name", ["data-dir", "allowed-local-media-path", "weights-cache", "tokenizer", "served-model-name"]
)
def test_an_empty_path_or_name_is_refused(name: str, tmp_path: Path) -> None:
    """A path would be the current folder, whose files clients could read."""
    assert fault(f"--{name}", "").endswith("; give a value, or leave the setting out.")
    file = tmp_path / "quire.yaml"
    file.write_text(f"{name}: ''\n")
    assert fault("--config", str(file)).endswith("; give a value, or leave the setting out.")
    assert load_settings(["--root-path", ""]).app_config("m", "m").root_path == ""


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("port: yes", "it must be a whole number"),
        ("num-threads: true", "it must be a whole number"),
        ("seed: 9999999999999999999999", "it must be at most"),
        ("default-chat-template-kwargs: {day: 2020-01-01}", "it is not JSON"),
        ("default-chat-template-kwargs: {a: .nan}", "it is not JSON"),
        ("hf-overrides: {day: 2020-01-01}", "it is not JSON"),
    ],
)
def test_what_yaml_reads_as_something_else_is_refused(line: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(line + "\n")
    assert sentence in fault("--config", str(file))


def test_an_empty_key_among_those_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "first,")
    assert "a key is empty" in fault()
    monkeypatch.setenv("QUIRE_API_KEY", "first, second")
    assert load_settings([]).app_config("m", "m").api_keys == ("first", "second")


def test_metrics_are_not_protected_without_a_key() -> None:
    with pytest.raises(ConfigError, match="--protect-metrics needs a key to ask for; set --api-key or --tenants"):
        load_settings(["--protect-metrics"]).check_together()
    load_settings(["--protect-metrics", "--api-key", "k"]).check_together()


@pytest.mark.parametrize(
    ("given", "origins"),
    [
        (['["*"]'], ("*",)),
        (["*"], ("*",)),
        (['["https://a.b", "tauri://localhost"]'], ("https://a.b", "tauri://localhost")),
        (["https://a.b", "http://c:3000"], ("https://a.b", "http://c:3000")),
        (["https://a.b,http://c"], ("https://a.b", "http://c")),
        (["HTTPS://A.b:443/"], ("https://a.b",)),
        (["http://[::1]:80"], ("http://[::1]",)),
        (["chrome-extension://*", "moz-extension://*", "null"], ("chrome-extension://*", "moz-extension://*", "null")),
        (["chrome-extension://abcdefgh"], ("chrome-extension://abcdefgh",)),
        (["[]"], ()),
    ],
)
def test_origins_are_taken_as_vllm_takes_them_too(
    given: list[str], origins: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings(["--allowed-origins", *given]).allowed_origins == origins
    file = tmp_path / "quire.yaml"
    file.write_text(json.dumps({"allowed-origins": given}))
    assert load_settings(["--config", str(file)]).allowed_origins == origins
    if len(given) == 1:
        monkeypatch.setenv("QUIRE_ALLOWED_ORIGINS", given[0])
        assert load_settings([]).allowed_origins == origins


@pytest.mark.parametrize(
    "given", ["a.b", "https://", "https://a.b/path", "http://*", "https://*.a.b", "://a", '["*"', "[1]"]
)
def test_what_is_no_origin_is_refused(given: str) -> None:
    assert fault("--allowed-origins", given).startswith(f"--allowed-origins is {[given]!r}; ")


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        (["Quire.", "b_c"], ("quire", "b_c")),
        (['["*"]'], ("*",)),
        (["*.example.com,localhost"], ("*.example.com", "localhost")),
    ],
)
def test_hosts_are_names(given: list[str], hosts: tuple[str, ...]) -> None:
    assert load_settings(["--allowed-hosts", *given]).allowed_hosts == hosts


@pytest.mark.parametrize("given", ["http://a", "a:80", "a/b", "[::1]", "a b", "*a", "**", "é.example", "[1]", "[[]"])
def test_what_is_no_host_name_is_refused(given: str) -> None:
    assert fault("--allowed-hosts", given).startswith(f"--allowed-hosts is {[given]!r}; ")


@pytest.mark.parametrize("given", ["http://a.b", "a.b/images", "*.a.b", "*"])
def test_what_is_no_host_of_images_is_refused(given: str) -> None:
    assert fault("--allowed-media-domains", "c.d:8443", given).endswith(
        "such as images.example.com or images.example.com:8443."
    )
    assert load_settings(["--allowed-media-domains", "c.d:8443,[::1]"]).allowed_media_domains == ("c.d:8443", "[::1]")


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["some/model"], "model", "some/model"),
        (["--kv-cache-memory-bytes", "2GiB"], "kv_cache_memory_bytes", 2 << 30),
        (["--max-body-bytes", "5MB"], "max_body_bytes", 5_000_000),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--async-scheduling"], "async_scheduling", True),
        (["--served-model-name", "a", "b"], "served_model_name", ("a", "b")),
        (["--served-model-name", "a", "--served-model-name", "b"], "served_model_name", ("a", "b")),
        (["--log-format", "json"], "log_format", "json"),
        (["--max-model-len", "auto"], "max_model_len", None),
        (["--max-model-len", "-1"], "max_model_len", None),
        (["--max-model-len=-1"], "max_model_len", None),
        (["--max-model-len", "4096"], "max_model_len", 4096),
        (["--max-model-len", "32k"], "max_model_len", 32_000),
        (["--max-num-seqs", "1K"], "max_num_seqs", 1024),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--pinned-prefix-share", "0.5"], "pinned_prefix_share", 0.5),
        (["--threads", "3"], "num_threads", 3),
        (["--cpu-threads", "3"], "num_threads", 3),
        (["--lora-modules", "a=/x=y", "b=c/d"], "lora_modules", (("a", "/x=y"), ("b", "c/d"))),
        (["--lora-modules", "a=~/x"], "lora_modules", (("a", str(Path.home() / "x")),)),  # as no shell expands it
        (["--lora-modules", '{"name": "a, b", "path": "/x"}', "c=d"], "lora_modules", (("a, b", "/x"), ("c", "d"))),
    ],
)
def test_flags_are_understood(argv: list[str], name: str, value: object) -> None:
    assert getattr(load_settings(argv), name) == value


def test_every_application_setting_reaches_the_application() -> None:
    """Each set to something that is not its default."""
    argv = [
        "--served-model-name", "first", "second", "claude-*", "--api-key", "k", "--allowed-origins", "https://a.b",
        "--allowed-hosts", "a.b", "--protect-metrics", "--max-json-values", "6",
        "--max-body-bytes", "1MiB", "--max-logprobs", "7", "--max-stored-responses", "8", "--strict-fields", "--stall-limit", "3",
        "--sse-keep-alive-interval", "2.5",
        "--shutdown-timeout", "4", "--metrics-compat", "vllm", "--no-page", "--no-openapi", "--root-path", "/q",
        "--enable-force-include-usage", "--return-tokens-as-token-ids", "--no-enable-log-requests",
        "--default-chat-template-kwargs", '{"a": 1}',
        "--otlp-traces-endpoint", "http://c:4318",
        "--tool-call-parser", "json", "--reasoning-parser", "qwen3", "--pooling", "mean",
        "--limit-mm-per-prompt", '{"image": 2}', "--mm-processor-kwargs", '{"max_pixels": 9}',
        "--allowed-media-domains", "a.b", "--allowed-local-media-path", "/tmp",
        "--data-dir", "/var/quire", "--max-file-bytes", "2MiB", "--allow-runtime-lora-updating",
        "--tenants", "/etc/tenants.yaml", "--share-prefix-cache", "--guard", "judge", "--guard-every", "7", "--guard-strict",
        "--history-cache", "9", "--keep", "first", "--idle-unload", "60", "--models-max", "3", "--models-memory", "1GiB",
        "--no-models-autoload",
        "--kv-transfer-config",
        ('{"role": "decode", "timeout_s": 9, "folder": "/dev/shm/x", "gib": 1, '
        '"expiry_s": 5, "listen": "127.0.0.1:5600", "host": "a", "peers": ["a:5600", "[::1]:5600"], "key": "s"}'),
    ]  # fmt: skip
    made = load_settings(argv).app_config("here", "unused")
    assert made == AppConfig(
        model="here",
        served_model_names=("first", "second"),
        model_aliases=("claude-*",),
        api_keys=("k",),
        allowed_hosts=("a.b",),
        allowed_origins=("https://a.b",),
        protect_metrics=True,
        max_body_bytes=1 << 20,
        max_json_values=6,
        max_logprobs=7,
        max_stored_responses=8,
        page=False,
        openapi=False,
        root_path="/q",
        enable_force_include_usage=True,
        return_tokens_as_token_ids=True,
        enable_log_requests=False,
        default_chat_template_kwargs={"a": 1},
        strict_fields=True,
        tool_call_parser="json",
        reasoning_parser="qwen3",
        pooling="mean",
        keep=("first",),
        idle_unload=60.0,
        models_max=3,
        models_memory=1 << 30,
        models_autoload=False,
        limit_mm_per_prompt={"image": 2},
        mm_processor_kwargs={"max_pixels": 9},
        allowed_media_domains=("a.b",),
        allowed_local_media_path=Path("/tmp"),
        data_dir=Path("/var/quire"),
        tenants=Path("/etc/tenants.yaml"),
        share_prefix_cache=True,
        guard="judge",
        guard_every=7,
        guard_strict=True,
        history_cache=9,
        max_file_bytes=2 << 20,
        allow_runtime_lora_updating=True,
        role="decode",
        kv_transfer_timeout_s=9.0,
        kv_connector_dir=Path("/dev/shm/x"),
        kv_connector_gib=1.0,
        kv_connector_expiry_s=5.0,
        kv_connector_listen="127.0.0.1:5600",
        kv_connector_host="a",
        kv_connector_peers=("a:5600", "[::1]:5600"),
        kv_connector_key="s",
        sse_keep_alive_interval_s=2.5,
        stall_limit_s=3.0,
        shutdown_timeout_s=4.0,
        metrics_compat="vllm",
        otlp_traces_endpoint="http://c:4318",
    )
    default = AppConfig(model="", served_model_names=())
    for field in fields(AppConfig):
        assert getattr(made, field.name) != getattr(default, field.name), f"{field.name} is not tested here"


def test_a_certificate_in_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"the certificate cannot be read from .*pipe: .*a FIFO"):
        read_tls(ServeConfig(ssl_certfile=tmp_path / "pipe"))


def test_patterns_alone_leave_the_model_its_name() -> None:
    made = load_settings(["--served-model-name", "claude-*"]).app_config("here", "own")
    assert (made.served_model_names, made.model_aliases) == (("own",), ("claude-*",))


def _transfer(**keys: object) -> list[str]:
    return ["--kv-transfer-config", json.dumps(keys)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*_transfer(role="decode"), "--kv-offload-config", '{"host_gib": 1}'],
            "does not go with --kv-offload-config",
        ),
        ([*_transfer(role="decode"), "--swap-space", "1"], "does not go with --swap-space"),
        (_transfer(role="prefill", listen="0.0.0.0:1", key="k"), "name the one that decode daemons reach as host"),
        (_transfer(role="prefill", listen="10.0.0.1:1"), "set key, or --api-key"),
        (_transfer(role="prefill", listen="10.0.0.1"), "must be like 10.0.0.5:5600"),
        (_transfer(role="decode", peers=["a:99999"]), "must be like 10.0.0.5:5600"),
        (_transfer(role="decode", listen="127.0.0.1:1"), "are for the role prefill"),
        (_transfer(role="prefill", peers=["a:1"]), "peers are for the role decode"),
    ],
)
def test_what_does_not_go_together_is_told(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(argv).check_together()


def test_what_is_set_reaches_the_engine() -> None:
    settings = load_settings(["--max-num-seqs", "7", "--strict-fields"])
    assert settings.engine_config("here") == EngineConfig(model="here", max_num_seqs=7)
    assert settings.app_config("here", "name").served_model_names == ("name",)


# -- JSON settings of several keys ----------------------------------------------------------------------------------------

OFFLOAD = '{"host_gib": 2, "folder": "/x"}'


def test_a_json_setting_is_understood_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("kv-offload-config: {host_gib: 2, folder: /x}\n")
    monkeypatch.setenv("QUIRE_KV_OFFLOAD_CONFIG", OFFLOAD)
    by_variable = load_settings([])
    monkeypatch.delenv("QUIRE_KV_OFFLOAD_CONFIG")
    for settings in (
        by_variable,
        load_settings(["--kv-offload-config", OFFLOAD]),
        load_settings(["--config", str(file)]),
    ):
        made = settings.engine_config("m")
        assert (made.kv_offload_gib, made.kv_offload_dir, made.kv_offload_disk_gib) == (2.0, "/x", 8.0)


def test_keys_from_several_sources_are_combined(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("kv-offload-config: {host_gib: 2, folder: /x}\n")
    made = load_settings(["--config", str(file), "--kv-offload-config", '{"host_gib": 3}']).engine_config("m")
    assert (made.kv_offload_gib, made.kv_offload_dir) == (3.0, "/x")


def test_a_file_names_no_other(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("config: other.yaml\n")
    expected = f"{file} sets 'config', but one file is read; put the other's settings into it."
    assert fault("--config", str(file)) == expected


def test_true_is_no_port(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("port: true\n")
    assert fault("--config", str(file)) == f"--port is True (set by {file}); it must be a whole number."


def test_a_key_is_no_setting_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault("--kv-offload-gib", "2").startswith("--kv-offload-gib is not an argument of `quire serve`; ")
    file = tmp_path / "quire.yaml"
    file.write_text("kv_offload_dir: /x\n")
    assert fault("--config", str(file)) == f"{file} sets 'kv-offload-dir', which is not a setting of Quire; remove it."
    monkeypatch.setenv("QUIRE_KV_OFFLOAD_DIR", "/x")
    assert fault().startswith("The variable QUIRE_KV_OFFLOAD_DIR is not a setting of Quire")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("{", "--kv-offload-config is '{', which is not JSON: "),
        ("3", "--kv-offload-config is '3'; it must be a JSON object."),
        (
            '{"host": 1}',
            "--kv-offload-config has no key 'host'; did you mean 'host_gib'?",
        ),
        ('{"x": 1}', "--kv-offload-config has no key 'x'; the keys are host_gib, folder, disk_gib."),
        ('{"host_gib": "much"}', "--kv-offload-config: host_gib is 'much'; it must be a number."),
        ('{"host_gib": -1}', "--kv-offload-config: host_gib is -1; it must be at least 0."),
    ],
)
def test_a_wrong_json_setting_is_one_sentence(given: str, sentence: str) -> None:
    assert fault("--kv-offload-config", given).startswith(sentence)


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--port", "8x"], "--port is '8x'; it must be a whole number."),
        (["--port", "8k"], "--port is '8k'; it must be a whole number."),
        (["--seed", "8k"], "--seed is '8k'; it must be a whole number."),
        (["--port", "70000"], "--port is 70000; it must be at most 65535."),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout is -1; it must be at least 0."),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout is nan; it must be at least 0."),
        (["--stall-limit", "0"], "--stall-limit is 0; it must be more than 0."),
        (["--log-format", "xml"], "--log-format is 'xml'; choose one of text, json."),
        (["--max-body-bytes", "2 apples"], "--max-body-bytes is '2 apples'; it must be a size such as 2GiB, 512MB or 1048576."),
        (["--max-body-bytes", "10EB"], "--max-body-bytes is 10000000000000000000; it must be at most 9223372036854775807."),
        (["--max-body-bytes", "9" * 400 + "B"], f"--max-body-bytes is '{'9' * 400}B'; it must be a size such as 2GiB, 512MB or 1048576."),
        (["--max-num-seqs", "9" * 400 + "k"], f"--max-num-seqs is '{'9' * 400}k'; it must be a whole number."),
        (["a", "b", "--models", "c"], "--models does not go with the models a, b; name all in one place."),
        (["--prot", "1"], "--prot is not an argument of `quire serve`; did you mean --port?"),
        (["--max-model-len", "all"], "--max-model-len is 'all'; it must be a whole number."),
        (["--lora-modules", "a"], "--lora-modules is ['a']; write each adapter as name=path, or as {\"name\": ..., \"path\": ...}."),
        (["--lora-modules", '{"name": "a"}'], "--lora-modules is ['{\"name\": \"a\"}']; write each adapter as name=path, or as {\"name\": ..., \"path\": ...}."),
        (["--port"], "--port: expected one argument; see `quire serve --help`."),
        (["--config", "/no/where.yaml"], "--config is '/no/where.yaml', which cannot be read: No such file or directory."),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_sentence(argv: list[str], sentence: str) -> None:
    assert fault(*argv) == sentence


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--lora-modules", "a=b", "a=c"], "--lora-modules names 'a' twice; give each adapter a name of its own."),
        (["--lora-modules", "a=b", "b=c", "--max-loras", "1"], "--max-loras is 1, less than the number of --lora-modules; raise it."),
        (["--max-lora-rank", "0"], "--max-lora-rank is 0; it must be at least 1."),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_are_refused(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(argv).engine_config("m")
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 0),
        ({"max_loras": 3}, 0),
        ({"lora_modules": (LoraModule("a", "b"),)}, 1),
        ({"lora_modules": (LoraModule("a", "b"),), "max_loras": 3}, 3),
        ({"allow_runtime_lora_updating": True}, 8),
        ({"allow_runtime_lora_updating": True, "max_loras": 2}, 2),
    ],
)
def test_how_many_adapters_there_may_be(changes: dict[str, Any], number: int) -> None:
    assert EngineConfig(model="m", **changes).num_loras == number


@pytest.mark.parametrize(
    ("name", "most"), [("num_threads", 1024), ("max_num_seqs", 1 << 20), ("max_num_batched_tokens", 1 << 20)]
)
def test_more_than_a_machine_can_give_is_refused(name: str, most: int) -> None:
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} is 100000000; it must be at most {most}"):
        EngineConfig(model="here", **{name: 100_000_000})


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json; name a folder"):
        find_model(str(tmp_path))
    with pytest.raises(ModelLoadError, match="The name of the model is empty"):
        find_model("")  # which as a path is the current folder
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)).name == tmp_path.name


@pytest.mark.parametrize(
    ("file", "name"),
    [("m-Q4_K_M.gguf", "m-Q4_K_M"), ("m-Q8_0-00001-of-00003.gguf", "m-Q8_0"), ("m-1-of-3.gguf", "m-1-of-3")],
)
def test_a_file_is_named_without_its_ending_and_its_part(file: str, name: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"")
    assert find_model(str(tmp_path / file)).name == name


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BLOCK_SIZE", "many")
    assert fault() == "--block-size is 'many' (set by QUIRE_BLOCK_SIZE); it must be a whole number."


@pytest.mark.parametrize(
    "flag", ["--hf-overrides", "--default-chat-template-kwargs", "--lora-modules", "--allowed-origins"]
)
def test_json_that_is_nested_too_deeply_is_refused(flag: str) -> None:
    opening = '{"a":' if flag != "--allowed-origins" else "["
    assert flag in fault(flag, opening + 99999 * "[")


def test_a_variable_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQ", "4")
    assert fault() == "The variable QUIRE_MAX_NUM_SEQ is not a setting of Quire; did you mean QUIRE_MAX_NUM_SEQS?"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("port: x", "--port is 'x' (set by {file}); it must be a whole number."),
        ("max-num-sqs: 1", "{file} sets 'max-num-sqs', which is not a setting of Quire; did you mean max-num-seqs?"),
        ("a-b: 1\na_b: 2", "{file} sets 'a_b' twice; keep one of the two spellings."),
        ("- port", "--config is '{file}', which holds no settings; write one 'name: value' a line."),
        ("a: " + 9999 * "[", "--config is '{file}', whose values are nested too deeply."),
        ("port: 2026-13-45", "--config is '{file}', which is not valid YAML at line 1: this is no value of type timestamp."),
        ("a: {<<: {p: 1}, p: 2, p: 3}", "--config is '{file}', which is not valid YAML at line 1: 'p' is there twice."),
        ("port: [1", "--config is '{file}', which is not valid YAML at line 1: expected ',' or ']', but got '<stream end>'."),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(content)
    assert fault("--config", str(file)) == sentence.format(file=file)


def test_a_later_fault_tells_where_its_settings_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("max-num-seqs: 9\nkv-offload-config: {folder: /x}")
    monkeypatch.setenv("QUIRE_MAX_NUM_BATCHED_TOKENS", "8")
    settings = load_settings(["--config", str(file), "--block-size", "16"])
    with pytest.raises(ConfigError, match="--max-num-batched-tokens is 8, less than --max-num-seqs") as caught:
        settings.engine_config("m")
    origins = f"--max-num-batched-tokens was set by QUIRE_MAX_NUM_BATCHED_TOKENS, --max-num-seqs was set by {file}"
    assert name_origins(str(caught.value), settings).endswith(f" ({origins}.)")
    told = name_origins("--kv-offload-config: folder is '/x' and --block-size is 16 and --seed is 0.", settings)
    assert told.endswith(f" (--kv-offload-config was set by {file}.)")


def test_secrets_are_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "sk-secret")
    settings = load_settings([])
    assert "sk-secret" not in repr(settings) + str(settings) + str(vars(settings)) + make_parser().format_help()
    file = tmp_path / "quire.yaml"
    file.write_text("api-key: {a: sk-secret}")
    monkeypatch.delenv("QUIRE_API_KEY")
    assert fault("--config", str(file)).startswith("--api-key is not understood (set by ")
    file.write_text("tenants: [{name: a, key: sk-secret}]")
    assert fault("--config", str(file)).endswith("; it must be a path.")
    assert "sk-secret" not in fault("--config", str(file)) + fault("--api-keys=sk-secret") + fault(
        "--api-keyy", "sk-secret"
    )


def test_what_a_mapping_is_merged_from_may_be_merged_again(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("y: {x: &x {<<: &b {p: 1, q: 1}, p: 2}}\nz: {<<: *x, p: 3}\nw: {1: a, '1': b}")
    assert read_yaml("--config", file) == {"y": {"x": {"p": 2, "q": 1}}, "z": {"p": 3, "q": 1}, "w": {1: "a", "1": "b"}}


def test_an_embedded_model_with_a_bit_flipped_is_refused_with_the_way_to_install_it_again(tmp_path: Path) -> None:
    whole = Path(find_model(None).path)
    check_embedded(str(whole))
    content = bytearray(whole.read_bytes())
    content[-1] ^= 1
    (tmp_path / whole.name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"is corrupt: its sha256 is .* --force-reinstall"):
        check_embedded(str(tmp_path / whole.name))
