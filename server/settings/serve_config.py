"""The settings of the process `quire serve`; engine/settings/setting.py says how to add one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.settings.setting import section

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
    models: tuple[Any, ...] = _model(
        (),
        "MODEL",
        "several models instead, each a name, or in the file of --config a mapping of `model` and the settings in which it differs",
        unset="MODEL alone",
    )
    models_dir: Path | None = _model(
        None,
        "DIR",
        "folder whose GGUF files and folders are models, at most 4 of them loaded at the same time",
        unset="none",
    )
    models_preset: Path | None = _model(
        None, "FILE", "INI file with a section of llama-server's flags for each model", unset="none"
    )
    served_model_name: tuple[str, ...] = _model(
        (),
        "NAME",
        "names that clients may use, such as smol 'claude-*'; the first is reported, those with * are not listed",
        unset="MODEL",
        is_essential=True,
    )
    tokenizer: str | None = _model(None, "PATH", "tokenizer folder, id or .gguf file", unset="the model's own")
    tokenizer_revision: str | None = _model(
        None, "REV", "branch, tag or commit of the tokenizer's Hugging Face id", unset="that of the model"
    )
    hf_token: str | None = _model(
        None,
        "TOKEN",
        "token for gated and private repositories; set the variable, as ps shows flags",
        unset="$HF_TOKEN, else that of `hf auth login`",
        is_secret=True,
    )
    chat_template: str | None = _model(None, "FILE", "Jinja chat template, a file or its text", unset="the model's own")
    generation_config: str = _model(
        "auto",
        "NAME",
        "sampling where a request names none: auto takes the model's generation_config.json, vllm OpenAI's defaults (temperature "
        "1), and a folder its generation_config.json",
    )
    override_generation_config: Mapping[str, Any] | None = _model(
        None,
        "JSON",
        "sampling where a request names none: temperature, top_p, top_k, min_p, repetition_penalty, max_tokens; max_new_tokens bounds "
        "all answers",
        unset="none",
    )

    host: str = _http(
        "127.0.0.1", "ADDR", "address to bind; 0.0.0.0 opens the daemon to the network", is_essential=True
    )
    ssl_certfile: Path | None = _http(None, "FILE", "certificate for HTTPS, in PEM; read again on SIGHUP", unset="HTTP")
    ssl_keyfile: Path | None = _http(None, "FILE", "key of the certificate", unset="in the certificate's file")
    ssl_ca_certs: Path | None = _http(None, "FILE", "authorities whose client certificates are accepted", unset="none")
    ssl_cert_reqs: int = _http(
        0, "N", "client certificates: 0 none, 1 checked if sent, 2 required", at_least=0, at_most=2
    )
    port: int = _http(8000, "PORT", "port to bind; 0 takes a free one", at_least=0, at_most=65535, is_essential=True)

    log_level: str = _logging("info", "", "least severe line to write", choices=("debug", "info", "warning", "error"))
    uvicorn_log_level: str | None = _logging(
        None,
        "",
        "least severe line of the HTTP server",
        unset="warning; at other levels than info, that of --log-level",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )
    log_format: str = _logging("text", "", "format of a line", choices=("text", "json"))
    config: Path | None = _logging(
        None, "FILE", "YAML file of these settings, keys spelled as the flags", unset="none", is_essential=True
    )
