"""Causal self-attention with grouped key/value heads, split over the tensor-parallel group."""

from __future__ import annotations

import torch
from mt_context_parallel import AttentionDropout
from mt_parallel_state import MatrixSpec, PartitionSpec, mark_matrix, shard_param
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear, exchange_kv_groups
from torch import Tensor, nn

from mt_model.attend import Pass
from mt_model.config import ModelConfig
from mt_model.distance import bias_by_distance
from mt_model.dropout import DropoutSite
from mt_model.initialization import start_from
from mt_model.kinds import AttentionConfig
from mt_model.matmul_attention import HeadNorm, matmul_attention
from mt_model.max_logit import max_logit
from mt_model.norm import RMSNorm
from mt_model.placement import Placement
from mt_model.rotary import RotaryTable, rotate
from mt_model.score_table import ScoreTable

MATMUL_MAX_LENGTH = 512


def matmul_attention_obstacle(layer: Attention, qkv: Tensor, shared: Pass) -> str | None:
    """Why `matmul_attention` should not be used for these projections; None if it should.

    Shape:
        qkv: [B, S, G, Q + 2, D].
    """
    if qkv.device.type != "cpu":
        return f"on {qkv.device.type} the fused attention of torch is faster"
    if qkv.shape[1] > MATMUL_MAX_LENGTH:
        return f"{qkv.shape[1]} tokens: the scores of more than {MATMUL_MAX_LENGTH} are too large"
    if not shared.attend.is_whole:
        return "the keys are not those of the same tokens"
    if layer.weight_dropout(shared) is not None:
        return "dropout of attention weights"
    if layer.sinks is not None or layer.softcap is not None:
        return "sinks or a soft cap of the scores"
    if layer.score_bias is not None:
        return "a bias of the scores"
    return None


class Attention(nn.Module):
    """Fused query/key/value projection, optional norms and rotation, attention, projection back.

    Parameters: `qkv.weight` [kv_heads, q_per_kv + 2, head_dim, hidden], split over "tp" in its
    first dim: in a group the queries come first, then the key, then the value. With fewer kv_heads
    than ranks it is split in its third, and an all-to-all brings each rank's heads together
    (`exchange_kv_groups`). `out.weight` [hidden, num_heads, head_dim], split in its second. Norm
    weights [head_dim] are whole on each rank with partial gradients, `sinks` [num_heads] and the
    heads of `score_table.weight` [buckets, num_heads] are split.
    Other collectives are those of the two linear layers, and of `Pass.attend`.

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
        self.queries_per_group = own_heads // self.num_kv_heads
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.rotary = config.rotary
        self.first_head = placement.tp_index * own_heads
        self.exchanges_heads = groups < placement.tp
        self.group = placement.group
        self.index, self.window = layer, config.window
        self.softcap, self.scale = config.softcap, config.scale
        linear = placement.linear_arguments()
        self.qkv = ColumnParallelLinear(
            hidden_size,
            (groups, queries + 2, config.head_dim),
            shard_dim=2 if self.exchanges_heads else 0,
            bias=config.qkv_bias,
            **linear,
        )
        mark_matrix(self.qkv.weight, MatrixSpec(part_dim=1, parts=(queries, 1, 1)))
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
        self.sinks: Tensor | None = None
        if config.sinks:
            empty = torch.empty(own_heads, dtype=placement.dtype, device="meta")
            spec = PartitionSpec() if placement.group is None else PartitionSpec("tp")
            sinks = self.sinks = shard_param(nn.Parameter(empty), spec)
            start_from(sinks, "zeros")
        self.score_bias, self.score_table = config.score_bias, None
        if config.own_buckets:
            self.score_table = ScoreTable(config.own_buckets, config.num_heads, placement=placement)
        self.total_kv_heads, self.tp_index = groups, placement.tp_index
        self.context = placement.context
        self.max_logits: Tensor | None = None
        self.can_clip = not config.qk_norm
        self.dropout = DropoutSite(config.dropout, seed=placement.seed, layer=layer, name="scores")

    def forward(self, x: Tensor, shared: Pass) -> Tensor:
        """Attend over the sequence."""
        qkv = self.qkv(x)
        if self.exchanges_heads:
            qkv = exchange_kv_groups(qkv, self.group)
        table = None if self.rotary is None else shared.tables[self.rotary]
        if self.max_logits is not None and self.training:
            self._watch(qkv, table, self.max_logits, shared)
        if matmul_attention_obstacle(self, qkv, shared) is None:
            allowed = shared.mask(self.window, qkv.shape[1])
            out = matmul_attention(qkv, table, self._norm(), scale=self.scale, allowed=allowed)
        else:
            query, key, value = self._heads(qkv, table)
            out = shared.attend(self, query, key, value, shared).flatten(2)
        return self.out(out.unflatten(-1, (-1, self.head_dim)))

    def weight_dropout(self, shared: Pass) -> AttentionDropout | None:
        """Make the dropout of attention weights in a pass; None where nothing is dropped."""
        if shared.sample_ids is None or not self.dropout.probability:
            return None
        return AttentionDropout(
            probability=self.dropout.probability,
            key=self.dropout.key,
            sample_ids=shared.sample_ids,
            first_head=self.first_head,
            num_heads=self.num_heads,
        )

    def bias_by_distance(self, shared: Pass, length: int) -> Tensor | None:
        """Return what is added to the scores of this rank's heads, by distance; None for nothing.

        Shape:
            Returns [heads, 2 * length - 1]; see `mt_model.distance.bias_by_distance`.
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
    def _watch(self, qkv: Tensor, table: RotaryTable | None, kept: Tensor, shared: Pass) -> None:
        query, key, _ = self._heads(qkv, table)
        found = max_logit(
            query,
            key,
            context=self.context,
            scale=self.scale,
            window=self.window,
            documents=shared.documents,
        )
        first = self.first_head // (self.num_heads // self.total_kv_heads)
        own = kept[first : first + self.num_kv_heads]
        own.copy_(torch.maximum(own, found))

    def logit_factors(self, query: Tensor, key: Tensor) -> dict[str, Tensor]:
        """Return what multiplies the weights so that queries and keys are scaled.

        Args:
            query: For the queries of each key head of the whole model.
            key: For its key.

        Returns:
            By the parameter's name in this module, to be multiplied with it.

        Shape:
            query, key: [num_kv_heads]. The results broadcast with the parameters.
        """
        if not self.exchanges_heads:
            own = slice(self.tp_index * self.num_kv_heads, (self.tp_index + 1) * self.num_kv_heads)
            query, key = query[own], key[own]
        ones = torch.ones_like(query)
        parts = [query] * (self.num_heads // self.total_kv_heads) + [key, ones]
        factor = torch.stack(parts, 1)[:, :, None]
        factors = {"qkv.weight": factor[..., None]}
        return factors if self.qkv.bias is None else {**factors, "qkv.bias": factor}

    def _norm(self) -> HeadNorm | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def _heads(self, qkv: Tensor, table: RotaryTable | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normed and rotated, each [B, S, heads, D]."""
        query, key, value = qkv.split((self.queries_per_group, 1, 1), dim=3)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if table is not None:
            query, key = rotate(query, table), rotate(key, table)
        return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)
