"""Lists of models that other servers have: what becomes of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ConfigError
from server.settings.flags import load_settings
from server.settings.settings import Settings


def names(settings: Settings) -> list[str]:
    return [each.served_model_name[0] for each in settings.each]


def test_a_folder_has_models(tmp_path: Path) -> None:
    for name in ("a.gguf", "mmproj-a.gguf", "large-00001-of-00011.gguf", "large-00002-of-00011.gguf", "notes.txt"):
        (tmp_path / name).touch()
    for name in ("b/mmproj-x.gguf", "b/x.gguf", "c/config.json", "empty/readme"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    settings = load_settings(["--models-dir", str(tmp_path), "--sleep-idle-seconds", "60", "--no-models-autoload"])
    assert names(settings) == ["a", "b", "c", "large-00001-of-00011"]
    models = ["a.gguf", "b/x.gguf", "c", "large-00001-of-00011.gguf"]
    assert [Path(each.model).relative_to(tmp_path) for each in settings.each] == list(map(Path, models))
    assert {(each.models_max, each.idle_unload, each.models_autoload) for each in settings.each} == {(4, 60, False)}


def test_a_folder_stands_beside_what_a_file_and_a_variable_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/a.gguf").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("QUIRE_MODELS", "first,second")
    settings = load_settings(["--models-dir=~/models"])
    assert [each.model for each in settings.each] == ["first", "second", str(tmp_path / "models/a.gguf")]
    monkeypatch.delenv("QUIRE_MODELS")
    file = tmp_path / "quire.yaml"
    for text, sentence in (
        ("models: 5\nmodels-dir: models", r"--models is 5 .set by .*; it must be a list"),
        ("models-dir: 5", "--models-dir is not understood .*; it must be a path"),
        (f"models-dir: {'x' * 400}", "--models-dir is 'x{199,200}.* cannot be read: File name too long"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            load_settings(["--config", str(file)])


def test_a_preset_has_sections_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "preset.ini"
    file.write_text(
        "\ufeffversion = 1\n[*]\nc = 8192\n[org/repository-GGUF:Q8_0]\nload-on-startup = true\n"
        "[mine]\nmodel = /models/mine.gguf ; the best\nc = 4096\nC = 0xff\nLLAMA_ARG_N_GPU_LAYERS = 0\ncache-prompt = disabled\n"
    )
    settings = load_settings(["--models-preset", str(file), "--models-max", "2"])
    assert names(settings) == ["org/repository-GGUF:Q8_0", "mine"]
    first, second = settings.each
    assert (first.model, first.max_model_len, first.models_max) == ("org/repository-GGUF:Q8_0", 8192, 2)
    assert (second.model, second.max_model_len, second.device) == ("/models/mine.gguf", 4096, "cpu")
    assert not second.enable_prefix_caching


@pytest.mark.parametrize(
    ("common", "own", "expected"),
    [
        ("c = 8192", "ctx-size = 4096", {"max_model_len": 4096}),
        ("LLAMA_ARG_CTX_SIZE = 8192", "c = 4096\nparallel = 2", {"max_model_len": 2048, "max_num_seqs": 2}),
        ("ctx-size = 8192\nnp = 4", "max-model-len = 4096", {"max_model_len": 4096, "max_num_seqs": 4}),
        ("ngl = 99", "n-gpu-layers = 0", {"device": "cpu"}),
        ("no-cache-prompt = true", "cache-prompt = true", {"enable_prefix_caching": True}),
        (
            "temp = 0.5\ntop-k = 9",
            "temperature = 0.7",
            {"override_generation_config": {"temperature": 0.7, "top_k": 9}},
        ),
        ("ctk = q8_0\nctv = q8_0", "cache-type-k = bf16", {"kv_cache_dtype": "auto"}),
    ],
)
def test_a_section_of_a_preset_wins_over_all(common: str, own: str, expected: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "preset.ini"
    file.write_text(f"[*]\n{common}\n[mine]\nmodel = a\n{own}\n")
    [mine] = load_settings(["--models-preset", str(file)]).each
    assert {name: getattr(mine, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[mine]\nmodel = a\ncontrol-vector = x\n", "mine: --control-vector x is not served"),
        ("[mine]\nmodel = a\nmlock = yes\n", "--mlock takes no value"),
        ("[mine]\nmodel = a\n\nmodel = b\n", "line 4 is neither"),
        ("[mine]\nsecret\n", "line 2 is neither"),
        ("c = 8192\n[mine]\nmodel = a\n", "has c before its first section"),
        ("[mine]\nmodel = a\nc = 1\nctx-size = 2\n", "-c and --ctx-size set --max-model-len to different values"),
        ("version = 1\n[*]\nmodel = a\n", "has no section of a model"),
    ],
)
def test_a_preset_that_is_none_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "preset.ini"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_settings(["--models-preset", str(file)])
    assert sentence in str(error.value)
    assert "secret" not in str(error.value)


SWAP = """
healthCheckTimeout: 60
macros: {server: "llama-server --port ${PORT}"}
apiKeys: [secret, "${env.OTHER_KEY}"]
globalTTL: 60
hooks: {on_startup: {preload: [second]}}
models:
  first:
    cmd: |
      # ${server} and ${others} are macros
      ${server} \\
        -m /models/first.gguf --ctx-size 4096
    ttl: 300
    aliases: ["gpt-*", {id: chat, unlisted: true}]
  second: {cmd: vllm serve org/second --max-model-len 2048, proxy: "http://second:9000", ttl: -1}
"""


def test_llama_swaps_configuration_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", "other")
    file = tmp_path / "swap.yaml"
    file.write_text(SWAP)
    settings = load_settings(["--config", str(file), "--port", "9090"])
    second, first = settings.each
    assert (second.model, second.max_model_len, second.idle_unload) == ("org/second", 2048, 60)
    assert (first.model, first.max_model_len, first.idle_unload) == ("/models/first.gguf", 4096, 300)
    assert first.served_model_name == ("first", "gpt-*", "chat")
    assert (first.models_max, first.port) == (1, 9090)
    assert [key.get_secret_value() for key in first.api_key] == ["secret", "other"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("models: {a: {cmd: docker run x}}", "is run by 'docker'"),
        ("macros: {x: '${y}', y: '${x}'}\nmodels: {a: {cmd: 'llama-server -m ${x}'}}", "macros that name each other"),
        ("macros: {x: '${x}${x}'}\nmodels: {a: {cmd: 'llama-server -m ${x}'}}", "macros that name each other"),
        ("models: {a: {cmd: llama-server -m x, env: [A=1]}}", "model 'a' has env, which has no meaning here"),
        ("models: {a: {cmd: llama-server -m x}}\ngroups: {}", "configuration has groups"),
        ("models: {a: {cmd: 'llama-server ${size}'}}", "names ${size}, which is not set"),
        ("models: {a: {cmd: llama-server -m x}}\napiKeys: ['${env.NO_KEY}']", "names ${env.NO_KEY}, which is not set"),
        ("models: {a: {cmd: llama-server -m x}}\nhooks: {on_startup: x}", "hooks has on_startup of a wrong kind"),
        ("models: {a: {cmd: llama-server -m x, ttl: '60'}}", "has ttl of a wrong kind; it must be a number"),
        ("models: {a: {cmd: llama-server -m x, macros: [y]}}", "has macros of a wrong kind; it must be a mapping"),
        ("models: {a: {cmd: 'llama-server \"x'}}", "has a cmd that is no command"),
        ("models: {}", "llama-swap's configuration has no models"),
        ("models: {a: {}}", "'a' has no cmd"),
        ("models: {a: {cmd: llama-server -m x --grammar-file y}}", "a: --grammar-file"),
    ],
)
def test_what_means_something_else_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "swap.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_settings(["--config", str(file)])
    assert sentence in str(error.value)


def test_of_two_items_with_one_model_that_is_kept_which_says_so(tmp_path: Path) -> None:
    """Such as a chat model that is a guard by another template."""
    (tmp_path / "q.yaml").write_text(
        "models: [{model: m, keep: true, served-model-name: [a, b]}, {model: m, served-model-name: c}, {model: m, keep: true}]"
    )
    settings = load_settings(["--config", str(tmp_path / "q.yaml")])
    assert [each.keep for each in settings.each] == [("a",), (), ("m",)]
    (tmp_path / "q.yaml").write_text("models: [{model: m, dtype: half, max-model-len: -1}]")
    [only] = load_settings(["--config", str(tmp_path / "q.yaml")]).each
    assert (only.dtype, only.max_model_len) == ("float16", None)  # as at the top of a file
    (tmp_path / "q.yaml").write_text("models: [{model: m, max-model-len: 1, max_model_len: 2}]")
    with pytest.raises(ConfigError, match="sets 'max_model_len' twice"):
        load_settings(["--config", str(tmp_path / "q.yaml")])
    (tmp_path / "q.yaml").write_text("models: [{model: m, keep: true, served-model-name: 5}]")
    with pytest.raises(ConfigError, match=r"--served-model-name is 5 .*; it must be a list"):
        load_settings(["--config", str(tmp_path / "q.yaml")])
