"""The gated delta net's mixer, split over the tensor-parallel group by key heads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from mt_fusions import invariant_sigmoid, invariant_softplus
from mt_kernels import AUTO
from mt_parallel_state import MatrixSpec, mark_matrix
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext, Held
from mt_model.block.initial import Uniform, start_from
from mt_model.block.recomputation import discard_between
from mt_model.block.shard_context import ShardContext
from mt_model.block.stream import StreamConfig
from mt_model.recurrent.causal_convolution import CausalConvolution
from mt_model.recurrent.decay import segments_of
from mt_model.recurrent.delta_rule import DeltaSteps, delta_rule, delta_rule_step, empty_memory
from mt_model.recurrent.gated_norm import GatedRMSNorm
from mt_model.recurrent.steps import by_steps

if TYPE_CHECKING:
    from mt_model.recurrent.gated_delta_net_config import GatedDeltaNetConfig

L2_EPS = 1e-6


def l2_norm(x: Tensor) -> Tensor:
    """Give the last dim length 1: `x / sqrt(sum(x^2) + 1e-6)`, in fp32 (fp64 for fp64)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class GatedDeltaNet(nn.Module):
    """Projections, convolution, gated delta rule, gated norm, projection back (Yang et al., 2024).

    Parameters: `qkvz.weight` [key_heads, 2 key_dim + 2 values value_dim, hidden]: of each key head
    the query, the key, its values and their gates; `ba.weight` [key_heads, 2 values, hidden]: how
    far each value is written, and the steps of the decays; `conv.weight` [key_heads, 2 key_dim +
    values value_dim, taps]; all split over "tp" by key heads. `A_log` and `dt_bias` [value_heads],
    split, are fp32 at least. `norm.weight` [value_dim] is whole on each rank, with partial
    gradients. `out.weight` [hidden, value_heads, value_dim], split by heads.

    Collectives: one all-gather of the input along the sequence under sequence parallelism (backward
    reduce-scatter), else none (backward all-reduce); and the collectives of `out`.

    Args:
        config: sizes.
        model: width of input and output, eps of the norm.
        layer: global index.
        shard: This rank's share of the model.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same.
    """

    def __init__(
        self, config: GatedDeltaNetConfig, stream: StreamConfig, *, layer: int, shard: ShardContext
    ) -> None:
        super().__init__()
        self.config, self.index, self.shard = config, layer, shard
        dtype, parts, linear = shard.dtype, config.parts, shard.linear_arguments()
        self.heads = config.num_value_heads // shard.tp
        # The input is brought to all ranks once, for both of them.
        own = {**linear, "sequence_parallel": False, "communicate": False, "bias": False}
        keys, values = config.num_key_heads, config.values_per_key
        self.qkvz = ColumnParallelLinear(stream.hidden_size, (keys, sum(parts)), **own)
        self.ba = ColumnParallelLinear(stream.hidden_size, (keys, 2 * values), **own)
        mark_matrix(self.qkvz.weight, MatrixSpec(part_dim=1, parts=parts))
        mark_matrix(self.ba.weight, MatrixSpec(part_dim=1, parts=(values, values)))
        channels = (keys // shard.tp, sum(parts[:3]))
        kernel = "invariant" if shard.kernels.is_invariant else AUTO
        how = {"bias": False, "dtype": dtype, "kernel": kernel}
        self.conv = CausalConvolution(channels, config.conv_size, **how)
        shard.mark_split(self.conv, dim=0)
        wide = torch.promote_types(dtype, torch.float32)
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.empty(self.heads, dtype=wide, device="meta")) for _ in range(2)
        )
        start_from(self.A_log, Uniform(low=0.01, high=16.0, then=torch.log))
        start_from(self.dt_bias, "ones")
        for param in (self.A_log, self.dt_bias):
            shard.mark_split(param, dim=0)
        self.norm = GatedRMSNorm(
            config.value_dim,
            eps=stream.norm.eps,
            gate_first=False,
            dtype=dtype,
            kernels=shard.kernels,
        )
        shard.mark_replicated(self.norm, partial=True)
        self.out = RowParallelLinear(
            (config.num_value_heads, config.value_dim), stream.hidden_size, bias=False, **linear
        )
        start_from(self.out.weight, "residual")

    def readers(self) -> tuple[nn.Module, ...]:
        """Return the linear layers that multiply the input."""
        return (self.qkvz, self.ba)

    def forward(self, x: Tensor, shared: ForwardContext) -> Tensor:
        """Mix the tokens."""
        x = self.shard.enter(x)
        qkvz, ba = self.qkvz(x), self.ba(x)
        *qkv, gate = self.config.parts
        mixed, gate = qkvz.split((sum(qkv), gate), -1)
        gate = gate.flatten(2).unflatten(-1, (self.heads, -1))
        y = shared.recur(self.index, self._remember, mixed, ba)
        if "norm" in self.shard.recomputed:
            return discard_between(self.norm, self.out, y, gate)
        return self.out(self.norm(y, gate))

    def _remember(
        self, qkv: Tensor, ba: Tensor, held: Held | None, documents: Tensor | None
    ) -> tuple[Tensor, Held]:
        """Convolve, and run the delta rule.

        Shape:
            qkv: [B, S, key_heads, 2 key_dim + values value_dim]; ba: [B, S, key_heads, 2 values].
            Returns [B, S, value_heads, value_dim], in fp32 (fp64 for fp64).
        """
        config, segments, before = self.config, segments_of(documents), held or {}
        flat, last = self.conv(qkv.flatten(2), tail=before.get("qkv"), segments=segments)
        query, key, value = flat.view(qkv.shape).split(config.parts[:3], -1)
        query, key = l2_norm(query) * config.key_dim**-0.5, l2_norm(key)
        value = value.unflatten(-1, (-1, config.value_dim)).flatten(2, 3)
        b, a = (part.flatten(2) for part in ba.chunk(2, -1))
        log_decay = -self.A_log.exp() * invariant_softplus(a + self.dt_bias)
        steps = DeltaSteps(query, key, value, log_decay, invariant_sigmoid(b))
        invariant = self.shard.kernels.is_invariant
        if invariant or (held is not None and qkv.shape[1] == 1):
            state = empty_memory(key, value) if held is None else held["state"]
            y, state = by_steps(
                partial(delta_rule_step, invariant=invariant), steps, state, segments
            )
        else:
            state, size = before.get("state"), config.chunk_size
            y, state = delta_rule(steps, chunk_size=size, state=state, segments=segments)
        return y, {} if held is None else {"qkv": last, "state": state}
