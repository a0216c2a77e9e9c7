"""One sequence's map from logical to physical blocks. Integers only; engine thread."""

from __future__ import annotations


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` positions occupy."""
    return -(-num_tokens // block_size)


class PageTable:
    """`blocks[i]` is the physical block of positions i * block_size .. (i + 1) * block_size - 1."""

    __slots__ = ("block_size", "blocks")

    def __init__(self, block_size: int, blocks: list[int] | None = None) -> None:
        self.block_size = block_size
        self.blocks = blocks if blocks is not None else []

    def position_to_block(self, position: int) -> tuple[int, int]:
        """The physical block and the offset in it where a position's K and V live. IndexError beyond the table."""
        logical, offset = divmod(position, self.block_size)
        return self.blocks[logical], offset

    @property
    def capacity(self) -> int:
        """Positions that the table can address. The next token after these needs a new block."""
        return len(self.blocks) * self.block_size
