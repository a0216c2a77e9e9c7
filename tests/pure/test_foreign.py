"""Flags of other servers: each has one meaning here, which is never changed silently."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.core.errors import ConfigError
from engine.settings.foreign import PROGRAMS, VALUES, Takes, known_value
from engine.settings.setting import names_of, to_flag
from server.settings.flags import load_settings
from server.settings.settings import DECLARED, Settings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith(("QUIRE_", "VLLM_", "LLAMA_")):
            monkeypatch.delenv(name)


def load(line: str, *more: str) -> Settings:
    return load_settings([*line.split(), *more])


def fault(line: str, *more: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(line, *more).check_together()
    return str(caught.value)


def refusal(line: str) -> str:
    try:
        load(line).check_together()
    except ConfigError as error:
        return str(error)
    return ""


# -- the acceptance: flags and values that new users met and were refused ------------------------------------------------

# As they are usually written. A line ends in what is served instead, or in the refusal's reason.
MET = (
    "--model x", "--pipeline-parallel-size 1", "--data-parallel-size 1",
    "--enable-expert-parallel", "--distributed-executor-backend mp", "--trust-remote-code", "--enable-auto-tool-choice",
    "--enable-reasoning", "--disable-log-requests", "--no-enable-log-requests", "--disable-log-stats",
    "--disable-uvicorn-access-log", "--uvicorn-log-level warning", "--max-log-len 100", "--root-path /llm",
    "--ssl-certfile c.pem", "--ssl-certfile c.pem --ssl-keyfile k.pem", "--ssl-certfile c.pem --ssl-ca-certs a.pem",
    "--ssl-certfile c.pem --ssl-ca-certs a.pem --ssl-cert-reqs 2", "--middleware my.module.Class", "--download-dir /models",
    '--hf-overrides {"rope_theta":1e6}', "--hf-token t", "--tokenizer-revision main", "--tokenizer-mode auto",
    "--config-format auto", '--limit-mm-per-prompt {"image":2}', "--otlp-traces-endpoint http://localhost:4318/v1/traces",
    "--enable-chunked-prefill", "--long-prefill-token-threshold 2048", "--num-gpu-blocks-override 512",
    "--cpu-offload-gb 10", "--compilation-config 3", "-O3", "--cudagraph-capture-sizes 1 2 4", "--enable-lora",
    "--max-cpu-loras 4", "--task generate", "--runner pooling", "--convert embed",
    '--pooler-config {"pooling_type":"MEAN"}', '--override-generation-config {"temperature":0.6}',
    '--default-chat-template-kwargs {"enable_thinking":false}', "--chat-template-content-format auto",
    "--guided-decoding-backend xgrammar", '--structured-outputs-config {"backend":"guidance"}',
    "--enable-prompt-tokens-details", "--enable-force-include-usage", "--enable-tokenizer-info-endpoint",
    "--return-tokens-as-token-ids", "--api-server-count 1", "--enable-sleep-mode",
    '--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}', "--disable-fastapi-docs",
    "--max-model-len 32k", "--max-num-batched-tokens 2k", "--dtype half", "--dtype float", "--generation-config vllm",
    "--tool-call-parser qwen3_coder", "--tool-call-parser pythonic", "--tool-call-parser deepseek_v3", "--tool-call-parser qwen3",
)  # fmt: skip
REFUSED = {
    "--middleware my.module.Class": "code named by a flag is not run; put a proxy before the daemon",
    "--cpu-offload-gb 10": "weights are not split between GPU and CPU",
    "--enable-sleep-mode": "the weights stay on the device; stop the daemon to free it",
    '--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}': 'write {"role": "prefill"}',
}


def test_at_most_one_in_five_of_what_users_met_is_refused_and_each_with_its_reason() -> None:
    refused = {line: sentence for line in MET if (sentence := refusal(line))}
    assert refused.keys() == REFUSED.keys()
    assert len(refused) <= len(MET) / 5
    for line, reason in REFUSED.items():
        assert reason in refused[line]
        assert "did you mean" not in refused[line]


@pytest.mark.parametrize(
    "line",
    ["-pp 2", "--data-parallel-size 2", "--tokenizer-mode mistral", "--task transcription",
     "--response-role user", "--no-jinja", "--quantization bitsandbytes", "--load-format pt", "--kv-cache-dtype fp8_e5m2",
     "--chat-template-content-format openai", "-mg 1", "--embd-normalize 1", "--reasoning-budget 100"],
)  # fmt: skip
def test_a_value_that_would_change_an_answer_or_cannot_be_is_refused(line: str) -> None:
    sentence = fault(line)
    assert line.split("=", maxsplit=1)[0].split(maxsplit=1)[0] in sentence
    assert sentence.endswith(".")


# -- meanings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--model x", "model", "x"),
        ("x --model x", "model", "x"),
        ("--max_model_len 4096", "max_model_len", 4096),
        ("--max-model-len 32k", "max_model_len", 32_000),
        ("--max-model-len 2K", "max_model_len", 2048),
        ("--max-model-len 1M", "max_model_len", 1 << 20),
        ("--max-model-len 25.6k", "max_model_len", 25_600),
        ("--max-num-batched-tokens 2k", "max_num_batched_tokens", 2000),
        ("--kv-cache-memory-bytes 2G", "kv_cache_memory_bytes", 2 << 30),
        ("--kv-cache-memory-bytes 2GB", "kv_cache_memory_bytes", 2_000_000_000),
        ("--dtype half", "dtype", "float16"),
        ("--dtype float", "dtype", "float32"),
        ("--quantization awq_marlin", "quantization", "auto"),
        ("-q fp8", "quantization", "fp8"),
        ("--kv-cache-dtype fp8_e4m3", "kv_cache_dtype", "fp8"),
        ("--attention-backend FLASH_ATTN", "attention_backend", "auto"),
        ("--tool-call-parser qwen3", "tool_call_parser", "hermes"),
        ("--generation-config vllm", "generation_config", "vllm"),
        ("--generation-config quire", "generation_config", "vllm"),
        ("--disable-log-requests", "enable_log_requests", False),
        ("--no-enable-log-requests", "enable_log_requests", False),
        ("--no-disable-log-requests", "enable_log_requests", True),
        ("--disable-fastapi-docs", "openapi", False),
        ("--max-loras 2 --max-cpu-loras 8", "max_loras", 8),
        ('--pooler-config {"pooling_type":"MEAN"}', "pooling", "mean"),
        ("--kv-offloading-size 4", "kv_offload_gib", 4.0),
        ("-hf org/name:Q4_K_M", "model", "org/name:Q4_K_M"),
        ("-m /a/b.gguf", "model", "/a/b.gguf"),
        ("-c 4096", "max_model_len", 4096),
        ("-c 0", "max_model_len", None),
        ("-c 16384 -np 4", "max_model_len", 4096),
        ("--parallel 4", "max_num_seqs", 4),
        ("-np -1", "max_num_seqs", None),
        ("-ngl 99", "device", "auto"),
        ("-ngl 0", "device", "cpu"),
        ("-t 3", "num_threads", 3),
        ("--threads 3", "num_threads", 3),
        ("-ctk q8_0 -ctv q8_0", "kv_cache_dtype", "int8"),
        ("-a a,b", "served_model_name", ("a", "b")),
        ("--temp 0.6 --top-k 20", "override_generation_config", {"temperature": 0.6, "top_k": 20}),
        ("--temp 0 -n -1", "override_generation_config", {"temperature": 0.0}),
        ("-n 512", "override_generation_config", {"max_tokens": 512}),
        ("--reasoning-budget 0", "default_chat_template_kwargs", {"enable_thinking": False}),
        ("--no-webui", "page", False),
        ("--no-cache-prompt", "enable_prefix_caching", False),
        ("-lv 1", "log_level", "error"),
        ("--api-prefix /x", "root_path", "/x"),
        ('--lora-modules {"name":"a","path":"/x","base_model_name":"m"}', "lora_modules", (("a", "/x"),)),
        ("--hf-overrides.rope_theta 5 --hf_overrides.a=c", "hf_overrides", {"rope_theta": 5, "a": "c"}),
        ("--cors-origins https://a.b", "allowed_origins", ("https://a.b",)),
        ("--model-path x --tp 2", "tensor_parallel_size", 2),
        ("--context-length 4096 --mem-fraction-static 0.8", "gpu_memory_utilization", 0.8),
        ("--disable-radix-cache", "enable_prefix_caching", False),
        ("--chunked-prefill-size -1", "max_num_batched_tokens", None),
        ("--schedule-low-priority-values-first", "scheduling_policy", "priority"),
        ("--lora-paths a=/x b=/y", "lora_modules", (("a", "/x"), ("b", "/y"))),
        ("--tool-call-parser llama3 --reasoning-parser deepseek-r1", "reasoning_parser", "deepseek_r1"),
        ("--model-id x --num-shard 2", "model", "x"),
        ("--hostname 127.0.0.2 --max-batch-size 8", "host", "127.0.0.2"),
        ("--quantize awq", "quantization", "auto"),
        ("--payload-limit 2000000", "max_body_bytes", 2_000_000),
    ],
)
def test_another_name_sets_the_setting(line: str, name: str, value: object) -> None:
    assert getattr(load(line), name) == value


def test_flags_without_effect_are_named_once_with_the_reason() -> None:
    settings = load("-pp 1 --enable-expert-parallel --enable-chunked-prefill -fa on --mlock --no-mmap -fa")
    remarks = "; ".join(settings.remarks)
    assert all(getattr(settings, each.name) == each.default for each in DECLARED)
    assert "-pp 1 (one daemon runs one model on one machine)" in remarks
    assert "--mlock, --no-mmap (weights are read as the machine does it fastest)" in remarks
    assert remarks.count("-fa on") == 1


def test_a_seed_that_seeds_no_answer_is_said() -> None:
    assert load("--seed 42").remarks == ["--seed 42 (it seeds random weights; a request names the seed of its answer)"]
    assert load("--seed 42 --load-format dummy").remarks == load("--seed 0").remarks == []


def test_a_switch_that_is_refused_may_be_turned_off() -> None:
    assert load("--no-enable-sleep-mode --no-context-shift").remarks == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a --model b", "MODEL and --model mean the same and have different values; leave one of them out."),
        ("-m a -hf b", "-m and -hf set --model to different values; leave one of them out."),
        ("-ctk q8_0 -ctv f16", "-ctk and -ctv set --kv-cache-dtype to different values; leave one of them out."),
        ("--max-model-len 5 -c 6", "--max-model-len and -c mean the same and have different values; leave one of them out."),
        ("-c", "-c needs a value; write it behind the flag."),
        ("--temp hot", "--temp hot is not understood: could not convert string to float: 'hot'."),
        ("--enable-lora=1", "--enable-lora takes no value; write --enable-lora or leave it out."),
    ],
)  # fmt: skip
def test_a_wrong_foreign_flag_is_one_sentence(line: str, sentence: str) -> None:
    assert fault(line) == sentence


def test_one_start_names_all_that_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("pipeline-parallel-size: 2\n")
    line = f"m --uds s --enable-priority-scheduling --temp hot --load-format pt --colour red --sise=5 --config {file}"
    head, *faults = fault(line).split("\n  ")
    assert head == "7 arguments have to change:"
    named = ["--uds s", "--enable-priority-scheduling", "--temp hot", "--pipeline-parallel-size 2", "--load-format pt"]
    for name, sentence in zip([*named, "--colour", "--sise"], faults, strict=True):
        assert sentence.startswith(name)
        assert sentence.endswith((".", "?"))


def test_a_file_of_another_server_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: m\npipeline-parallel-size: 1\nenable_auto_tool_choice: true\ndisable-log-requests: true\ndtype: half\n"
    )
    settings = load(f"--config {file}")
    assert (settings.model, settings.enable_log_requests, settings.dtype) == ("m", False, "float16")
    assert len(settings.remarks) == 2
    file.write_text("pipeline-parallel-size: 2\n")
    assert fault(f"--config {file}").startswith("--pipeline-parallel-size 2 is not served: ")


def test_keys_of_another_servers_variable_protect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert load("").app_config("m", "m").api_keys == ("theirs",)
    assert load("--api-key ours").app_config("m", "m").api_keys == ("ours",)
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert "a key is empty" in fault("")


def test_keys_are_separated_by_commas_as_in_llama_server() -> None:
    assert load("--api-key a,b c").app_config("m", "m").api_keys == ("a", "b", "c")
    assert "a key is empty" in fault("--api-key a,,b")


def test_a_local_model_is_also_served_under_its_path() -> None:
    made = load("/srv/[a]/model").app_config("/srv/[a]/model", "model")
    assert (made.served_model_names, made.model_aliases) == (("model",), ("/srv/[[]a]/model",))
    assert load("/srv/model --served-model-name x").app_config("/srv/model", "model").model_aliases == ()
    assert load("org/model").app_config("org/model", "org/model").model_aliases == ()


def test_a_format_of_checkpoints_is_no_order() -> None:
    [remark] = load("--quantization awq").remarks
    assert remark == "--quantization awq (a checkpoint's own format is recognised; others stay as they are)"


def test_other_variables_of_other_servers_are_named_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_HOST", "0.0.0.0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    settings = load("")
    assert settings.host == "127.0.0.1"
    assert settings.remarks == [
        "LLAMA_ARG_HOST, VLLM_LOGGING_LEVEL (variables of other servers; Quire's begin with QUIRE_)"
    ]


# -- the table -----------------------------------------------------------------------------------------------------------

ROWS = [row for rows in PROGRAMS.values() for row in rows]


def test_a_flag_is_in_the_table_once_and_no_setting_of_quire() -> None:
    flags = [flag for row in ROWS for flag in row.flags]
    assert len(flags) == len(set(flags))
    own = {to_flag(name) for name in names_of(DECLARED)} | {
        flag for each in DECLARED for flag in each.setting.short.split()
    }
    assert set(flags) & own == {"--model"}  # a positional argument here


def test_every_row_can_be_followed() -> None:
    known = {each.name: each for each in DECLARED}
    for row in ROWS:
        assert [bool(row.setting), bool(row.no_effect), bool(row.refused)].count(True) == 1, row
        if row.setting:
            assert row.setting in names_of(DECLARED), row
            choices = known[row.setting].setting.choices if row.setting in known else ()
            assert not choices or row.key or {*row.values.values()} <= {*choices, None}, row
        assert bool(row.only) == bool(row.otherwise)
        assert not (row.no_effect + row.refused).endswith("."), row
        assert row.takes is not Takes.SWITCH or all(flag.startswith("-") for flag in row.flags)


def test_values_of_other_servers_become_choices() -> None:
    known = {each.name: each.setting.choices for each in DECLARED}
    for name, values in VALUES.items():
        for theirs, ours in values.items():
            assert not known[name] or ours in known[name]
            assert known_value(name, theirs) == ours


# -- suggestions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["-xp", "--enable-thinking", "--rol-model", "--spec", "--gpu"])
def test_a_word_that_is_like_none_gets_no_suggestion(word: str) -> None:
    assert "did you mean" not in fault(word)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--hlep", "--help"),
        ("--prot", "--port"),
        ("--max-num-sqes", "--max-num-seqs"),
        ("--enable-auto-tool-choise", "--enable-auto-tool-choice"),
    ],
)
def test_a_misspelt_flag_gets_one(word: str, meant: str) -> None:
    assert f"did you mean {meant}?" in fault(word)
