"""Multi-head latent attention: expanded in training, absorbed into the latents in generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from mt_context_parallel import Algorithm, AttentionDropout
from mt_fusions import ROPE
from mt_kernels import Choice, Selector
from mt_parallel_state import MatrixSpec, all_gather, copy_to_group, mark_matrix
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear, adapter_of
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext
from mt_model.attend.kernels import attention_choice, attention_selectors
from mt_model.block.dropout import DropoutSite
from mt_model.block.initial import start_from
from mt_model.block.kv_rounding import rounded
from mt_model.block.norm import build_rms_norm
from mt_model.block.shard_context import ShardContext
from mt_model.block.shared_input import behind_norm
from mt_model.block.stream import StreamConfig
from mt_model.kernels.gemm import by_rows

if TYPE_CHECKING:
    from mt_quant import KVFormat, SharedInput

    from mt_model.attention.mla_config import MLAConfig


class LatentAttention(nn.Module):
    """Narrow latents, norms on them, projections to heads, attention, projection back.

    Parameters: `query_down.weight` [q_lora_rank, hidden] and `query_norm.weight`, then
    `query.weight` [num_heads, nope + rope, q_lora_rank]; or `query.weight` [..., hidden] alone.
    `latent.weight` [kv_lora_rank + rope, hidden], `latent_norm.weight` [kv_lora_rank],
    `key_value.weight` [num_heads, nope + v, kv_lora_rank], `out.weight` [hidden, num_heads, v].
    Weights with a head dim are split over "tp" by heads; the others are whole on every rank, which
    applies them to all tokens or, under sequence parallelism, to its own, with partial gradients.
    The keys' turning part is then all-gathered (backward reduce-scatter), else its gradient is
    all-reduced.

    In generation the cache keeps the normed latent and the turned part. The projections to keys
    and values are applied to queries and outputs instead, so that one key head, the latent itself,
    serves all query heads: the same numbers, without keys and values of every token. With invariant
    kernels every pass has this form.

    Args:
        config: Configuration of the attention.
        stream: The residual stream: width of input and output, form of the norms.
        layer: Layer index in the whole model.
        shard: This rank's share of the model.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same.
    """

    kv_format: KVFormat | None = None

    def __init__(
        self, config: MLAConfig, stream: StreamConfig, *, layer: int, shard: ShardContext
    ) -> None:
        super().__init__()
        hidden, heads = stream.hidden_size, config.num_heads
        self.index, self.window, self.rotary = layer, config.window, config.rotary
        self.causal = True
        self.algorithm: Algorithm = shard.context.algorithm_of(layer)
        self.softcap: float | None = None
        self.chunk: int | None = None
        self.scale: float | None = config.scale
        if config.scale is None:
            self.scale = config.head_dim**-0.5
        self.widths = config.nope_head_dim, config.rope_head_dim
        self.rank, self.v_head_dim = config.kv_lora_rank, config.v_head_dim
        self.num_heads, self.first_head = heads, shard.tp_index * (heads // shard.tp)
        self.group, self.sequence_parallel = shard.group, shard.sequence_parallel
        self.kernels, self.rope = shard.kernels, Selector(ROPE, shard.kernels.rope)
        self.attending = attention_selectors(shard.kernels.attention)
        linear = shard.linear_arguments()
        eps = stream.norm.eps if config.norm_eps is None else config.norm_eps
        norm = replace(stream.norm, weight=True, eps=eps)

        def down(size: int) -> nn.Linear:
            where = {"device": "meta", "dtype": shard.dtype}
            made = nn.Linear(hidden, size, bias=config.down_bias, **where)
            shard.mark_replicated(made, partial=shard.sequence_parallel)
            mark_matrix(cast("nn.Parameter", made.weight), MatrixSpec())
            return made

        def normed(size: int) -> nn.Module:
            how = {"dtype": shard.dtype, "kernel": shard.kernels.norm}
            made = build_rms_norm(norm, size, **how)
            shard.mark_replicated(made, partial=shard.sequence_parallel)
            return made

        self.query_down = self.query_norm = None
        if config.q_lora_rank is not None:
            self.query_down, self.query_norm = down(config.q_lora_rank), normed(config.q_lora_rank)
        self.query = ColumnParallelLinear(
            hidden if config.q_lora_rank is None else config.q_lora_rank,
            (heads, config.head_dim),
            bias=False,
            **linear,
        )
        self.latent = down(config.kv_lora_rank + config.rope_head_dim)
        self.latent_norm = normed(config.kv_lora_rank)
        self.key_value = ColumnParallelLinear(
            config.kv_lora_rank,
            (heads, config.nope_head_dim + config.v_head_dim),
            bias=False,
            **linear,
        )
        self.out = RowParallelLinear(
            (heads, config.v_head_dim), hidden, bias=config.out_bias, **linear
        )
        start_from(self.out.weight, "residual")
        self.dropout = DropoutSite(config.dropout, seed=shard.seed, layer=layer, name="scores")

    def readers(self) -> tuple[nn.Module, ...]:
        """Return the linear layers that multiply the input."""
        return (self.query if self.query_down is None else self.query_down, self.latent)

    def shared_inputs(self) -> Iterator[SharedInput]:
        """Yield the latents behind their norms."""
        if self.query_norm is not None:
            yield from behind_norm(self.query_norm, self.query)
        yield from behind_norm(self.latent_norm, self.key_value)

    def forward(self, x: Tensor, shared: ForwardContext) -> Tensor:
        """Attend over the sequence."""
        low = x
        if self.query_down is not None and self.query_norm is not None:
            low = self.query_norm(self._product(self.query_down, x))
        query, turning = self.query(low).split(self.widths, dim=-1)
        both = self._product(self.latent, x)
        latent, turned = both.split((self.rank, self.widths[1]), dim=-1)
        latent, turned = self.latent_norm(latent), self._whole(turned)[:, :, None]
        if self.rotary is not None:
            table = shared.tables[self.rotary]
            pair = turning, turned
            turning, turned = self.rope.find(*pair, *table).function(*pair, *table)
        latent = latent[:, :, None]
        if not shared.is_cached:
            latent, turned = (rounded(part, self.kv_format) for part in (latent, turned))
        if shared.is_cached or self.kernels.is_invariant:
            mixed = self._absorbed(query, turning, latent, turned, shared)
        else:
            key, value = self.key_value(latent[:, :, 0]).split(
                (self.widths[0], self.v_head_dim), dim=-1
            )
            key = torch.cat((key, turned.expand(-1, -1, key.shape[2], -1)), dim=-1)
            query = torch.cat((query, turning), dim=-1)
            mixed = shared.attend(self, query, key, value, shared)
        return self.out(mixed)

    def _whole(self, turned: Tensor) -> Tensor:
        """Return the keys' turning part of all tokens, for this rank's heads."""
        if self.sequence_parallel:
            return all_gather(turned, self.group, dim=1)
        return copy_to_group(turned, self.group)

    def _absorbed(
        self, query: Tensor, turning: Tensor, latent: Tensor, turned: Tensor, shared: ForwardContext
    ) -> Tensor:
        """Attend to latents: q (W_k c) = (q W_k) c, and W_v (p c)."""
        to_key, to_value = self._by_head().split((self.widths[0], self.v_head_dim), dim=1)
        query = self._product(lambda x: torch.einsum("bsnd,ndr->bsnr", x, to_key), query)
        query = torch.cat((query, turning), dim=-1)
        mixed = shared.attend.latents(self, query, latent, turned, shared)
        return self._product(lambda x: torch.einsum("bsnr,nvr->bsnv", x, to_value), mixed)

    def _product(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a product to tokens; if the kernels are invariant, their number changes no bits."""
        return by_rows(product, x) if self.kernels.is_invariant else product(x)

    def _by_head(self) -> Tensor:
        """Return the weight of `key_value`; of codes or with an adapter, from its output."""
        weight = self.key_value.weight
        if adapter_of(self.key_value) is None and weight.is_floating_point():
            return weight
        unit = torch.eye(
            self.rank, dtype=self.latent.weight.dtype, device=self.latent.weight.device
        )
        return self.key_value(unit[None])[0].permute(1, 2, 0)

    def kernel_choices(self, like: Tensor) -> Iterator[Choice[Any]]:
        """Yield the kernels of attention and of the rotation."""
        yield attention_choice(self.kernels.attention)
        if self.rotary is not None:
            x = like.new_empty(0, 1, 1, 2)
            yield self.rope.choose(x, x, None)

    def sink_logits(self, query: Tensor) -> None:
        """Return None: there are no sinks."""
        del query

    def bias_by_distance(self, shared: ForwardContext, length: int) -> None:
        """Return None: scores have no bias."""
        del shared, length

    def weight_dropout(self, shared: ForwardContext) -> AttentionDropout | None:
        """Return the dropout of attention weights in a pass; None where nothing is dropped."""
        heads = {"first_head": self.first_head, "num_heads": self.num_heads}
        return self.dropout.of_weights(shared.sample_ids, **heads)
