"""Reads a checkpoint's quantization settings: which modules are packed, with which bits, groups and offsets.

The tensors decide how a module is stored (engine/runtime/weights/checkpoint.py); the config says what they cannot. Methods that cannot be read are
refused here, in one sentence. Without torch, because this is checked before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import SchemaError, SchemaValidator
from pydantic_core.core_schema import str_schema

from engine.core.errors import ModelLoadError
from engine.files.hf_config import HFConfig
from engine.system.regular_file import read_object

_MAX_BYTES = 64 << 20
_MAX_PATTERNS, _MAX_PATTERN_CHARS = (
    256,
    1000,
)  # regular expressions of a config, each of which compiles to at most 10 MiB
BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")  # files beside config.json
_GPTQ_BITS, _PACKED_BITS = (2, 3, 4, 8), range(1, 9)
_GPTQ_FORMATS = {"gptq": 1, "gemm": 1, "gptq_v2": 0}  # to the number that is added to stored zero points
_MODELOPT = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "FP8_BLOCK_SCALES",
    "MXFP8",
    "NVFP4",
    "W4A16_NVFP4",
    "MIXED_PRECISION",
)
_COMPRESSED = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
_PRESET_BITS = {"W4A16": 4, "W4A16_ASYM": 4, "W8A16": 8, "W4A8": 4, "W4AFP8": 4}  # in groups of 128
_UNKNOWN = "unknown"
READABLE = "AWQ, GPTQ, FP8 or compressed-tensors"


class Settings(NamedTuple):
    """How a packed module is stored, beside what its tensors show."""

    bits: int = 0  # of a code; 0: the tensors show it
    group: int = 0  # inputs that share a scale; 0: a whole row
    is_awq: bool = False  # the order of codes in `.qweight`; GPTQ's otherwise
    zero_offset: int = 0  # added to GPTQ's stored zero points
    block: tuple[int, int] = (128, 128)  # outputs and inputs that share a scale in FP8, if several scales are stored


class Rule(NamedTuple):
    """Settings of the modules whose names match; None: they are not quantised."""

    matches: Callable[[str], bool]
    settings: Settings | None


class QuantConfig(NamedTuple):
    """The settings of every module; the first rule that matches a name counts."""

    method: str
    source: str
    rules: Sequence[Rule]
    default: Settings | None  # of modules that no rule matches

    def of(self, name: str) -> Settings | None:
        """Return a module's settings; None if the config leaves it as floats."""
        return next((rule.settings for rule in self.rules if rule.matches(name)), self.default)


def read_quantization(config: HFConfig, folder: Path) -> QuantConfig | None:
    """Return a checkpoint's quantization settings, from config.json or files beside it; None for plain weights.

    Raises ModelLoadError for methods that Quire cannot read.
    """
    found = _in_config(config) or _beside(folder)
    if found is None or not found.values:
        return None
    method = found.text("quant_method", _guess(found.values)).lower().replace("_", "-")
    reader = READERS.get(method)
    if method == _UNKNOWN:
        raise _refusal(found, "'quant_method' is missing")
    if reader is None:
        raise _refusal(found, f"the weights are quantized by {method[:60]!r}, which cannot be read")
    return reader(found, method)


def _in_config(config: HFConfig) -> HFConfig | None:
    for place in (config, config.section("text_config") if config.has("text_config") else config):
        for key in ("quantization_config", "compression_config"):
            if place.has(key):
                found = place.section(key)
                return found.section("quantization_config") if found.has("quantization_config") else found
    return None


def _beside(folder: Path) -> HFConfig | None:
    for name in BESIDE:
        path = folder / name
        if not path.exists():
            continue
        values: Mapping[str, Any] = read_object(path, _MAX_BYTES, ModelLoadError, f"{path} is missing.")
        found = HFConfig(values, str(path))
        if name == "hf_quant_config.json":
            section = found.section("quantization")
            values = {**section.values, "quant_method": "modelopt"}
        return HFConfig(values, str(path))
    return None


def _guess(values: Mapping[str, Any]) -> str:
    """Return the method of a config that does not name it."""
    if "config_groups" in values:
        return "compressed-tensors"
    if "w_bit" in values or "zero_point" in values:
        return "awq"
    return "gptq" if "bits" in values else "modelopt" if "quant_algo" in values else _UNKNOWN


def _refusal(hf: HFConfig, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"{hf.source}: {why}; serve the checkpoint it was made from, with --quantization int8 on a CPU or fp8 on CUDA, "
        f"or a version of it in {READABLE}, or as a GGUF file."
    )


def _names(hf: HFConfig, *keys: str) -> tuple[str, ...]:
    """Return the first of these lists that is there, which may be null."""
    key = next((key for key in keys if hf.has(key)), None)
    return () if key is None else hf.texts(key)


def _compile(hf: HFConfig, pattern: str) -> Callable[[str], bool]:
    """Return whether names begin as a pattern says. Raises ModelLoadError.

    Rust's engine matches in linear time and knows no look-around, so that a config cannot keep a start waiting, as it could
    with Python's.
    """
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise ModelLoadError(
            f"{hf.source}: the regular expression {pattern!r:.80}... has {len(pattern)} characters; at most "
            f"{_MAX_PATTERN_CHARS} are read."
        )
    try:
        SchemaValidator(str_schema(pattern=pattern, regex_engine="rust-regex"))  # alone: `a)|(b` is none
        validator = SchemaValidator(str_schema(pattern=rf"\A(?:{pattern})", regex_engine="rust-regex"))
    except SchemaError as error:
        why = str(error).strip().splitlines()[-1].removeprefix("error: ")
        raise ModelLoadError(
            f"{hf.source}: {pattern!r:.200} is no regular expression that can be read ({why})."
        ) from None
    return validator.isinstance_python


def _check_number(hf: HFConfig, patterns: Iterable[str]) -> None:
    """Raise ModelLoadError for more regular expressions than are compiled."""
    if (number := len(list(patterns))) > _MAX_PATTERNS:
        raise ModelLoadError(f"{hf.source} has {number} regular expressions; at most {_MAX_PATTERNS} are read.")


# Methods


def _gptq(hf: HFConfig, method: str) -> QuantConfig:
    """GPTQ, also as auto-round writes it: settings of all modules, and `dynamic` with those of some."""
    packing = hf.text("packing_format", "auto_round:auto_gptq") if method == "auto-round" else ""
    if "awq" in packing:
        return _awq(hf, method)
    spelled = "checkpoint_format" if hf.has("checkpoint_format") else "format"
    stored = hf.text(spelled, "gptq").lower() if method == "gptq" else "gptq"
    if stored not in _GPTQ_FORMATS or hf.flag("is_marlin_format"):
        raise _refusal(hf, f"GPTQ's format {stored[:60]!r} is laid out for one kernel and cannot be read")
    default = _gptq_settings(hf, Settings(zero_offset=_GPTQ_FORMATS[stored]), is_whole=True)
    rules = [] if hf.has("lm_head") and hf.flag("lm_head") else [Rule(lambda name: name == "lm_head", None)]
    dynamic = hf.section("dynamic").values if hf.has("dynamic") else {}
    _check_number(hf, dynamic)
    for key in dynamic:
        pattern = _compile(hf, key.removeprefix("-:").removeprefix("+:"))
        settings = None if key.startswith("-:") else _gptq_settings(hf.section("dynamic").section(key), default)
        rules.append(Rule(pattern, settings))
    return QuantConfig(method, hf.source, rules, default)


def _gptq_settings(hf: HFConfig, base: Settings, *, is_whole: bool = False) -> Settings:
    bits = hf.integer("bits", None if is_whole else base.bits)
    if bits not in _GPTQ_BITS:
        raise _refusal(hf, f"GPTQ with {bits} bits cannot be read, only {', '.join(map(str, _GPTQ_BITS))}")
    return base._replace(bits=bits, group=_group(hf, "group_size", 128 if is_whole else base.group))


def _group(hf: HFConfig, key: str, default: int) -> int:
    """Return a group's inputs; 0 for a whole row, which is stored as -1."""
    found = hf.integer(key, default or -1)
    if found == -1:
        return 0
    return hf.size(key, default)


def _awq(hf: HFConfig, method: str) -> QuantConfig:
    """AWQ as AutoAWQ packs it for its product `gemm`."""
    bits, version = hf.integer("bits", hf.integer("w_bit", 4)), hf.text("version", "gemm").lower()
    if bits != 4:
        raise _refusal(hf, f"AWQ with {bits} bits cannot be read, only 4")
    if version != "gemm" and method == "awq":
        raise _refusal(hf, f"AWQ's version {version[:60]!r} cannot be read, only 'gemm'")
    group = _group(hf, "group_size" if hf.has("group_size") else "q_group_size", 128)
    return QuantConfig(method, hf.source, (), Settings(4, group, is_awq=True))


def _fp8(hf: HFConfig, method: str) -> QuantConfig:
    """FP8 as DeepSeek, Qwen, AutoFP8 and FBGEMM write it: the scales' shapes show whether there are blocks."""
    if hf.text("fmt", "e4m3") != "e4m3" or hf.text("expert_dtype", "fp8") != "fp8":
        raise _refusal(hf, "its FP8 is not e4m3 throughout, which cannot be read")
    block = hf.values.get("weight_block_size")
    settings = Settings(8, block=_block(hf, "weight_block_size", block) if block is not None else (128, 128))
    exact = frozenset(_names(hf, "ignored_layers", "modules_to_not_convert"))
    return QuantConfig(method, hf.source, [Rule(exact.__contains__, None)], settings)


def _block(hf: HFConfig, key: str, value: object) -> tuple[int, int]:
    """Return the sides of a block: [128, 128] or "128x128"."""
    sides = value.split("x") if isinstance(value, str) else value
    if isinstance(sides, (list, tuple)) and len(sides) == 2:
        first, second = (int(side) if str(side).isdecimal() and len(str(side)) < 8 else 0 for side in sides)
        if first and second:
            return first, second
    raise hf.error(key, "the sides of a block, as [128, 128]")


def _by_tensors(hf: HFConfig, method: str) -> QuantConfig:
    """Methods whose tensors say everything: bitsandbytes, MXFP4."""
    return QuantConfig(method, hf.source, (), Settings())


def _modelopt(hf: HFConfig, method: str) -> QuantConfig:
    """ModelOpt, whose tensors show the algorithm of each module."""
    algorithm = hf.text("quant_algo")
    if algorithm.upper() not in _MODELOPT:
        raise _refusal(hf, f"ModelOpt's {algorithm[:60]!r} cannot be read")
    ignored = _names(hf, "exclude_modules", "ignore")
    rule = Rule(lambda name: any(fnmatchcase(name, pattern) for pattern in ignored), None)
    return QuantConfig(method, hf.source, [rule], Settings())


def _compressed(hf: HFConfig, method: str) -> QuantConfig:
    """compressed-tensors: groups of modules by name, regular expression or class."""
    _require_compressed(hf, hf.text("format", "dense"))
    if hf.has("transform_config") and any(hf.section("transform_config").values.values()):
        raise _refusal(hf, "its weights are rotated ('transform_config'), which cannot be undone")
    if hf.has("sparsity_config") and hf.section("sparsity_config").text("format", "dense") != "dense":
        raise _refusal(hf, "its weights are sparse ('sparsity_config'), which cannot be read")
    ignored = _names(hf, "ignore")
    exact, others = frozenset(ignored), [text for text in ignored if text in _CLASSES or text.startswith("re:")]
    _check_number(hf, others)
    matchers = [_matcher(hf, text) for text in others]
    rules = [Rule(lambda name: name in exact or any(matches(name) for _, matches in matchers), None)]
    found: list[tuple[int, Rule]] = []
    groups = hf.section("config_groups")
    for key in groups.values:
        if key in _PRESET_BITS or isinstance(groups.values[key], (list, tuple)):
            settings, targets = Settings(_PRESET_BITS.get(key, 0), 128), groups.texts(key)
        else:
            group = groups.section(key)
            _require_compressed(group, group.text("format", "dense"))
            settings, targets = _arguments(group.section("weights")), _names(group, "targets")
        others += [text for text in targets if text.startswith("re:")]
        _check_number(hf, others)
        for rank, matches in (_matcher(groups, text) for text in targets):
            found.append((rank, Rule(matches, settings)))
    rules += [rule for _, rule in sorted(found, key=lambda ranked: ranked[0])]
    return QuantConfig(method, hf.source, rules, None)


def _require_compressed(hf: HFConfig, name: str) -> None:
    if name not in _COMPRESSED:
        raise _refusal(hf, f"compressed-tensors' format {name[:60]!r} cannot be read")


def _arguments(hf: HFConfig) -> Settings:
    """Return the settings of a group's `weights`."""
    bits = hf.integer("num_bits", 8)
    hf.require(bits in _PACKED_BITS, "num_bits", "1 to 8")
    block = hf.values.get("block_structure")
    sides = _block(hf, "block_structure", block) if block is not None else (128, 128)
    return Settings(bits, _group(hf, "group_size", 0) if hf.has("group_size") else 0, block=sides)


_CLASSES = ("Embedding", "Linear", "LinearBase")


def _matcher(hf: HFConfig, text: str) -> tuple[int, Callable[[str], bool]]:
    """Return the rule of a target or an exception, and its rank: name, expression, class."""
    if text.startswith("re:"):
        return 1, _compile(hf, text.removeprefix("re:"))
    if text == "Embedding":
        return 2, lambda name: name.endswith("embed_tokens")
    if text in _CLASSES:
        return 2, lambda name: not name.endswith("embed_tokens")
    return 0, lambda name: name == text


READERS: Mapping[str, Callable[[HFConfig, str], QuantConfig]] = {
    "gptq": _gptq,
    "auto-round": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm-fp8": _fp8,
    "compressed-tensors": _compressed,
    "bitsandbytes": _by_tensors,
    "mxfp4": _by_tensors,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
}
