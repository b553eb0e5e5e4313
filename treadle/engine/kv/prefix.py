"""Prefix cache: full KV blocks, found by content, shared without copies, kept until their memory is needed.

A full block is named by a hash over the name of the block before it and its own 32 token ids, so that equal
names mean equal prompts from the first token on. The chain starts from the request's ``cache_salt``.

Least recently used leaves go first, without a tree: a sequence releases its blocks last one first, and holds
every block before the ones it holds. So a block always becomes idle before the block it follows, and the
front of the idle list is always a leaf.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from hashlib import blake2b

from treadle.engine.kv.pool import BlockPool

_DIGEST = 16  # bytes; at 128 bits, chance collisions do not happen


def root_hash(salt: str) -> bytes:
    """The name that precedes the first block of every prompt with this ``cache_salt``."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST).digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """The name of the block with these token ids (int32, as bytes) after the block named ``parent``."""
    return blake2b(parent + tokens, digest_size=_DIGEST).digest()


class PrefixCache:
    """Hands out the blocks of a pool and remembers the content of full ones."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block: dict[bytes, int] = {}  # by name
        self._name: list[bytes | None] = [None] * pool.num_blocks  # by block
        self._parent: list[bytes] = [b""] * pool.num_blocks  # by block; meaningful for named ones
        self._idle: OrderedDict[int, None] = OrderedDict()  # named blocks that nobody holds, oldest first

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` can still give."""
        return len(self._pool.free) + len(self._idle)

    @property
    def held(self) -> int:
        """Blocks that sequences hold."""
        return self._pool.num_blocks - self.available

    @property
    def idle(self) -> int:
        """Blocks whose content is kept although no sequence holds them."""
        return len(self._idle)

    def match(self, names: Items[bytes], limit: int) -> list[int]:
        """The cached blocks of the longest known prefix of ``names[:limit]``. They are not held yet."""
        blocks = []
        for name in names[:limit]:
            block = self._block.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody holds."""
        return sum(not self._pool.refs[block] for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one user to each of these matched blocks."""
        for block in blocks:
            if not self._pool.refs[block]:
                del self._idle[block]
            self._pool.refs[block] += 1

    def allocate(self) -> int:
        """A block with one user and no content; forgets the oldest idle leaf if it must. Needs ``available
        > 0``.
        """
        if self._pool.free:
            block = self._pool.free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            name = self._name[block]
            assert name is not None
            del self._block[name]
            self._name[block] = None
        self._pool.refs[block] = 1
        return block

    def register(self, name: bytes, parent: bytes, block: int) -> int:
        """Name a full block that the caller holds. Returns the block to use from now on: an older one of
        equal content if there is one, held in place of ``block``, which is given back.
        """
        known = self._block.setdefault(name, block)
        if known == block:
            self._name[block] = name
            self._parent[block] = parent
        else:
            self.hold((known,))
            self.release((block,))
        return known

    def release(self, blocks: Items[int]) -> None:
        """Take one user from each block of a sequence, given first to last."""
        refs = self._pool.refs
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block]:
                continue
            if self._name[block] is None:
                self._pool.free.append(block)
            else:
                self._idle[block] = None

    def check(self, held: Iterable[Items[int]]) -> None:
        """Raise AssertionError unless counts, free list and names add up. ``held``: the blocks of every
        sequence.
        """
        pool = self._pool
        users = Counter(block for blocks in held for block in blocks)
        wrong = [b for b in range(pool.num_blocks) if pool.refs[b] != users[b]]
        assert not wrong, f"KV blocks whose count differs from their users: {wrong[:8]}"
        unused = {b for b in range(pool.num_blocks) if not pool.refs[b]}
        assert len(pool.free) == len(set(pool.free)), "a KV block is twice in the free list"
        assert set(pool.free).isdisjoint(self._idle), "a KV block is both free and idle"
        assert unused == {*pool.free, *self._idle}, "a KV block is lost, or free while in use"
        named = {block: name for block, name in enumerate(self._name) if name is not None}
        assert {name: block for block, name in named.items()} == self._block, "names and KV blocks differ"
        assert all(block in named for block in self._idle), "an idle KV block has no name"
        idle_position = {block: i for i, block in enumerate(self._idle)}
        for block in named:
            parent = self._block.get(self._parent[block])
            if parent is None:
                continue  # the first block of a prompt
            assert pool.refs[parent] >= pool.refs[block], (
                f"KV block {block} is held without the one before it"
            )
            if parent in idle_position:
                assert idle_position[block] < idle_position[parent], (
                    f"KV block {parent} would go before its leaf"
                )
