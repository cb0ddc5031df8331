"""Attention of this rank's queries to some keys, tile by tile, merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mt_context_parallel.kernels import TileGrads, TileKernel, TileKernels
from mt_context_parallel.splits import Segment
from mt_context_parallel.tiles import Tile, blocks_of, tiles_of


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join the attention over two disjoint sets of keys.

    Shape:
        out, other_out: [B, S, H, D]; lse, other_lse: [B, H, S]. Returns out and lse of the union.
    """
    total = torch.logaddexp(lse, other_lse)
    # Where both are -inf (no key seen), the weights are exp(-inf - 0) = 0, not NaN.
    finite = total.masked_fill(total == -torch.inf, 0.0)
    first, second = ((part - finite).exp_().transpose(1, 2)[..., None] for part in (lse, other_lse))
    return out * first + other_out * second, total


@dataclass
class Partial:
    """Output and log-sum-exp over the keys seen so far, in fp32 (fp64 for fp64 queries)."""

    q: Tensor
    v_dim: int
    out: Tensor | None = field(default=None, init=False)
    lse: Tensor | None = field(default=None, init=False)

    def add(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """Merge a tile's result into its rows."""
        if self.out is None and tile.q.length == self.q.shape[1]:
            self.out, self.lse = out, lse
            return
        whole, whole_lse = self.result()
        self.out = whole = whole.to(torch.promote_types(self.q.dtype, torch.float32))
        rows = tile.q_rows
        merged, total = merge(whole[:, rows], whole_lse[:, :, rows], out, lse)
        if tile.q.length == self.q.shape[1]:
            self.out, self.lse = merged, total
        else:
            whole[:, rows], whole_lse[:, :, rows] = merged, total

    def result(self) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp; 0 and -inf for queries that saw no key."""
        if self.out is None or self.lse is None:
            batch, length, heads, _ = self.q.shape
            dtype = torch.promote_types(self.q.dtype, torch.float32)
            self.out = self.q.new_zeros((batch, length, heads, self.v_dim), dtype=dtype)
            self.lse = self.out.new_full((batch, heads, length), -torch.inf)
        return self.out, self.lse


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalAttention:
    """This rank's part of the attention: its queries, the masks, and the kernels.

    It lives from forward to backward, and so do the tiles of each shard, which are found once.

    Attributes:
        whole: Masks, dropout and scale.
        q_runs: This rank's queries.
        shards: The keys, which arrive one shard at a time.
        kernels: The kernels to choose from.
    """

    whole: Tile
    q_runs: Sequence[Segment]
    shards: Sequence[Sequence[Segment]]
    kernels: TileKernels
    _found: dict[int, list[tuple[Tile, TileKernel]]] = field(default_factory=dict, init=False)

    def forward(self, into: Partial, q: Tensor, k: Tensor, v: Tensor, shard: int) -> None:
        """Add the attention to the keys of `shards[shard]`.

        Shape:
            q: [B, S, H, D]; k, v: [B, K, G, D] with the tokens of the shard.
        """
        for tile, kernel in self._work(q, k, v, shard):
            rows = q[:, tile.q_rows], k[:, tile.kv_rows], v[:, tile.kv_rows]
            into.add(tile, *kernel.forward(*rows, tile))

    def backward(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        shard: int,
        of_queries: tuple[Tensor, Tensor, Tensor, Tensor],
        into: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Add to dq and dbias, and return the gradients of keys and values in the dtype of dq.

        Args:
            qkv: Queries, and keys and values of the shard.
            shard: Index of the shard.
            of_queries: dout, out, lse and delta.
            into: dq, and dbias where the bias is trained.

        Shape:
            q, dout, out, dq: [B, S, H, D]; k, v: [B, K, G, D]; lse, delta: [B, H, S].
        """
        (q, k, v), (dq, dbias) = qkv, into
        dout, out, lse, delta = of_queries
        dkv: tuple[Tensor, Tensor] | None = None

        def zeros() -> tuple[Tensor, Tensor]:
            return torch.zeros_like(k, dtype=dq.dtype), torch.zeros_like(v, dtype=dq.dtype)

        for tile, kernel in self._work(q, k, v, shard):
            rows, keys = tile.q_rows, tile.kv_rows
            grads: TileGrads = kernel.backward(
                q[:, rows],
                k[:, keys],
                v[:, keys],
                tile,
                (dout[:, rows], out[:, rows], lse[:, :, rows], delta[:, :, rows]),
            )
            dq[:, rows] += grads.q
            if dbias is not None and grads.bias is not None:
                dbias += grads.bias
            if dkv is None and tile.kv.length == k.shape[1]:
                dkv = grads.k.to(dq.dtype), grads.v.to(dq.dtype)
                continue
            dkv = zeros() if dkv is None else dkv
            dkv[0][:, keys] += grads.k
            dkv[1][:, keys] += grads.v
        return zeros() if dkv is None else dkv

    def _work(self, q: Tensor, k: Tensor, v: Tensor, shard: int) -> list[tuple[Tile, TileKernel]]:
        if shard not in self._found:
            work = self._found[shard] = []
            for tile in tiles_of(self.whole, self.q_runs, self.shards[shard]):
                kernel = self.kernels.find(q, k, v, tile)
                work += [(part, kernel) for part in blocks_of(tile, kernel.block)]
        return self._found[shard]
