"""Attention of a decoder's tokens to a memory, the output of an encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from mt_kernels import AUTO, Selector
from mt_parallel_state import MatrixSpec, all_gather, mark_matrix, random_uniform
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from mt_model.attend.cache import KVCache
from mt_model.attend.context import ForwardContext
from mt_model.attend.kernels import ATTENTION, attention
from mt_model.attend.scores import Scores
from mt_model.block.dropout import DropoutSite
from mt_model.block.initial import start_from
from mt_model.block.kv_rounding import rounded
from mt_model.block.shard_context import ShardContext

if TYPE_CHECKING:
    from mt_quant import KVFormat

    from mt_model.attention.cross_attention_config import CrossAttentionConfig


class CrossAttention(nn.Module):
    """Projections of tokens to queries and of the memory to keys and values, attention, and back.

    Parameters: `query.weight` [num_heads, head_dim, hidden], split over "tp" in its first dim;
    `key_value.weight` [kv_heads, 2, head_dim, memory_size], likewise, or in its third with fewer
    kv_heads than ranks, which then all-gather the keys and values (backward reduce-scatter);
    `out.weight` [hidden, num_heads, head_dim], split in its second. The other collectives are
    those of the linear layers. Every rank holds the whole memory and its whole gradient, except
    ranks that share sequences, each of which has a part of the gradient's sum.

    In generation the first pass of a cache makes keys and values, which the cache keeps.

    Args:
        config: Configuration of the attention.
        hidden_size: Width of input and output.
        layer: Layer index in the whole model.
        shard: This rank's share of the model.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same.
    """

    kv_format: KVFormat | None = None

    def __init__(
        self,
        config: CrossAttentionConfig,
        hidden_size: int,
        *,
        layer: int,
        shard: ShardContext,
    ) -> None:
        super().__init__()
        heads, groups, tp = config.num_heads, config.num_kv_heads, shard.tp
        self.index, self.scale, self.softcap = layer, config.scale, config.softcap
        self.num_heads, self.head_dim = heads, config.head_dim
        self.first_head, self.group = shard.tp_index * (heads // tp), shard.group
        self.gathers, self.own_group = groups < tp, shard.tp_index * groups // tp
        linear = shard.linear_arguments()
        memory_size = hidden_size if config.memory_size is None else config.memory_size
        self.query = ColumnParallelLinear(
            hidden_size, (heads, config.head_dim), bias=config.qkv_bias, **linear
        )
        self.key_value = ColumnParallelLinear(
            memory_size,
            (groups, 2, config.head_dim),
            shard_dim=2 if self.gathers else 0,
            bias=config.qkv_bias,
            **{**linear, "sequence_parallel": False},
        )
        mark_matrix(
            self.key_value.weight, MatrixSpec(part_dim=1, parts=(1, 1), names=("key", "value"))
        )
        self.out = RowParallelLinear(
            (heads, config.head_dim), hidden_size, bias=config.out_bias, **linear
        )
        start_from(self.out.weight, "residual")
        self.dropout = DropoutSite(config.dropout, seed=shard.seed, layer=layer, name="scores")
        kernel = "invariant" if shard.kernels.is_invariant else AUTO
        self.context, self.attending = shard.context, Selector(ATTENTION, kernel)

    def forward(self, x: Tensor, shared: ForwardContext) -> Tensor:
        """Attend to the memory; a token that sees none of it gets zeros before the projection."""
        query, found = self.query(x), None
        for part in shared.attend.recall(self.index, query):
            found = part.put(self._attend(*part[:4], kept=None), found)
        if found is None:
            key, value, seen = self._memory(shared)
            found = self._attend(query, key, value, seen, kept=self._kept(query, key, shared))
        return self.out(found)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, kept: Tensor | None
    ) -> Tensor:
        allowed = nothing = None
        if seen is not None:
            seen = seen[:, None] if seen.dim() == 2 else seen
            nothing = ~seen.any(-1, keepdim=True)
            allowed = (seen | nothing)[:, None]  # a softmax over nothing is not a number
        scores = Scores(
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            causal=False,
            allowed=allowed,
            softcap=self.softcap,
            kept=kept,
        )
        found = attention(query, key, value, scores, self.attending)
        return found if nothing is None else found.masked_fill(nothing[..., None], 0)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a memory, for this rank's heads.

        Shape:
            memory: [B, M, size]. Returns [B, M, G, D] twice.
        """
        weight = self.key_value.weight
        made = self.key_value(memory.to(weight.dtype) if weight.is_floating_point() else memory)
        if self.gathers:
            made = all_gather(made, self.group, dim=-1)[:, :, self.own_group : self.own_group + 1]
        key, value = made.unbind(3)
        return key, value

    def _memory(self, shared: ForwardContext) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and mask of the memory, from the cache if it has them."""
        cache = shared.cache
        if cache is not None and "key" in cache.layers[self.index] and cache.length:
            return self._kept_memory(cache)
        if shared.memory is None:
            raise ValueError(
                f"layer {self.index} attends to a memory, and the batch has none. Give "
                "batch['memory'] [B, M, size], what an encoder returned"
            )
        key, value = self.project_memory(shared.memory)
        mask = shared.memory_mask
        if cache is None:
            return rounded(key, self.kv_format), rounded(value, self.kv_format), mask
        cache.write(self.index, "key", key)
        cache.write(self.index, "value", value)
        if mask is not None:
            cache.layers[self.index]["mask"] = mask
        return self._kept_memory(cache)

    def _kept_memory(self, cache: KVCache) -> tuple[Tensor, Tensor, Tensor | None]:
        dtype = self.key_value.weight.dtype
        key, value = (cache.read(self.index, name, dtype) for name in ("key", "value"))
        return key, value, cache.layers[self.index].get("mask")

    def _kept(self, query: Tensor, key: Tensor, shared: ForwardContext) -> Tensor | None:
        """Return 0 for dropped weights, else 1 / (1 - p), as a function of global indices."""
        site, ids = self.dropout, shared.sample_ids
        if ids is None or not site.probability:
            return None
        whole, keys = query.shape[1] * self.context.size, key.shape[1]
        places = self.context.positions(whole, query.device)
        heads = torch.arange(query.shape[2], device=query.device) + self.first_head
        planes = ids.to(query.device)[:, None] * self.num_heads + heads
        pairs = places[:, None] * keys + torch.arange(keys, device=query.device)
        index = planes[..., None, None] * (whole * keys) + pairs
        kept = cast("Tensor", random_uniform(site.draws, index)) >= site.probability
        return kept.to(query.dtype) / (1 - site.probability)
