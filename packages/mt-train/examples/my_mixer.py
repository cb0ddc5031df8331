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
        return self.out(shared.recur(self.layer, self.mean, self.up(x)))

    def mean(self, x, held, documents):
        total = x.cumsum(1)
        number = torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)
        if held is not None:  # in generation: sums over the tokens of earlier passes
            total, number = total + held["sum"][:, None], number + held["number"][:, None]
        kept = {"sum": total[:, -1], "number": number[:, -1].expand(len(x), -1)}
        return (total / number).to(total.dtype), kept
