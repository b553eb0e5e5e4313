"""The KV blocks of one engine: which are free, and how many sequences hold each of the others."""

from __future__ import annotations

BLOCK = 32  # tokens per KV block; the native attention kernels read blocks of this size


def blocks_for(tokens: int) -> int:
    """Blocks that hold the KV of ``tokens`` tokens."""
    return -(-tokens // BLOCK)


class BlockPool:
    """Reference counts and the free list. A block without users is free, or idle in the prefix cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks  # by block: sequences that hold it
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is used first
