"""GGUF's types of tensors, as ggml numbers them. The `gguf` package does not have all of them, and takes a while to import."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """Each type that is read: its number, and the weights and the bytes of a block, in a file and packed if that differs."""

    block: int
    num_bytes: int
    packed: int

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    BF16 = 30, 1, 2
    Q8_0 = 8, 32, 34
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q2_K = 10, 256, 84, 128
    Q3_K = 11, 256, 110, 128
    Q4_K = 12, 256, 144, 148
    Q5_K = 13, 256, 176, 180
    Q6_K = 14, 256, 210, 224
    IQ4_NL = 20, 32, 18
    IQ4_XS = 23, 256, 136, 144
    IQ3_XXS = 18, 256, 98, 144
    IQ3_S = 21, 256, 110, 144
    IQ2_XXS = 16, 256, 66, 114
    IQ2_XS = 17, 256, 74, 114
    IQ2_S = 22, 256, 82, 114
    IQ1_S = 19, 256, 50, 84
    IQ1_M = 29, 256, 56, 114
    TQ1_0 = 34, 256, 54, 80
    TQ2_0 = 35, 256, 66, 80
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36, 40
    Q1_0 = 41, 128, 18, 24
    Q2_0 = 42, 64, 18, 20

    # A lookup gives the number alone.
    def __new__(cls, number: int, block: int = 0, num_bytes: int = 0, packed: int = 0) -> Kind:  # noqa: PYI034 - no Self in 3.10
        """Return the member that is a number."""
        member = int.__new__(cls, number)
        member._value_, member.block, member.num_bytes, member.packed = number, block, num_bytes, packed or num_bytes
        return member
