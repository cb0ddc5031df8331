"""Causal self-attention with grouped key/value heads, split over the tensor-parallel group."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from mt_context_parallel import AttentionDropout, context_parallel_attention
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear, exchange_kv_groups
from torch import Tensor, nn

from mt_model.config import ModelConfig
from mt_model.dropout import DropoutSite
from mt_model.initialization import start_from
from mt_model.kinds import AttentionConfig
from mt_model.matmul_attention import HeadNorm, matmul_attention
from mt_model.norm import RMSNorm
from mt_model.placement import Pass, Placement
from mt_model.reference_attention import causal_mask
from mt_model.rotary import rotate

MATMUL_MAX_LENGTH = 512


def matmul_attention_obstacle(qkv: Tensor) -> str | None:
    """Why `matmul_attention` should not be used for these projections; None if it should.

    Shape:
        qkv: [B, S, G, Q + 2, D].
    """
    if qkv.device.type != "cpu":
        return f"on {qkv.device.type} the fused attention of torch is faster"
    if qkv.shape[1] > MATMUL_MAX_LENGTH:
        return f"{qkv.shape[1]} tokens: the scores of more than {MATMUL_MAX_LENGTH} are too large"
    return None


def steady_kernels(query: Tensor, *, cached: bool) -> AbstractContextManager[Any]:
    """The kernels of torch's attention that cost the same for a new number of keys as for an old.

    cuDNN makes a plan for every length, which takes tens of milliseconds, and the keys of a cache
    have another length at every token.
    """
    if not cached or query.device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


class Attention(nn.Module):
    """Fused query/key/value projection, optional norms and rotation, attention, projection back.

    Parameters: `qkv.weight` [kv_heads, q_per_kv + 2, head_dim, hidden], split over "tp" in its
    first dim: in a group the queries come first, then the key, then the value. With fewer kv_heads
    than ranks it is split in its third, and an all-to-all brings each rank's heads together
    (`exchange_kv_groups`). `out.weight` [hidden, num_heads, head_dim], split in its second. Norm
    weights [head_dim] are whole on each rank with partial gradients. Other collectives are those
    of the two linear layers.

    Args:
        config: sizes.
        model: width of input and output, eps of the query and key norms.
        layer: global index.
        placement: of this rank.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same.
    """

    def __init__(
        self,
        config: AttentionConfig,
        model: ModelConfig,
        *,
        layer: int,
        placement: Placement,
    ) -> None:
        super().__init__()
        hidden_size = model.hidden_size
        groups, queries = config.num_kv_heads, config.queries_per_group
        own_heads = config.num_heads // placement.tp
        self.num_kv_heads = max(1, groups // placement.tp)
        self.queries_per_group, self.head_dim = own_heads // self.num_kv_heads, config.head_dim
        self.num_heads, self.rope_theta = config.num_heads, config.rope_theta
        self.first_head = placement.tp_index * own_heads
        self.exchanges_heads = groups < placement.tp
        self.group = placement.group
        self.context, self.layer = placement.context, layer
        linear = placement.linear_arguments()
        self.qkv = ColumnParallelLinear(
            hidden_size,
            (groups, queries + 2, config.head_dim),
            shard_dim=2 if self.exchanges_heads else 0,
            bias=config.qkv_bias,
            **linear,
        )
        self.out = RowParallelLinear(
            (config.num_heads, config.head_dim), hidden_size, bias=config.out_bias, **linear
        )
        start_from(self.out.weight, "residual")
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            eps, dtype = model.norm.eps, placement.dtype
            self.q_norm = RMSNorm(config.head_dim, eps=eps, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, eps=eps, dtype=dtype)
            for norm in (self.q_norm, self.k_norm):
                placement.mark_replicated(norm, partial=True)
        self.dropout = DropoutSite.at(
            config.dropout, seed=placement.seed, layer=layer, name="scores"
        )

    def forward(self, x: Tensor, shared: Pass) -> Tensor:
        """Attend over the sequence."""
        qkv = self.qkv(x)
        if self.exchanges_heads:
            qkv = exchange_kv_groups(qkv, self.group)
        table = None
        if self.rope_theta is not None:
            table = shared.tables[self.head_dim, self.rope_theta]
        drops = shared.sample_ids is not None and self.dropout.probability > 0
        split = self.context.group is not None
        if shared.cache is None and not (drops or split) and matmul_attention_obstacle(qkv) is None:
            out = matmul_attention(qkv, table, self._norm())
        else:
            out = self._attend_by_head(qkv, table, shared)
        return self.out(out.unflatten(-1, (-1, self.head_dim)))

    def _norm(self) -> HeadNorm | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def _attend_by_head(self, qkv: Tensor, table: Tensor | None, shared: Pass) -> Tensor:
        query, key, value = qkv.split((self.queries_per_group, 1, 1), dim=3)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if table is not None:
            query, key = rotate(query, table), rotate(key, table)
        query, key, value = (t.flatten(2, 3) for t in (query, key, value))
        drops = shared.sample_ids is not None and self.dropout.probability > 0
        if drops or self.context.group is not None:
            return self._attend_by_tile(query, key, value, shared).flatten(2)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        if shared.cache is not None:
            key, value = shared.cache.append(self.layer, key, value, shared.start)
        with steady_kernels(query, cached=shared.cache is not None):
            out = self._softmax(query, key, value)
        return out.transpose(1, 2).flatten(2)

    def _attend_by_tile(self, query: Tensor, key: Tensor, value: Tensor, shared: Pass) -> Tensor:
        dropout = None
        if shared.sample_ids is not None and self.dropout.probability > 0:
            dropout = AttentionDropout(
                probability=self.dropout.probability,
                key=self.dropout.key,
                sample_ids=shared.sample_ids,
                heads=torch.arange(query.shape[2], device=query.device) + self.first_head,
                num_heads=self.num_heads,
            )
        return context_parallel_attention(
            query,
            key,
            value,
            group=self.context.attention_group(self.layer),
            algorithm=self.context.algorithms[self.layer],
            dropout=dropout,
        )

    def _softmax(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries, keys = query.shape[2], key.shape[2]
        is_causal = queries == keys and queries > 1
        mask = None if is_causal or queries == 1 else causal_mask(queries, keys, query.device)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=self.queries_per_group > 1,
        )
