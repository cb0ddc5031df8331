"""The prefix cache: full blocks found by a hash of all tokens up to their end."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from itertools import pairwise

import numpy as np

from mt_infer.engine.blocks import BlockPool
from mt_infer.engine.request import Request


def salt_of(*, version: int, adapter: int = 0, caller: str = "") -> bytes:
    """Return the start of a chain of keys.

    Args:
        version: Version of the weights.
        adapter: Unique number of the adapter; 0 for none.
        caller: Owner of the blocks; nobody else finds them.
    """
    return hashlib.sha256(repr((version, adapter, caller)).encode()).digest()


def extend_keys(request: Request, full: int, block_size: int) -> None:
    """Make the keys of a request's first `full` blocks.

    A key is the SHA-256 of the key before, the block's tokens, and the digests of the images that
    begin in it. The first key goes on from the salt and the encoder's tokens.
    """
    keys, known = request.keys, len(request.keys)
    if known >= full:
        return
    codes = np.asarray(
        request.tokens[known * block_size : full * block_size], dtype="<i8"
    ).tobytes()
    edges = range(0, len(codes) + 1, 8 * block_size)
    for block, (start, end) in enumerate(pairwise(edges), known):
        first, last = block * block_size, (block + 1) * block_size
        images = b"".join(each.digest for each in request.images if first <= each.start < last)
        before = keys[-1] if keys else _root(request)
        keys.append(hashlib.sha256(before + codes[start:end] + images).digest())


def _root(request: Request) -> bytes:
    source = np.asarray(request.source, dtype="<i8").tobytes()
    return hashlib.sha256(request.salt + b"source" + source).digest() if source else request.salt


class PrefixCache:
    """Full blocks of requests, found by later ones with the same beginning.

    Args:
        pool: The blocks.
        block_size: Number of tokens of a block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self._states: OrderedDict[bytes | int, int] | None = None

    @property
    def has_states(self) -> bool:
        """Whether a cached beginning needs states too; chunks of prompts then end at block ends."""
        return self._states is not None

    def add_states(self, rows: int) -> None:
        """Keep states of recurrent layers, which every cached beginning then needs.

        Args:
            rows: Number of rows; the least recently used one is taken for new states.
        """
        self._states = OrderedDict((row, row) for row in range(rows))  # all rows are unused

    def match(self, request: Request) -> list[int]:
        """Return the cached blocks of a request's beginning; its last token is always computed."""
        if not request.reads_cache:
            return []
        full = (len(request.tokens) - 1) // self._block_size
        extend_keys(request, full, self._block_size)
        found = []
        for key in request.keys[:full]:
            block = self._pool.find(key)
            if block is None:
                break
            found.append(block)
        if self._states is not None:
            while found and request.keys[len(found) - 1] not in self._states:
                found.pop()
        return found

    def states_of(self, request: Request) -> int | None:
        """Return the row with the states of a request's cached beginning, if it has one."""
        if self._states is None or not request.held:
            return None
        key = request.keys[request.held // self._block_size - 1]
        self._states.move_to_end(key)
        return self._states[key]

    def keep_states(self, request: Request) -> int | None:
        """Return a row for the states after a request's held tokens; None if not to be kept.

        States are useful at the end of a block that other requests may find, unless kept already.
        """
        full, rest = divmod(request.held, self._block_size)
        if self._states is None or rest or not full:
            return None
        extend_keys(request, full, self._block_size)
        key = request.keys[full - 1]
        if key in self._states:
            self._states.move_to_end(key)
            return None
        _, row = self._states.popitem(last=False)
        self._states[key] = row
        return row

    def note(self, request: Request, before: int) -> None:
        """Publish the blocks that a pass filled.

        Args:
            request: The request, after the pass.
            before: Number of tokens published before; full blocks after them are new.
        """
        size = self._block_size
        first, full = before // size, (request.held - request.unseen) // size
        if first >= full:
            return
        extend_keys(request, full, size)
        for place in range(first, full):
            block = self._pool.publish(request.table[place], request.keys[place])
            request.table[place] = block

    def match_memory(self, request: Request) -> list[int]:
        """Return the blocks of an encoder's output for the same source, if all are cached."""
        found = [self._pool.find(key) for key in self._memory_keys(request)]
        return [block for block in found if block is not None] if None not in found else []

    def note_memory(self, request: Request) -> None:
        """Publish the filled blocks of a request's memory."""
        keys = self._memory_keys(request)
        request.memory = [
            self._pool.publish(block, key) for block, key in zip(request.memory, keys, strict=True)
        ]

    def _memory_keys(self, request: Request) -> list[bytes]:
        if not request.source:
            return []
        root, blocks = _root(request), -(-len(request.source) // self._block_size)
        names = (b"memory" + block.to_bytes(8, "little") for block in range(blocks))
        return [hashlib.sha256(root + name).digest() for name in names]
