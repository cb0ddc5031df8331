"""Self-attention with grouped key/value heads, split over the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from mt_context_parallel import Algorithm, AttentionDropout
from mt_fusions import RMS_NORM, ROPE, invariant_sigmoid
from mt_kernels import AUTO, Candidate, Choice, Selector
from mt_parallel_state import MatrixSpec, PartitionSpec, mark_matrix, shard_param
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear, exchange_kv_groups
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext
from mt_model.attend.distance import bias_by_distance
from mt_model.attend.kernels import attention_choice, attention_selectors
from mt_model.attend.pairs import Pairs
from mt_model.attention.group_norm import norm_over_group
from mt_model.attention.matmul_attention import (
    PROJECTED_ATTENTION,
    HeadNorm,
    matmul_attention,
    matmul_refusal,
)
from mt_model.attention.max_logit import max_logit
from mt_model.attention.score_table import ScoreTable
from mt_model.block.dropout import DropoutSite
from mt_model.block.initial import start_from
from mt_model.block.kv_rounding import rounded
from mt_model.block.norm import RMSNorm, build_rms_norm
from mt_model.block.recomputation import recomputed
from mt_model.block.shard_context import ShardContext
from mt_model.block.stream import StreamConfig
from mt_model.kernels.config import Kernels
from mt_model.kernels.onednn import OneDnnGemm
from mt_model.rope.rotary import RotaryTable

if TYPE_CHECKING:
    from mt_quant import KVFormat, SharedInput

    from mt_model.attention.config import AttentionConfig


def _norms(
    config: AttentionConfig, stream: StreamConfig, shard: ShardContext
) -> tuple[RMSNorm | None, RMSNorm | None]:
    """Norms with weights, of queries and of keys."""
    if config.qk_norm not in ("head", "whole"):
        return None, None
    heads = (config.num_heads, config.num_kv_heads) if config.qk_norm == "whole" else (1, 1)
    form = replace(stream.norm, weight=True)
    how = {"dtype": shard.dtype, "kernel": shard.kernels.norm}
    made = [build_rms_norm(form, n * config.head_dim, **how) for n in heads]
    for norm in made:
        shard.mark_replicated(norm, partial=True)
    return made[0], made[1]


def _fused(parts: tuple[int, ...]) -> MatrixSpec:
    names = ("gate", "query", "key", "value")[-len(parts) :]
    return MatrixSpec(part_dim=1, parts=parts, names=names)


def _selectors(kernels: Kernels) -> tuple[Selector[Any], Selector[Any], Selector[Any]]:
    """Return selectors of the rotation, of norms after it, and of attention from the projection."""
    named = "matmul" if kernels.attention == "matmul" else AUTO
    rope, norm = Selector(ROPE, kernels.rope), Selector(RMS_NORM, kernels.norm)
    return rope, norm, Selector(PROJECTED_ATTENTION, named)


class Attention(nn.Module):
    """Fused query/key/value projection, optional norms and rotation, attention, projection back.

    Parameters: `qkv.weight` [kv_heads, q_per_kv + 2, head_dim, hidden], split over "tp" in its
    first dim: a group has its queries first, then the key, then the value; an output gate has as
    many rows as the queries, in front of them. With fewer kv_heads
    than ranks it is split in its third, and an all-to-all brings each rank's heads together
    (`exchange_kv_groups`). `out.weight` [hidden, num_heads, head_dim], split in its second. Norm
    weights, [head_dim] or [num_heads * head_dim] and [kv_heads * head_dim], are whole on each rank
    with partial gradients, `sinks` [num_heads] and the heads of `score_table.weight` [buckets,
    num_heads] are split. Norms of whole projections all-reduce their sums of squares, forward and
    backward. Other collectives are those of the two linear layers, and of `ForwardContext.attend`.

    Args:
        config: Configuration of the attention.
        stream: The residual stream: width of input and output, form of the norms.
        layer: Layer index in the whole model.
        shard: This rank's share of the model.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same.
    """

    kv_format: KVFormat | None = None
    max_logits: Tensor | None

    def __init__(
        self,
        config: AttentionConfig,
        stream: StreamConfig,
        *,
        layer: int,
        shard: ShardContext,
    ) -> None:
        super().__init__()
        hidden_size = stream.hidden_size
        groups, queries = config.num_kv_heads, config.queries_per_group
        own_heads = config.num_heads // shard.tp
        self.num_kv_heads = max(1, groups // shard.tp)
        self.queries_per_group = own_heads // self.num_kv_heads
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.rotary = config.rotary
        self.first_head = shard.tp_index * own_heads
        self.exchanges_heads = groups < shard.tp
        self.group, self.again = shard.group, "attention" in shard.recomputed
        self.index, self.window, self.chunk = layer, config.window, config.chunk
        self.temperature = config.temperature
        self.algorithm: Algorithm = shard.context.algorithm_of(layer)
        self.softcap, self.scale, self.causal = config.softcap, config.scale, config.causal
        self.qk_norm, self.queries = config.qk_norm, queries
        self.output_gate, linear = config.output_gate, shard.linear_arguments()
        parts = (*(queries,) * (1 + config.output_gate), 1, 1)
        self.qkv = ColumnParallelLinear(
            hidden_size,
            (groups, sum(parts), config.head_dim),
            shard_dim=2 if self.exchanges_heads else 0,
            bias=config.qkv_bias,
            **linear,
        )
        mark_matrix(self.qkv.weight, _fused(parts))
        self.out = RowParallelLinear(
            (config.num_heads, config.head_dim), hidden_size, bias=config.out_bias, **linear
        )
        start_from(self.out.weight, "residual")
        self.q_norm, self.k_norm = _norms(config, stream, shard)
        self.eps, self.has_sinks = stream.norm.eps, config.sinks != "none"
        self.sinks: Tensor | None = None
        if config.sinks == "learned":
            empty = torch.empty(own_heads, dtype=shard.dtype, device="meta")
            spec = PartitionSpec() if shard.group is None else PartitionSpec("tp")
            sinks = self.sinks = shard_param(nn.Parameter(empty), spec)
            start_from(sinks, "zeros")
        self.score_bias, self.score_table = config.score_bias, None
        if config.own_buckets:
            self.score_table = ScoreTable(config.own_buckets, config.num_heads, shard=shard)
        self.total_kv_heads, self.tp_index = groups, shard.tp_index
        self.context, self.kernels = shard.context, shard.kernels
        self.rope, self.norm, self.projected = _selectors(shard.kernels)
        self.refusal, self.by_onednn = (
            matmul_refusal(config, shard.kernels),
            isinstance(shard.gemm, OneDnnGemm),
        )
        self.attending = attention_selectors(shard.kernels.attention)
        self.max_logits, self.can_clip = None, config.qk_norm == "none"
        self.dropout = DropoutSite(config.dropout, seed=shard.seed, layer=layer, name="scores")

    def forward(self, x: Tensor, shared: ForwardContext) -> Tensor:
        """Attend over the sequence."""
        qkv, gate = self.project(x)
        table = None if self.rotary is None else shared.tables[self.rotary]
        if self.max_logits is not None and self.training:
            self._watch(qkv, table, self.max_logits, shared)
        attend = partial(self._attend, table=table)
        out = recomputed(attend, qkv, shared=shared, when=self.again)
        if gate is not None:
            opened = invariant_sigmoid if self.kernels.is_invariant else torch.sigmoid
            out = out * opened(gate.flatten(2))
        return self.out(out.unflatten(-1, (-1, self.head_dim)))

    def _attend(self, qkv: Tensor, *, table: RotaryTable | None, shared: ForwardContext) -> Tensor:
        """Compute everything between the projections, except the gate."""
        if not shared.is_cached and self._projected(qkv, shared).name == "matmul":
            length = qkv.shape[1]
            is_near = self.window is not None and self.window < length
            documents = shared.documents_of(self.chunk, like=qkv, length=length)
            pairs = Pairs(self.causal, self.window if is_near else None, documents)
            bias = self.bias_by_distance(shared, length)
            how = {"scale": self.scale, "pairs": pairs, "bias": bias}
            how["onednn"] = self.by_onednn
            return matmul_attention(qkv, table, self._head_norm(), **how)
        query, key, value = self._heads(qkv, table, shared)
        if not shared.is_cached:
            key, value = (rounded(x, self.kv_format) for x in (key, value))
        return shared.attend(self, query, key, value, shared).flatten(2)

    def _projected(self, qkv: Tensor, shared: ForwardContext) -> Candidate[Any]:
        """Return the choice of attention from the projection on: matrix products, or by heads."""
        whole = shared.attend.is_whole
        drops = shared.sample_ids is not None and self.dropout.probability > 0
        rounds = self.kv_format is not None
        obstacles = self.refusal, whole, drops, rounds
        return self.projected.find(qkv, *obstacles, key=(qkv.shape[1], whole, drops, rounds))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the queries, keys and values of this rank's heads, and the logits of their gate.

        Norms of whole projections are applied, norms of heads not yet.

        Shape:
            Returns [B, S, G, Q + 2, D], and [B, S, G, Q, D] where there is an output gate.
        """
        rows = self.qkv(x)
        weights = self._norm_weights("whole")
        if weights is not None:
            rows = self._norm_whole(rows, *weights)
        if self.exchanges_heads:
            rows = exchange_kv_groups(self._by_rank(rows), self.group)
        if not self.output_gate:
            return rows, None
        gate, qkv = rows.split((self.queries_per_group, self.queries_per_group + 2), dim=3)
        return qkv, gate

    def _by_rank(self, rows: Tensor) -> Tensor:
        """Move each rank's gates before its queries, where ranks share a group."""
        if not self.output_gate:
            return rows
        heads, kv = rows.split((2 * self.queries, 2), dim=3)
        sharing = self.queries // self.queries_per_group
        heads = heads.unflatten(3, (2, sharing, -1)).transpose(3, 4).flatten(3, 5)
        return torch.cat((heads, kv), dim=3)

    def _norm_whole(self, rows: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
        """Norm all queries of a token together, and all its keys."""
        gates = rows.shape[3] - self.queries - 2
        gate, query, key, value = rows.split((gates, self.queries, 1, 1), dim=3)
        weights = self._own(query_weight, query), self._own(key_weight, key)
        normed = norm_over_group((query, key), weights, group=self.group, eps=self.eps)
        return torch.cat((gate, *normed, value), dim=3)

    def _own(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Cut this rank's part of a norm's weight, as the projection is cut."""
        whole = weight.view(self.total_kv_heads, -1, self.head_dim)
        dim = 2 if self.exchanges_heads else 0
        size = rows.shape[4] if self.exchanges_heads else rows.shape[2]
        return whole.narrow(dim, self.tp_index * size, size)

    def readers(self) -> tuple[nn.Module, ...]:
        """Return the linear layers that multiply the input."""
        return (self.qkv,)

    def shared_inputs(self) -> Iterator[SharedInput]:
        """Yield the input of the output projection, which averages values."""
        from mt_quant import SharedInput  # only quantisation needs it

        own = self.queries * (1 + self.output_gate) + 2
        rows = torch.arange(self.total_kv_heads * own * self.head_dim)
        values = rows.view(self.total_kv_heads, own, self.head_dim)[:, -1:]
        rows = values.expand(-1, self.queries, -1).flatten()
        yield SharedInput(layers=(self.out,), source=self.qkv, rows=rows)

    def sink_logits(self, query: Tensor) -> Tensor | None:
        """Return the sink logit of each query head of this rank; None without sinks.

        Shape:
            query: [B, S, N, D]. Returns [N].
        """
        if self.has_sinks and self.sinks is None:
            return query.new_zeros(query.shape[2])
        return self.sinks

    def weight_dropout(self, shared: ForwardContext) -> AttentionDropout | None:
        """Return the dropout of attention weights in a pass; None where nothing is dropped."""
        heads = {"first_head": self.first_head, "num_heads": self.num_heads}
        return self.dropout.of_weights(shared.sample_ids, **heads)

    def bias_by_distance(self, shared: ForwardContext, length: int) -> Tensor | None:
        """Return the bias of this rank's scores by distance; None for none.

        Shape:
            Returns [heads, 2 * length - 1]; see `mt_model.attend.distance.bias_by_distance`.
        """
        if self.score_bias is None:
            return None
        name = self.score_bias.shared_table
        weight = None if name is None else shared.score_tables[name]
        if self.score_table is not None:
            weight = self.score_table()
        return bias_by_distance(
            self.score_bias,
            weight,
            range(self.first_head, self.first_head + self.num_kv_heads * self.queries_per_group),
            num_heads=self.num_heads,
            length=length,
            device=self.out.weight.device,
        )

    def kernel_choices(self, like: Tensor) -> Iterator[Choice[Any]]:
        """Yield the kernels of attention and of the rotation."""
        yield attention_choice(self.kernels.attention)
        if self.rotary is not None:
            x = like.new_empty(0, 1, 1, 2)
            yield self.rope.choose(x, x, None)

    def watch_logits(self) -> None:
        """Keep the largest score of each key head in training, from here on, in `max_logits`.

        Shape:
            max_logits: [num_kv_heads] of the whole model, -inf for heads of other ranks.
        """
        weight = self.qkv.weight
        self.max_logits = torch.full(
            (self.total_kv_heads,),
            -torch.inf,
            dtype=torch.promote_types(weight.dtype, torch.float32),
            device=weight.device,
        )

    @torch.no_grad()
    def _watch(
        self, qkv: Tensor, table: RotaryTable | None, kept: Tensor, shared: ForwardContext
    ) -> None:
        query, key, _ = self._heads(qkv, table, shared)
        whole = qkv.shape[1] * self.context.size
        found = max_logit(
            query,
            key,
            context=self.context,
            scale=self.scale,
            window=self.window,
            causal=self.causal,
            documents=shared.documents_of(self.chunk, like=qkv, length=whole),
        )
        first = self.first_head // (self.num_heads // self.total_kv_heads)
        own = kept[first : first + self.num_kv_heads]
        own.copy_(torch.maximum(own, found))

    def logit_factors(self, query: Tensor, key: Tensor) -> dict[str, Tensor]:
        """Return factors of the weights that scale queries and keys.

        Args:
            query: Factors for the queries of each key head of the whole model.
            key: Factors for the keys.

        Returns:
            Factors by the parameter's name in this module.

        Shape:
            query, key: [num_kv_heads]. The results broadcast with the parameters.
        """
        if not self.exchanges_heads:
            own = slice(self.tp_index * self.num_kv_heads, (self.tp_index + 1) * self.num_kv_heads)
            query, key = query[own], key[own]
        ones = torch.ones_like(query)
        gates = [ones] * self.queries if self.output_gate else []
        parts = [*gates, *[query] * self.queries, key, ones]
        factor = torch.stack(parts, 1)[:, :, None]
        factors = {"qkv.weight": factor[..., None]}
        return factors if self.qkv.bias is None else {**factors, "qkv.bias": factor}

    def _norm_weights(self, kind: str) -> tuple[Tensor, Tensor] | None:
        if self.qk_norm != kind or self.q_norm is None or self.k_norm is None:
            return None
        query, key = (cast("Tensor", norm.factor()) for norm in (self.q_norm, self.k_norm))
        return query, key

    def _head_norm(self) -> HeadNorm | None:
        weights = self._norm_weights("head")
        return None if weights is None else HeadNorm(*weights, self.eps)

    def _heads(
        self, qkv: Tensor, table: RotaryTable | None, shared: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, normed and rotated, each [B, S, heads, D]."""
        query, key, value = qkv.split((self.queries_per_group, 1, 1), dim=3)
        if self.qk_norm == "head" and self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if table is not None:
            query, key = self.rope.find(query, key, *table).function(query, key, *table)
        if self.qk_norm == "l2":
            ones = query.new_ones(self.head_dim)
            norm = self.norm.find(query, ones).function
            query, key = norm(query, ones, self.eps), norm(key, ones, self.eps)
        if self.temperature is not None:
            factor = shared.temperatures[self.temperature][..., None, None, None]
            query = (query * factor).to(query.dtype)
        return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)
