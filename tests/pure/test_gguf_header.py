"""Headers of GGUF files that lie: each ends with one sentence before the work that it asks for is done."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from engine.core.errors import ModelLoadError
from engine.files.gguf_header import GGUFHeader, read_beginning, read_header

SPARSE = 1 << 30  # bytes of a file without content, of which any length is a true one
TEXT, LIST, UINT32 = 8, 9, 4


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(*entries: bytes, num_tensors: int = 0, num_keys: int | None = None) -> bytes:
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, num_tensors, len(entries) if num_keys is None else num_keys)
        + b"".join(entries)
    )


def list_of(key: str, kind: int, count: int) -> bytes:
    return text(key) + struct.pack("<IIQ", LIST, kind, count)


def read(folder: Path, content: bytes) -> GGUFHeader:
    path = folder / "m.gguf"
    path.write_bytes(content)
    os.truncate(path, SPARSE)
    return read_header(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (header(num_tensors=1 << 20), "names 1048576 tensors; at most"),
        (header(num_keys=1 << 20), "names 1048576 keys; at most 4096"),
        (header(list_of("tokenizer.ggml.tokens", TEXT, 1 << 26)), "67108864 more items in tokenizer.ggml.tokens; at most"),
        (header(list_of("tokenizer.ggml.scores", UINT32, 1 << 26)), "more items in tokenizer.ggml.scores"),
        (header(list_of("llama.heads", UINT32, 1 << 20)), "1048576 items of llama.heads; at most 65536"),
        (header(text("a") + struct.pack("<IQ", TEXT, 1 << 29)), "536870912 bytes of a text; at most"),
        (header(struct.pack("<Q", 1 << 20)), "1048576 bytes of a text; at most 1024"),
        (header(text("t") + struct.pack("<I", 1 << 20), num_tensors=1, num_keys=0), "1048576 dimensions of a tensor"),
        (header(list_of("tokenizer.x", TEXT, 2) + text("a") + struct.pack("<Q", 1 << 29)), "more than 128 MiB"),
    ],
)  # fmt: skip
def test_a_length_that_lies_is_refused(content: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=why):
        read(tmp_path, content)
    assert read_beginning(content)[1] is None


def test_the_lists_of_a_tokenizer_are_bounded_together(tmp_path: Path) -> None:
    """Each is within the limit; the file has no content, so every text is empty."""
    half = list_of("tokenizer.a", 0, 1 << 21) + bytes(1 << 21)
    with pytest.raises(ModelLoadError, match=r"1 more items in tokenizer\.b; at most 0"):
        read(tmp_path, header(half, half, list_of("tokenizer.b", 0, 1)))


def test_values_are_bounded_together(tmp_path: Path) -> None:
    value = text("a") + struct.pack("<IQ", TEXT, 4 << 20) + bytes(4 << 20)
    with pytest.raises(ModelLoadError, match="its header has more than 128 MiB"):
        read(tmp_path, header(*[value] * 33))


def test_what_models_have_is_read(tmp_path: Path) -> None:
    tokens = list_of("tokenizer.ggml.tokens", TEXT, 3) + b"".join(map(text, "ab🦜"))
    found = read(tmp_path, header(tokens, list_of("llama.heads", UINT32, 2) + struct.pack("<II", 1, 2)))
    assert found.metadata == {"tokenizer.ggml.tokens": ["a", "b", "🦜"], "llama.heads": [1, 2]}
