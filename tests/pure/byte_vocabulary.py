"""A small vocabulary for tests that follow grammars without a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_BYTES = 256


class ByteVocabulary:
    """One token a byte, beside special tokens, which a grammar may call for by name or by id."""

    bos_token_id = None

    def __init__(self, special_tokens: dict[str, int]) -> None:
        names = {token_id: name.encode() for name, token_id in special_tokens.items()}
        free = (token_id for token_id in itertools.count() if token_id not in names)
        self._ids = [next(free) for _ in range(NUM_BYTES)]
        self.eos_token_id = next(free)
        tokens = names | {self.eos_token_id: b"<end>"}
        self.special_token_ids = sorted(tokens)
        tokens |= {token_id: bytes([byte]) for byte, token_id in enumerate(self._ids)}
        self.tokens = [tokens.get(token_id, b"") for token_id in range(max(tokens) + 1)]

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text]


def byte_tokenizer_json(*special_tokens: str, marks: Sequence[str] = ()) -> str:
    """A tokenizer.json of one token a byte, in byte order, and the special tokens behind them, then others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(NUM_BYTES + i) for i, byte in enumerate(others)}
    backend = Tokenizer(models.BPE({letters[byte]: byte for byte in range(NUM_BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in special_tokens])
    backend.add_tokens([AddedToken(name, special=False) for name in marks])
    return backend.to_str()
