"""The feed-forward of a layer, split over the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import mt_fusions
import torch
from mt_kernels import Choice, Selector
from mt_parallel_state import MatrixSpec, mark_matrix
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext
from mt_model.block.dropout import DropoutSite, hidden_index
from mt_model.block.initial import start_from
from mt_model.block.recomputation import discard_between
from mt_model.block.shard_context import ShardContext
from mt_model.block.stream import StreamConfig
from mt_model.kernels.activation import PlainActivation

if TYPE_CHECKING:
    from mt_quant import SharedInput

    from mt_model.feed_forward.mlp_config import MLPConfig


class MLP(nn.Module):
    """Plain `down(act(up x))`, or gated with `up.weight` [2, ffn, hidden]: gate first, then up.

    The width `ffn` is split over "tp" in both weights; the linear layers state the collectives.

    Args:
        config: sizes and activation.
        model: width of input and output, and how far apart the elements of samples are numbered.
        layer: global index.
        shard: This rank's share of the model.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same.
    """

    def __init__(
        self, config: MLPConfig, stream: StreamConfig, *, layer: int, shard: ShardContext
    ) -> None:
        super().__init__()
        self.config, hidden_size = config, stream.hidden_size
        self.dropout = DropoutSite(config.dropout, seed=shard.seed, layer=layer, name="ffn")
        self.max_length, self.context = stream.max_sequence_length, shard.context
        own = config.ffn_size // shard.tp
        self.columns = range(shard.tp_index * own, (shard.tp_index + 1) * own)
        self.frees_activation = "activation" in shard.recomputed
        kernel, self.gate = shard.kernels.activations, None
        if config.gated:
            self.gate = Selector(mt_fusions.GATED, kernel)
        self.activation = PlainActivation(config.activation, kernel)
        linear = shard.linear_arguments()
        shape = (2, config.ffn_size) if config.gated else config.ffn_size
        shard_dim = 1 if config.gated else 0
        self.up = ColumnParallelLinear(
            hidden_size, shape, shard_dim=shard_dim, bias=config.bias, **linear
        )
        if config.gated:
            mark_matrix(self.up.weight, MatrixSpec(part_dim=0, parts=(1, 1), names=("gate", "up")))
        self.down = RowParallelLinear(config.ffn_size, hidden_size, bias=config.bias, **linear)
        start_from(self.down.weight, "residual")

    def forward(self, x: Tensor, shared: ForwardContext | None = None) -> Tensor:
        """Apply the feed-forward to each token; `shared` is for dropout."""
        if self.config.gated:
            up, bias = self.up(x), None
        else:
            up, bias = self.activation.project(self.up, x)
        between = partial(self._activate, bias=bias, shared=shared)
        if self.frees_activation:
            return discard_between(between, self.down, up)
        return self.down(between(up))

    def readers(self) -> tuple[nn.Module, ...]:
        """Return the linear layers that multiply the input."""
        return (self.up,)

    def shared_inputs(self) -> Iterator[SharedInput]:
        """Yield the input of the projection back, where a gate alone is activated."""
        from mt_quant import SharedInput  # only quantisation needs it

        config = self.config
        if config.gated and config.clamp is None and not config.up_offset:
            rows = torch.arange(config.ffn_size, 2 * config.ffn_size)
            yield SharedInput(layers=(self.down,), source=self.up, rows=rows)

    def kernel_choices(self, like: Tensor) -> Iterator[Choice[Any]]:
        """Yield what computes the activation, if it has several kernels."""
        config = self.config
        if self.gate is None:
            yield from self.activation.choices(self.up, like)
        else:
            work = config.activation, config.clamp, config.up_offset
            yield self.gate.choose(like.new_empty(0, 2, 1), *work)

    def _activate(
        self, up: Tensor, *, bias: Tensor | None, shared: ForwardContext | None
    ) -> Tensor:
        config = self.config
        if self.gate is None:
            y = self.activation(up, bias)
        else:
            kind, clamp, offset = config.activation, config.clamp, config.up_offset
            kernel = self.gate.find(up, kind, clamp, offset)
            y = kernel.function(up, kind, clamp=clamp, up_offset=offset)
        return self.dropout(y, self._index(y, shared))

    def _index(self, y: Tensor, shared: ForwardContext | None) -> Tensor | None:
        """Global index of the elements between the projections; None where none is dropped."""
        if shared is None or shared.sample_ids is None or not self.dropout.probability:
            return None
        ids = shared.sample_ids.to(y.device)
        places = self.context.positions(y.shape[1] * self.context.size, y.device)
        return hidden_index(ids, places, self.max_length, self.config.ffn_size, own=self.columns)
