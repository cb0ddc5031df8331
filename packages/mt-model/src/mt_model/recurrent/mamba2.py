"""Mamba-2's mixer, split over the tensor-parallel group by heads."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from mt_fusions import invariant_softplus
from mt_kernels import AUTO
from mt_parallel_state import MatrixSpec, all_gather, mark_matrix
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from mt_model.attend.context import ForwardContext, Held
from mt_model.block.initial import Uniform, start_from
from mt_model.block.recomputation import discard_between
from mt_model.block.shard_context import ShardContext
from mt_model.block.stream import StreamConfig
from mt_model.recurrent.causal_convolution import CausalConvolution
from mt_model.recurrent.decay import segments_of
from mt_model.recurrent.gated_norm import GatedRMSNorm, SharedGroups
from mt_model.recurrent.ssd import SsdSteps, empty_state, ssd, ssd_step
from mt_model.recurrent.steps import by_steps

if TYPE_CHECKING:
    from mt_model.recurrent.mamba2_config import Mamba2Config


class Mamba2(nn.Module):
    """Projections, convolution, state space, gated norm, projection back (Dao & Gu, 2024).

    Parameters: `zx.weight` [2, heads, head_dim, hidden], the gate and the input of each head, and
    `dt.weight` [heads, hidden], split over "tp" by heads; `bc.weight` [2, groups, state, hidden],
    what a group writes and reads along, split by groups; with fewer groups than ranks it is split
    by the state's size, and the ranks gather what comes of it. `conv_x` [heads, head_dim, taps] and
    `conv_bc` [2, groups, state, taps] likewise. `A_log`, `D` and `dt_bias` [heads], split, are
    fp32 at least. `norm.weight` [heads * head_dim] and `out.weight` [hidden, heads, head_dim],
    split by heads.

    Collectives: one all-gather of the input along the sequence under sequence parallelism (backward
    reduce-scatter), else none (backward all-reduce); and the collectives of `out`. Where ranks
    share a group there are also an all-gather of B and C (backward reduce-scatter), and an
    all-reduce of the group's mean squares, forward and backward.

    Args:
        config: sizes.
        model: width of input and output, eps of the norm.
        layer: global index.
        shard: This rank's share of the model.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same.
    """

    def __init__(
        self, config: Mamba2Config, stream: StreamConfig, *, layer: int, shard: ShardContext
    ) -> None:
        super().__init__()
        self.config, self.index, self.shard = config, layer, shard
        tp, dtype, hidden_size = shard.tp, shard.dtype, stream.hidden_size
        self.heads, self.groups = config.num_heads // tp, max(1, config.num_groups // tp)
        self.shares_groups = config.num_groups < tp
        self._build_projections(hidden_size)
        self._build_convolutions(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        self.A_log, self.D, self.dt_bias = (
            nn.Parameter(torch.empty(self.heads, dtype=wide, device="meta")) for _ in range(3)
        )
        start_from(self.A_log, Uniform(low=1.0, high=16.0, then=torch.log))
        start_from(self.D, "ones")
        start_from(self.dt_bias, initial_dt_bias(config))
        self.norm = GatedRMSNorm(
            self.heads * config.head_dim,
            eps=stream.norm.eps,
            gate_first=not config.norm_before_gate,
            dtype=dtype,
            shared=self._shared_groups(),
            kernels=shard.kernels,
        )
        shard.mark_split(self.norm, dim=0)
        for param in (self.A_log, self.D, self.dt_bias):
            shard.mark_split(param, dim=0)

    def _build_projections(self, hidden_size: int) -> None:
        config, shard = self.config, self.shard
        linear = shard.linear_arguments()
        # The input is brought to all ranks once, for the three of them.
        own = {**linear, "sequence_parallel": False, "communicate": False, "bias": config.bias}
        shape = (2, config.num_heads, config.head_dim)
        self.zx = ColumnParallelLinear(hidden_size, shape, shard_dim=1, **own)
        self.dt = ColumnParallelLinear(hidden_size, config.num_heads, **own)
        shape = (2, config.num_groups, config.state_size)
        dim = 2 if self.shares_groups else 1
        self.bc = ColumnParallelLinear(hidden_size, shape, shard_dim=dim, **own)
        for fused in (self.zx, self.bc):
            mark_matrix(fused.weight, MatrixSpec(part_dim=0, parts=(1, 1)))
        self.out = RowParallelLinear(
            (config.num_heads, config.head_dim), hidden_size, bias=config.bias, **linear
        )
        start_from(self.out.weight, "residual")

    def _build_convolutions(self, dtype: torch.dtype) -> None:
        config, shard = self.config, self.shard
        bias, taps = config.conv_bias, config.conv_size
        channels = (self.heads, config.head_dim)
        kernel = "invariant" if shard.kernels.is_invariant else AUTO
        self.conv_x = CausalConvolution(channels, taps, bias=bias, dtype=dtype, kernel=kernel)
        shard.mark_split(self.conv_x, dim=0)
        self.conv_bc = CausalConvolution(
            tuple(self.bc.weight.shape[:-1]), taps, bias=bias, dtype=dtype, kernel=kernel
        )
        shard.mark_split(self.conv_bc, dim=2 if self.shares_groups else 1)

    def _shared_groups(self) -> SharedGroups | None:
        if not self.shares_groups:
            return None
        return SharedGroups(count=self.config.num_groups, ranks=self.shard.group)

    def readers(self) -> tuple[nn.Module, ...]:
        """Return the linear layers that multiply the input."""
        return (self.zx, self.dt, self.bc)

    def forward(self, x: Tensor, shared: ForwardContext) -> Tensor:
        """Mix the tokens."""
        x = self.shard.enter(x)
        gate, u = self.zx(x).unbind(2)
        y = shared.recur(self.index, self._scan, u, self.bc(x), self.dt(x)).flatten(2)
        y, gate = (part.unflatten(-1, (self.groups, -1)) for part in (y, gate.flatten(2)))
        if "norm" in self.shard.recomputed:
            return discard_between(self.norm, self._back, y, gate)
        return self._back(self.norm(y, gate))

    def _back(self, y: Tensor) -> Tensor:
        return self.out(y.flatten(2).unflatten(-1, (self.heads, -1)))

    def _scan(
        self, x: Tensor, bc: Tensor, dt: Tensor, held: Held | None, documents: Tensor | None
    ) -> tuple[Tensor, Held]:
        """Convolve, run the state space and add the skip.

        Shape:
            x: [B, S, heads, head_dim]; bc: [B, S, 2, groups, state]; dt: [B, S, heads]. Returns
            the shape of x, in fp32 (fp64 for fp64).
        """
        config, segments, before = self.config, segments_of(documents), held or {}
        u, last_x = self.conv_x(x.flatten(2), tail=before.get("x"), segments=segments)
        both, last_bc = self.conv_bc(bc.flatten(2), tail=before.get("bc"), segments=segments)
        u, bc = u.view_as(x), both.view_as(bc)
        if self.shares_groups:
            own = self.shard.tp_index * config.num_groups // self.shard.tp
            bc = all_gather(bc, self.shard.group, dim=4)[:, :, :, own : own + 1]
        b, c = bc.unbind(2)
        dt = invariant_softplus(dt + self.dt_bias).clamp(config.min_dt, config.max_dt)
        rate, skip = -self.A_log.exp(), self.D[:, None] * u
        steps = SsdSteps(u, dt, rate, b, c)
        invariant = self.shard.kernels.is_invariant
        if invariant or (held is not None and x.shape[1] == 1):
            state = empty_state(u, b) if held is None else held["state"]
            y, state = by_steps(partial(ssd_step, invariant=invariant), steps, state, segments)
        else:
            state, size = before.get("state"), config.chunk_size
            y, state = ssd(steps, chunk_size=size, state=state, segments=segments)
        kept = {} if held is None else {"x": last_x, "bc": last_bc, "state": state}
        return y + skip, kept


def initial_dt_bias(config: Mamba2Config) -> Uniform:
    """Draw step sizes evenly in their logarithm; the bias is their inverse softplus."""
    floor = config.init_dt_floor

    def inverse_softplus(log_dt: Tensor) -> Tensor:
        dt = log_dt.exp().clamp(min=floor)
        return dt + (-torch.expm1(-dt)).log()

    low, high = math.log(config.init_dt_min), math.log(config.init_dt_max)
    return Uniform(low=low, high=high, then=inverse_softplus)
