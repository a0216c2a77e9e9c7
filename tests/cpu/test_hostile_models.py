"""Damaged and hostile model files: each either loads, or is refused in one sentence before anything large is allocated."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.errors import ModelLoadError, QuireError
from engine.runtime.layers.parts import Maker
from engine.runtime.models import load
from engine.runtime.models.config_file import read_own
from engine.runtime.models.load import load_model
from engine.runtime.schemes.linear import Matrix, Scheme
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from engine.startup.model_check import check_model
from engine.text.generation_config import read_sampling
from engine.text.tokenizer_files import load_tokenizer
from tests.cpu.lora_folders import load_adapter, save_adapter
from tests.cpu.served_models import save_servable, save_tokenizer
from tests.cpu.test_models_families import CASES, save_tiny, write_tiny
from tests.cpu.test_models_families import load as load_native
from tests.cpu.test_models_transformers import CASES as ADAPTED
from tests.cpu.test_weights_gguf import ARCHITECTURES, convert, write
from tests.daemon.real_daemon import refused

CPU = torch.device("cpu")
VALUES: list[Any] = [
    None,
    True,
    "x",
    "",
    [],
    [1, "a", None],
    [math.nan],
    {},
    {"a": 1},
    {"rope_type": "yarn", "factor": -1.0},
    0,
    -1,
    1,
    3,
    7,
    1.5,
    -1e308,
    1e308,
    math.nan,
    math.inf,
    10**9,
    2**40,
    2**63,
    10**400,
]
ROPES: list[dict[str, Any]] = [
    {"rope_type": kind, "rope_theta": theta, "factor": factor, "original_max_position_embeddings": trained, **more}
    for kind in ("linear", "dynamic", "llama3", "yarn", "longrope")
    for theta, factor, trained in [(1e4, 0, 16), (1, 4.0, 16), (0, 4.0, 16), (1e4, 1e308, 1), (1e-300, 2.0, 2**39)]
    for more in (
        {"low_freq_factor": 1.0, "high_freq_factor": 1.0, "short_factor": [0.0] * 8, "long_factor": [0] * 8},
        {"beta_fast": -1.0, "beta_slow": 0.5, "mscale": -1e300, "mscale_all_dim": 1e300},
    )
]
MOST_ELEMENTS = 1 << 24


@pytest.fixture(autouse=True)
def nothing_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that allocates a large tensor for a model."""
    make, dense = Maker.tensor, Scheme.dense

    def tensor(self: Maker, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        assert math.prod(shape) <= MOST_ELEMENTS, f"{shape} is allocated"
        return make(self, name, *shape, dtype=dtype)

    def weight(self: Scheme, matrix: Matrix) -> torch.Tensor:
        assert math.prod(matrix.shape) <= MOST_ELEMENTS, f"{matrix.shape} is allocated"
        return dense(self, matrix)

    monkeypatch.setattr(Maker, "tensor", tensor)
    monkeypatch.setattr(Scheme, "dense", weight)


def loads(path: Path, **settings: Any) -> bool:
    """Whether a model loads; else it has been refused in one sentence."""
    config = EngineConfig(model=str(path), dtype="float32", **settings)
    return outcome(lambda: (check_model(config), load_model(config, CPU, torch.float32, lambda progress: None))) == ""


def loads_alike(folder: Path, known: set[str]) -> bool:
    """Whether a model loads; one that is read as one that has loaded is not loaded again."""
    config = EngineConfig(model=str(folder), dtype="float32")

    def attempt() -> None:
        check_model(config)
        checkpoint, here = load._open(config, CPU, torch.float32)
        found = f"{here} {read_own(checkpoint, folder) if here.is_own else random.random()}"
        if found not in known:
            load_model(config, CPU, torch.float32, lambda progress: None)
            known.add(found)

    return outcome(attempt) == ""


def outcome(attempt: Callable[[], object]) -> str:
    """The one sentence of a refusal; empty where there was none."""
    try:
        attempt()
        sentence = ""
    except QuireError as error:
        sentence = str(error)
    assert "\n" not in sentence
    assert len(sentence) < 1200, sentence
    return sentence


def refusal(name: str, change: dict[str, Any], folder: Path, **settings: Any) -> str:
    """The sentence with which a tiny model is refused whose config is changed."""
    write_tiny((ADAPTED | CASES)[name], folder)
    changed(json.loads((folder / "config.json").read_text()) | change, folder)
    config = EngineConfig(model=str(folder), **settings)
    return outcome(lambda: (check_model(config), load_model(config, CPU, torch.float32, lambda progress: None)))


def changed(values: dict[str, Any], folder: Path) -> Path:
    path = folder / "config.json"
    path.unlink()  # a file that is cut to nothing waits for the disk where it is closed, thousands of times
    path.write_text(json.dumps(values))
    return folder


def test_any_value_of_a_config_loads_or_is_refused(tmp_path: Path) -> None:
    """Every key of some families has every value; one that an earlier family has too, one of them."""
    seen: set[str] = set()
    chooser = random.Random(3)
    names = ("llama", "qwen2-window", "smollm3-window", "gemma2", "gemma3", "granite", "olmo3", "glm4-moe")
    names += ("qwen3_5", "granitemoehybrid-mamba", "nemotron_h-latent", "lfm2", "lfm3", "mamba2", "falcon_h1")
    for name in (*names, "gemma3n"):
        folder = tmp_path / name
        folder.mkdir()
        write_tiny(CASES[name], folder)
        values = json.loads((folder / "config.json").read_text())
        known: set[str] = set()
        assert loads_alike(folder, known)
        outcomes = [
            loads_alike(changed(values | {key: value}, folder), known)
            for key in values
            for value in ([chooser.choice(VALUES)] if key in seen else VALUES)
        ]
        assert set(outcomes) == {True, False}
        seen |= values.keys()


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_any_rope_loads_or_is_refused(rope: dict[str, Any], tmp_path: Path) -> None:
    write_tiny(CASES["llama"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    loads(changed(values | {"rope_parameters": rope}, tmp_path))
    without = {key: value for key, value in values.items() if key != "rope_parameters"}
    loads(changed(without | {"rope_theta": rope["rope_theta"], "rope_scaling": rope}, tmp_path))


@pytest.mark.parametrize("name", ["gpt2", "starcoder2"])
def test_any_value_for_transformers_loads_or_is_refused(name: str, tmp_path: Path) -> None:
    write_tiny(ADAPTED[name], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    chooser = random.Random(5)
    sizes = [key for key, value in values.items() if type(value) in (int, float, str)]
    for key in sizes:
        for value in chooser.sample(VALUES, 3):
            loads(changed(values | {key: value}, tmp_path))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000, more than any model has"),
        ({"vocab_size": 2**40}, "does not match its weights: it calls for"),
        ({"vocab_size": 2**40 + 1}, "'vocab_size' is 1099511627777, more than any model has"),
        ({"rms_norm_eps": -1e-6}, "'rms_norm_eps' is -1e-06; Quire needs a number above 0"),
        ({"rms_norm_eps": math.nan}, "'rms_norm_eps' is nan; Quire needs a finite number"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0; Quire needs an integer of at least 1"),
        ({"num_attention_heads": 5}, "5 attention heads cannot share 2 key/value heads evenly"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
            "'rope_theta' is 0; Quire needs a number above 0",
        ),
        ({"head_dim": 15}, "15 of a head's 15 dimensions are to be rotated"),
        ({"model_type": ["llama"]}, "'model_type' is ['llama']; it must name the kind of model"),
    ],
)
def test_what_is_impossible_is_named(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal("llama", change, tmp_path)


@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_random_weights_are_compared_with_the_memory(impl: str, tmp_path: Path) -> None:
    found = refusal("llama", {"intermediate_size": 2**38}, tmp_path, load_format="dummy", model_impl=impl)
    assert "GiB of weights, and this machine has" in found


SIZES = [("starcoder2", key) for key in ("vocab_size", "hidden_size", "intermediate_size")]
SIZES += [("qwen3_5", "linear_conv_kernel_dim"), ("lfm2", "conv_L_cache"), ("nemotron_h", "conv_kernel")]


@pytest.mark.parametrize(("name", "key"), SIZES)
def test_sizes_are_compared_with_the_weights(name: str, key: str, tmp_path: Path) -> None:
    assert "does not match its weights: it calls for" in refusal(name, {key: 2**24}, tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b'{"a": ' * 100_000, b"\xff\xfe", b"3", b'{"a": 1' + b"0" * 9999]
)
def test_a_config_that_is_no_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert not loads(tmp_path)


# -- numbers that are not finite ---------------------------------------------------------------------------------------


def poison(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[-1] = math.nan
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_a_model_whose_first_pass_is_not_finite_does_not_become_ready(name: str, impl: str, tmp_path: Path) -> None:
    write_tiny(CASES["llama"], tmp_path)
    poison(tmp_path, name)
    config = EngineConfig(model=str(tmp_path), model_impl=impl, kv_cache_memory_bytes=1 << 20, device="cpu")
    with pytest.raises(ModelLoadError, match="first forward pass gave numbers that are not finite"):
        build_engine(config, lambda progress: None)


def test_a_daemon_with_nan_weights_ends_in_one_sentence(tmp_path: Path) -> None:
    save_servable(CASES["llama"], tmp_path)
    poison(tmp_path, "model.norm.weight")
    status, written = refused(str(tmp_path), "--kv-cache-memory-bytes", "1MiB")
    assert status == 1
    assert "not finite" in written.splitlines()[-1]


# -- safetensors -------------------------------------------------------------------------------------------------------


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def lies(header: dict[str, Any], data: bytes) -> Iterator[bytes]:
    name = next(key for key in header if key != "__metadata__")
    entry = header[name]
    begin, end = entry["data_offsets"]
    entries: list[Any] = [
        entry | {"data_offsets": offsets}
        for offsets in ([begin, end + 4], [begin, 2**62], [2**63, 2**64], [end, begin], [-1, end], [0, 0], [], [1], "x")
    ]
    entries += [
        entry | {"shape": shape}
        for shape in ([2**40, 2**40], [2**63], [0], [], [-1], ["a"], None, 3, [1.5], [2**32, 2**32, 2**32])
    ]
    entries += [entry | {"dtype": kind} for kind in ("F8_E4M3", "I64", "F64", "BOOL", "X", None, 3)]
    entries += [None, 3, [], {}]
    for changed_entry in entries:
        yield with_header(header | {name: changed_entry}, data)
    yield with_header(header | {"another": entry}, data)
    moved = {key: {**value, "data_offsets": [at + 4 * (at >= end) for at in value["data_offsets"]]}
             for key, value in header.items() if key not in ("__metadata__", name)}  # fmt: skip
    yield with_header(header | moved, data[:end] + bytes(4) + data[end:])  # bytes that belong to no tensor
    yield with_header({key: value for key, value in header.items() if key != name}, data)
    yield from (with_header(value, data) for value in ([], 3, {}, b"{", b"\xff" * 16, b"[" * 100_000))
    yield with_header(header, b"")
    yield with_header(header, data + bytes(64))
    for size in (0, 1, 2**31, 2**63, 2**64 - 1):
        yield struct.pack("<Q", size) + b"{}"
    yield b""
    yield b"\0"


@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_a_safetensors_header_that_lies_is_refused(impl: str, tmp_path: Path) -> None:
    write_tiny(CASES["llama"], tmp_path)
    file = tmp_path / "model.safetensors"
    header, data = header_of(file.read_bytes())
    for content in lies(header, data):
        file.write_bytes(content)
        assert not loads(tmp_path, model_impl=impl)


def test_any_byte_of_a_safetensors_header_loads_or_is_refused(tmp_path: Path) -> None:
    write_tiny(CASES["llama"], tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    chooser = random.Random(7)
    for _ in range(200):
        damaged = bytearray(content)
        damaged[chooser.randrange(8 + size)] = chooser.randrange(256)
        file.write_bytes(damaged)
        loads(tmp_path)


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    write_tiny(CASES["llama"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    assert not loads(tmp_path)


# -- GGUF --------------------------------------------------------------------------------------------------------------


def whole_gguf(path: Path, arch: str = "llama") -> bytes:
    case, names, extra = ARCHITECTURES[arch]
    model = save_tiny(case, path.parent)
    write(path, arch, model.config, convert(model, arch, names), **extra)
    return path.read_bytes()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def with_entry(content: bytes, added: bytes) -> bytes:
    """A GGUF file with one more key, whose tensors stay where an alignment of 32 puts them."""
    num_tensors, num_keys = struct.unpack("<QQ", content[8:24])
    return content[:8] + struct.pack("<QQ", num_tensors, num_keys + 1) + added + content[24:]


@pytest.mark.parametrize(
    "added",
    [
        entry("general.alignment", 9, struct.pack("<IQII", 4, 2, 1, 2)),
        entry("general.alignment", 6, struct.pack("<f", math.inf)),
        entry("general.alignment", 6, struct.pack("<f", math.nan)),
        entry("general.alignment", 5, struct.pack("<i", -32)),
        entry("general.alignment", 4, struct.pack("<I", 0)),
        entry("general.alignment", 10, struct.pack("<Q", 1 << 63)),
        entry("general.alignment", 8, struct.pack("<Q", 1) + b"3"),
        entry("general.alignment", 7, b"\x01"),
    ],
)
def test_an_alignment_that_is_none_is_refused(added: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(with_entry(whole_gguf(file), added))
    with pytest.raises(ModelLoadError, match=r"its general\.alignment is .*; it must be from 1 to"):
        load_tokenizer(str(file))
    assert not loads(file)


def hostile_gguf(content: bytes) -> Iterator[bytes]:
    for num_tensors, num_keys in ((2**63, 1), (0, 2**63), (2**64 - 1, 2**64 - 1), (0, 0)):
        yield content[:8] + struct.pack("<QQ", num_tensors, num_keys) + content[24:]
    for added in (
        entry("a", 8, struct.pack("<Q", 2**63)),
        entry("a", 9, struct.pack("<IQ", 4, 2**62)),
        entry("a", 9, struct.pack("<IQ", 8, 2**62)),
        entry("a", 9, struct.pack("<IQ", 9, 1)),
        entry("a", 99, b""),
        entry("llama.block_count", 4, struct.pack("<I", 10**9)),
        entry("llama.embedding_length", 10, struct.pack("<Q", 2**63)),
        entry("llama.attention.head_count", 4, struct.pack("<I", 0)),
        entry("llama.attention.head_count", 9, struct.pack("<IQII", 4, 2, 1, 2)),
        entry("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", -1.0)),
        entry("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", math.nan)),
        entry("llama.rope.freq_base", 6, struct.pack("<f", 0.0)),
        entry("llama.rope.dimension_count", 4, struct.pack("<I", 10**9)),
        entry("general.architecture", 4, struct.pack("<I", 3)),
    ):
        num_tensors, num_keys = struct.unpack("<QQ", content[8:24])
        yield content[:8] + struct.pack("<QQ", num_tensors, num_keys + 1) + added + content[24:]


def test_a_hostile_gguf_header_loads_or_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    content = whole_gguf(file)
    for damaged in hostile_gguf(content):
        file.write_bytes(damaged)
        loads(file)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "phi3"])
def test_any_byte_of_a_gguf_header_loads_or_is_refused(arch: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    content = whole_gguf(file, arch)
    end = content.index(b"output_norm.weight")  # near the end of the header
    chooser = random.Random(11)
    for _ in range(250):
        damaged = bytearray(content)
        for _ in range(chooser.choice((1, 1, 4))):
            damaged[chooser.randrange(4, end + 64)] = chooser.choice((0, 1, 0x7F, 0xFF, chooser.randrange(256)))
        file.write_bytes(damaged)
        loads(file)


METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<e>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.scores": [0.0, 0.0, 1.0, 0.0],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
}
HOSTILE_METADATA = [3, -1, 2**63, 1.5, math.nan, "x", "", True, [], ["a"], ["a", "a"], [1], [-1.5], [math.nan], [1] * 9]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma4"])
@pytest.mark.parametrize("key", METADATA)
def test_any_metadata_of_a_tokenizer_is_read_or_refused(key: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.files.gguf_header import GGUFHeader

    for value in HOSTILE_METADATA:
        metadata = METADATA | {"tokenizer.ggml.model": kind, key: value}
        monkeypatch.setattr(
            "engine.text.tokenizer_files.read_header", lambda path, found=metadata: GGUFHeader(found, [])
        )
        outcome(lambda: load_tokenizer("m.gguf").encode("ab", add_special_tokens=True))


# -- tokenizers of a folder --------------------------------------------------------------------------------------------


def edits() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        for value in (None, 3, [], {}, "x", {"eos_token_id": "a"}, {"eos_token_id": [[1]]}, {"temperature": "hot"}):
            yield name, lambda values, value=value: value
    for key in ("model", "added_tokens", "pre_tokenizer", "decoder", "normalizer", "post_processor", "version"):
        for value in (None, 3, [], {}, "x", [{"id": 2**63}], {"type": "BPE"}, {"type": "Sequence"}):
            yield "tokenizer.json", lambda values, key=key, value=value: values | {key: value}
    for key in ("eos_token", "chat_template", "tokenizer_class", "added_tokens_decoder", "model_max_length"):
        for value in (None, 3, [], {}, "x", "{% for", {"a": 3}):
            yield "tokenizer_config.json", lambda values, key=key, value=value: values | {key: value}


def test_any_tokenizer_is_read_or_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name, edit in edits():
        save_tokenizer(tmp_path)
        (tmp_path / "generation_config.json").write_text("{}")
        file = tmp_path / name
        file.write_text(json.dumps(edit(json.loads(file.read_text()))))
        outcome(
            lambda: load_tokenizer(str(tmp_path), sampling=read_sampling(tmp_path)).encode(
                "w5", add_special_tokens=True
            )
        )


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_any_value_of_an_adapters_config_loads_or_is_refused(tmp_path: Path) -> None:
    write_tiny(CASES["llama"], tmp_path / "m")
    model = load_native(tmp_path / "m")
    folder = save_adapter(model, tmp_path / "a")
    values = json.loads((folder / "adapter_config.json").read_text())
    more = ("rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights", "target_modules", "modules_to_save")
    for key in (*values, *more):
        for value in [*VALUES, {"q_proj": 2**63}, {"q_proj": math.nan}, {"(a+)+$": 1}, {"": 1}]:
            (folder / "adapter_config.json").write_text(json.dumps(values | {key: value}))
            outcome(lambda: load_adapter(model, folder))


def test_any_byte_of_an_adapters_header_loads_or_is_refused(tmp_path: Path) -> None:
    write_tiny(CASES["llama"], tmp_path / "m")
    model = load_native(tmp_path / "m")
    file = save_adapter(model, tmp_path / "a") / "adapter_model.safetensors"
    content = file.read_bytes()
    header, data = header_of(content)
    for damaged in lies(header, data):
        file.write_bytes(damaged)
        assert outcome(lambda: load_adapter(model, file.parent))
    chooser = random.Random(13)
    for _ in range(100):
        damaged_content = bytearray(content)
        damaged_content[chooser.randrange(8 + len(content) - len(data))] = chooser.randrange(256)
        file.write_bytes(damaged_content)
        outcome(lambda: load_adapter(model, file.parent))
