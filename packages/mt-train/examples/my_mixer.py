"""A kind of mixer of your own: the running mean of a projection. See docs/mt-train.md, plugins."""
# ruff: noqa: ANN001, ANN201, ANN204, D101, D102 - as short as a mixer can be

from dataclasses import dataclass

import torch
from mt_model import MixerConfig, start_from
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn


@dataclass(frozen=True, kw_only=True)
class RunningMeanConfig(MixerConfig):
    width: int

    def build(self, stream, *, layer, shard):
        return RunningMean(self.width, stream.hidden_size, layer, shard.linear_arguments())

    def num_parameters(self, hidden_size):
        return 2 * self.width * hidden_size

    def flops_per_token(self, hidden_size, sequence_length):
        return 12 * self.width * hidden_size

    def split_sizes(self, tp):
        yield "width", self.width

    def cache_shapes(self, batch_size, max_length, tp):
        return {"sum": (batch_size, self.width // tp), "number": (batch_size, 1)}


class RunningMean(nn.Module):
    def __init__(self, width, hidden_size, layer, linear):
        super().__init__()
        self.layer = layer
        self.up = ColumnParallelLinear(hidden_size, width, bias=False, **linear)
        self.out = RowParallelLinear(width, hidden_size, bias=False, **linear)
        start_from(self.out.weight, "residual")

    def forward(self, x, shared):
        total = self.up(x).cumsum(1)
        number = torch.arange(1, total.shape[1] + 1, device=x.device).view(1, -1, 1)
        kept = shared.kept(self.layer)  # in generation: sums over the tokens of earlier passes
        if kept is not None:
            total, number = total + kept["sum"].unsqueeze(1), number + kept["number"].unsqueeze(1)
            kept["sum"].copy_(total[:, -1])
            kept["number"].copy_(number[:, -1])
        return self.out((total / number).to(total.dtype))
