"""The shared expert, which serves every token."""

from __future__ import annotations

from typing import Any

import torch
from mt_fusions import invariant_sigmoid
from mt_parallel_state import Group, PartitionSpec, group_size, shard_param
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from mt_moe.experts.activation import activate, gated
from mt_moe.experts.options import ExpertOptions
from mt_moe.initial import filled
from mt_moe.wide_linear import wide_linear


class SharedExpert(nn.Module):
    """A dense feed-forward sharded over tp, optionally times `sigmoid(x @ gate)`.

    Args:
        hidden_size: Size of the tokens.
        ffn_size: Width, sharded over tp.
        options: Activation, gate and biases, as of the other experts.
        gated_output: Scale the result by a sigmoid of the token (Qwen2-MoE).
        tp: The ranks that shard it; None is one.
        sequence_parallel: Whether tokens are split over tp, along dim 1.
        dtype: Dtype of the parameters.
        device: Device of the parameters.

    Shape:
        [B, S, hidden] -> [B, S, hidden].
    """

    def __init__(  # noqa: PLR0913 - sizes and options of a layer
        self,
        hidden_size: int,
        ffn_size: int,
        options: ExpertOptions,
        *,
        gated_output: bool = False,
        tp: Group = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        common: dict[str, Any] = {"group": tp, "bias": options.bias, "dtype": dtype}
        common |= {"device": device, "sequence_parallel": sequence_parallel}
        wide = (2, ffn_size) if options.gated else ffn_size
        self.up = ColumnParallelLinear(
            hidden_size, wide, shard_dim=1 if options.gated else 0, **common
        )
        self.down = RowParallelLinear(ffn_size, hidden_size, **common)
        self.gate: nn.Parameter | None = None
        if gated_output:
            own = filled(
                (1, hidden_size), std=(3 * hidden_size) ** -0.5, dtype=dtype, device=device
            )
            partial = ("tp",) if sequence_parallel and group_size(tp) > 1 else ()
            self.gate = shard_param(own, PartitionSpec(), partial_grad=partial)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the expert to each token."""
        up = self.up(x)
        if self.options.gated:
            value, other = up.unbind(-2)
            hidden = gated(value, other, self.options)
        else:
            hidden = activate(up, self.options)
        y = self.down(hidden)
        if self.gate is None:
            return y
        sigmoid = invariant_sigmoid if self.options.invariant else torch.sigmoid
        return y * wide_linear(x, self.gate, None, torch.float32, sigmoid).to(y.dtype)
