"""The settings of the process `quire serve`; engine/setting.py says how to add one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.setting import section

_model = section("Model")
_http = section("HTTP")
_logging = section("Logging and configuration")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings that are neither the engine's nor the HTTP application's."""

    model: str | None = _model(
        None,
        "MODEL",
        "Hugging Face id, folder with safetensors, or .gguf file",
        unset="the embedded SmolLM2-135M-Instruct",
        is_essential=True,
    )
    served_model_name: tuple[str, ...] = _model(
        (),
        "NAME",
        "names that clients may use, such as smol 'claude-*'; the first is reported, those with * are not listed",
        unset="MODEL",
        is_essential=True,
    )
    tokenizer: str | None = _model(None, "PATH", "tokenizer folder, id or .gguf file", unset="the model's own")
    chat_template: Path | None = _model(None, "FILE", "Jinja chat template", unset="the model's own")
    generation_config: str = _model(
        "quire",
        "",
        "sampling where a request names none: OpenAI's defaults, or those of the model's generation_config",
        choices=("quire", "auto"),
    )

    host: str = _http(
        "127.0.0.1", "ADDR", "address to bind; 0.0.0.0 opens the daemon to the network", is_essential=True
    )
    port: int = _http(8000, "PORT", "port to bind; 0 takes a free one", at_least=0, at_most=65535, is_essential=True)

    log_level: str = _logging("info", "", "least severe line to write", choices=("debug", "info", "warning", "error"))
    log_format: str = _logging("text", "", "format of a line", choices=("text", "json"))
    config: Path | None = _logging(
        None, "FILE", "YAML file of these settings, keys spelled as the flags", unset="none", is_essential=True
    )
