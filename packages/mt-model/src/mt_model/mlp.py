"""The feed-forward of a layer, split over the tensor-parallel group."""

from __future__ import annotations

from mt_parallel_state import MatrixSpec, mark_matrix
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from mt_model.activation import activate, gated
from mt_model.initialization import start_from
from mt_model.kinds import MLPConfig
from mt_model.placement import Placement
from mt_model.recomputation import discard_between


class MLP(nn.Module):
    """Plain `down(act(up x))`, or gated with `up.weight` [2, ffn, hidden]: gate first, then up.

    The width `ffn` is split over "tp" in both weights; collectives are those of the linear layers.

    Args:
        config: sizes and activation.
        hidden_size: width of input and output.
        placement: of this rank.

    Shape:
        forward(x): [B, S, hidden] (S / tp tokens under sequence parallelism) -> the same.
    """

    def __init__(self, config: MLPConfig, hidden_size: int, *, placement: Placement) -> None:
        super().__init__()
        self.config = config
        self.frees_activation = "activation" in placement.made_again
        linear = placement.linear_arguments()
        shape = (2, config.ffn_size) if config.gated else config.ffn_size
        shard_dim = 1 if config.gated else 0
        self.up = ColumnParallelLinear(
            hidden_size, shape, shard_dim=shard_dim, bias=config.bias, **linear
        )
        if config.gated:
            mark_matrix(self.up.weight, MatrixSpec(part_dim=0, parts=(1, 1)))
        self.down = RowParallelLinear(config.ffn_size, hidden_size, bias=config.bias, **linear)
        start_from(self.down.weight, "residual")

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward to each token."""
        up = self.up(x)
        if self.frees_activation:
            return discard_between(self._activate, self.down, up)
        return self.down(self._activate(up))

    def _activate(self, up: Tensor) -> Tensor:
        config = self.config
        if not config.gated:
            return activate(up, config.activation)
        return gated(up, config.activation, clamp=config.clamp, up_offset=config.up_offset)
