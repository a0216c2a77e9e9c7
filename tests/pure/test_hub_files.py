"""Which files of a repository are a model's: GGUF files by their tag as llama.cpp chooses, safetensors without copies."""

from __future__ import annotations

import pytest

from engine.core.errors import ModelLoadError
from engine.hub.files import gguf_files, is_folder, small_files, split_tag, weight_files

TYPES = ["m-IQ4_XS.gguf", "m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf"]
SPLIT = [f"BF16/m-BF16-0000{i}-of-00002.gguf" for i in (2, 1)]
SIDE = ["mmproj-Q4_K_M.gguf", "imatrix.Q4_K_M.gguf", "mtp-m-Q4_K_M.gguf", "eagle3-m-Q4_K_M.gguf"]


@pytest.mark.parametrize(
    ("names", "tag", "chosen"),
    [
        (TYPES, "Q4_K_M", ["m-Q4_K_M.gguf"]),
        (TYPES, "q4_k_s", ["m-Q4_K_S.gguf"]),
        (TYPES, "Q4_XS", ["m-IQ4_XS.gguf"]),  # anywhere in the name
        (TYPES, None, ["m-Q4_K_M.gguf"]),
        (["m-Q2_K.gguf", "m.Q8_0.gguf"], None, ["m.Q8_0.gguf"]),
        (["m-Q2_K.gguf", "m-Q3_K.gguf"], None, ["m-Q2_K.gguf"]),
        ([*SIDE, *TYPES], "Q4_K_M", ["m-Q4_K_M.gguf"]),
        (TYPES, "m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        (SPLIT, "BF16", sorted(SPLIT)),
        (SPLIT, None, sorted(SPLIT)),
        (["Q8_0/m.gguf", "Q8_0-x/m.gguf"], "Q8_0", ["Q8_0-x/m.gguf"]),  # a type is followed by a dot or a dash
    ],
)
def test_a_tag_names_what_it_names_in_llama_cpp(names: list[str], tag: str | None, chosen: list[str]) -> None:
    assert gguf_files(names, tag, "'org/m'") == chosen


@pytest.mark.parametrize(("names", "tag"), [(TYPES, "Q4_K"), (TYPES, "Q5_K_M"), (SIDE, None), ([], "Q8_0")])
def test_a_tag_without_a_file_is_refused(names: list[str], tag: str | None) -> None:
    with pytest.raises(ModelLoadError, match=r"^'org/m' has no GGUF file"):
        gguf_files(names, tag, "'org/m'")


def test_an_id_may_have_a_tag() -> None:
    assert split_tag("org/m") == ("org/m", None)
    assert split_tag("org/m:Q4_K_M") == ("org/m", "Q4_K_M")
    assert split_tag("org/m:") == ("org/m", None)


def test_safetensors_come_before_gguf_unless_a_tag_is_given() -> None:
    both = ["model.safetensors", "m-Q8_0.gguf", "onnx/model.safetensors"]
    assert is_folder(both, None)
    assert not is_folder(both, "Q8_0")
    assert not is_folder(["m.gguf", "consolidated.safetensors", "onnx/model.safetensors"], None)
    assert is_folder(["pytorch_model.bin"], None)  # refused for its pickles


def test_copies_of_the_weights_are_left_alone() -> None:
    names = ["consolidated.safetensors", "model-1.safetensors", "model-2.safetensors", "adapter_model.safetensors"]
    assert weight_files(names, (), "'org/m'") == ["model-1.safetensors", "model-2.safetensors"]
    assert weight_files([*names, "model.safetensors"], (), "'org/m'") == ["model.safetensors"]
    assert weight_files(names, ["model-1.safetensors"], "'org/m'") == ["model-1.safetensors"]
    assert small_files(["config.json", "a/config.json", "x.py", "merges.txt"]) == ["config.json", "merges.txt"]
    modules = ["1_Pooling/config.json", "2_Dense/model.safetensors"]
    assert small_files([*modules, "2_Dense/pytorch_model.bin", "onnx/model.safetensors"]) == modules
