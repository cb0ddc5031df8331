"""Blocks of the cache: their holders, and the idle blocks that the prefix cache keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Numbers of blocks, with reference counts and keys of their content.

    A block is free, held by one or more requests, or idle: nobody holds it, and the prefix cache
    still finds it by its key. A request holds the whole chain of blocks before each of its blocks,
    so a block's parent never becomes idle before it. Idle blocks are taken in the order in which
    they became idle, hence from the leaves.

    Args:
        size: Number of blocks.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"blocks={size}: use 1 or more")
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._references = [0] * size
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no request holds."""
        return len(self._free) + len(self._idle)

    @property
    def cached_blocks(self) -> int:
        """Number of blocks that the prefix cache finds."""
        return len(self._block_of)

    def is_idle(self, block: int) -> bool:
        """Return whether only the prefix cache holds a block."""
        return block in self._idle

    def take(self, count: int) -> list[int]:
        """Return new blocks for a request, from the free ones, then the longest idle ones.

        Raises:
            ValueError: There are fewer blocks; ask `free_blocks` first.
        """
        if count > self.free_blocks:
            raise ValueError(f"{count} blocks are more than the {self.free_blocks} free ones")
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._drop_key(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more holder of some blocks, which may be idle."""
        for block in blocks:
            self._idle.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take a request's blocks back, in the order of its table."""
        for block in reversed(blocks):  # the leaf first
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released, and nobody holds it")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def find(self, key: bytes) -> int | None:
        """Return the block with a key, or None."""
        return self._block_of.get(key)

    def publish(self, block: int, key: bytes) -> int:
        """Give a held block the key of its content, and return the block to hold for that key.

        If another block has the key, the request holds that block instead, and its own is free
        again.
        """
        known = self._block_of.get(key)
        if known is None:
            self._block_of[key], self._key_of[block] = block, key
            return block
        if known != block:
            self.share([known])
            self.release([block])
        return known

    def forget(self) -> None:
        """Forget all keys; idle blocks become free."""
        self._free.extend(self._idle)
        for table in (self._idle, self._key_of, self._block_of):
            table.clear()

    def references(self, block: int) -> int:
        """Return the number of requests that hold a block."""
        return self._references[block]

    def _drop_key(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
