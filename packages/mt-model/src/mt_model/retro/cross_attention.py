"""Attention between chunks of a text and their neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from mt_parallel_state import gather_from_group, scatter_to_group
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext
from mt_model.attention.cross_attention import CrossAttention
from mt_model.block.initial import start_from
from mt_model.block.shard_context import ShardContext

if TYPE_CHECKING:
    from mt_model.attention.cross_attention_config import CrossAttentionConfig

NEIGHBOURS = "neighbours"
"""Name of the keys and values of neighbours in a cache."""


class ChunkedCrossAttention(CrossAttention):
    """Attention of tokens to the neighbours of the last chunk that ended at or before them.

    The output projection starts at zero, so that a new one changes no score. In generation the
    cache keeps the keys and values of the last finished chunk's neighbours.

    Args:
        config: Configuration of the attention.
        hidden_size: Width of input and output.
        chunk: Number of tokens of a chunk (m).
        layer: Layer index in the whole model.
        shard: This rank's share of the model.

    Shape:
        forward(x): [B, S, hidden] -> the same; the context's memory is [B * L, K, hidden] and its
        mask [B * L, m, K] for L finished chunks. With a cache the mask is [B * (L + 1), m, K]: the
        first chunk is the last one that passes before have finished. Where ranks share sequences,
        so is the memory of each of the two parts of a row: the first chunk is the last one before.
    """

    def __init__(
        self,
        config: CrossAttentionConfig,
        hidden_size: int,
        *,
        chunk: int,
        layer: int,
        shard: ShardContext,
    ) -> None:
        whole = replace(shard, sequence_parallel=False)
        super().__init__(config, hidden_size, layer=layer, shard=whole)
        self.chunk, self.is_split = chunk, shard.sequence_parallel
        start_from(self.out.weight, "zeros")

    def forward(self, x: Tensor, shared: ForwardContext) -> Tensor:
        """Attend to the neighbours; tokens before the end of the first chunk get zeros.

        Under sequence parallelism the group gathers the tokens (backward keeps the own ones).
        """
        if not self.is_split:
            return self._attend_within(x, shared)
        whole = gather_from_group(x, self.group, dim=1)
        return scatter_to_group(self._attend_within(whole, shared), self.group, dim=1)

    def _attend_within(self, x: Tensor, shared: ForwardContext) -> Tensor:
        size, length, cp = self.chunk, x.shape[1], self.context.size
        if shared.cache is not None:
            held = shared.cache.length
            chunks = (held + length) // size - held // size + 1
            return self._by_chunks(x, shared, front=held % size + 1, chunks=chunks)
        if cp > 1:
            parts = x.reshape(2 * x.shape[0], length // 2, x.shape[2])
            chunks = parts.shape[1] // size + 1
            return self._by_chunks(parts, shared, front=1, chunks=chunks).reshape(x.shape)
        found = self._by_chunks(x[:, size - 1 :], shared, front=0, chunks=length // size)
        return nn.functional.pad(found, (0, 0, size - 1, 0))

    def _by_chunks(self, x: Tensor, shared: ForwardContext, *, front: int, chunks: int) -> Tensor:
        """Attend by chunks; the tokens begin `front` places into the first of `chunks` chunks."""
        (rows, length, hidden), size = x.shape, self.chunk
        moved = nn.functional.pad(x, (0, 0, front, chunks * size - front - length))
        found = super().forward(moved.reshape(rows * chunks, size, hidden), shared)
        return found.reshape(rows, chunks * size, hidden)[:, front : front + length]

    def _memory(self, shared: ForwardContext) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and mask of the neighbours, in front those that the cache keeps."""
        if shared.cache is None:
            return super()._memory(shared)
        memory, seen = cast("Tensor", shared.memory), cast("Tensor", shared.memory_mask)
        made = torch.stack(self.project_memory(memory))
        rows = seen.shape[0] - memory.shape[0]  # each row has one chunk more than is finished
        made = made.view(2, rows, -1, *made.shape[2:])
        held = shared.cache.layers[self.index]
        kept = held.get(NEIGHBOURS)
        if kept is None:
            kept = made.new_zeros(2, rows, *made.shape[3:])
        made = torch.cat((kept[:, :, None], made), 2)
        held[NEIGHBOURS] = made[:, :, -1].clone()
        key, value = made.flatten(1, 2)
        return key, value, seen


class NeighbourCrossAttention(CrossAttention):
    """Attention of a chunk's neighbours to the chunk's hidden states.

    Shape:
        forward(x): [C * k, r, hidden] -> the same; the context's memory is [C, m, hidden].
    """

    def forward(self, x: Tensor, shared: ForwardContext) -> Tensor:
        """Attend to the chunk."""
        chunks = cast("Tensor", shared.memory)
        joined = x.reshape(chunks.shape[0], -1, x.shape[2])
        return super().forward(joined, shared).view_as(x)


def chunk_masks(
    lengths: Tensor, documents: Tensor | None, *, chunk: int, size: int
) -> tuple[Tensor, Tensor | None]:
    """Return which neighbours' tokens each token sees, and which tokens share a chunk's document.

    Args:
        lengths: Number of tokens of each neighbour of the chunks; 0 for a missing one.
        documents: Ids of packed documents of the tokens of the chunks, and of the `chunk - 1`
            tokens after them; None for one document. A chunk belongs to its last token's document.
        chunk: Number of tokens of a chunk (m).
        size: Number of tokens of a neighbour, with padding (r).

    Shape:
        lengths: [N, L, k]; documents: [N, L * m + m - 1]. Returns [N * L, m, k * r], and
        [N * L, m] or None.
    """
    there = torch.arange(size, device=lengths.device) < lengths[..., None]
    rows, chunks = lengths.shape[:2]
    there = there.reshape(rows * chunks, 1, -1)
    if documents is None:
        return there.expand(-1, chunk, -1), None
    own = documents[:, : chunks * chunk].reshape(rows * chunks, chunk)
    last = own[:, -1:]
    reads = documents[:, chunk - 1 :].reshape(rows * chunks, chunk) == last
    return there & reads[..., None], own == last
