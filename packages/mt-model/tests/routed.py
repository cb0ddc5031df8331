"""A feed-forward with a gate, and two losses of its own, that the package does not know."""

from dataclasses import dataclass

import torch
from mt_model import FeedForwardConfig
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn


@dataclass(frozen=True, kw_only=True)
class RoutedConfig(FeedForwardConfig):
    width: int
    weight: float = 0.3

    @property
    def loss_weights(self):
        return {"aux": self.weight, "z": 0.01}

    def build(self, model, *, layer, shard):
        return Routed(self.width, model.hidden_size, shard)

    def num_parameters(self, hidden_size):
        return (2 * self.width + 3) * hidden_size

    def flops_per_token(self, hidden_size, sequence_length):
        return 6 * self.num_parameters(hidden_size)

    def split_sizes(self, tp):
        yield "width", self.width


class Routed(nn.Module):
    def __init__(self, width, hidden_size, shard):
        super().__init__()
        linear = shard.linear_arguments()
        self.up = ColumnParallelLinear(hidden_size, width, bias=False, **linear)
        self.down = RowParallelLinear(width, hidden_size, bias=False, **linear)
        like = {"dtype": shard.dtype, "device": "meta"}
        self.router = nn.Linear(hidden_size, 3, bias=False, **like)
        shard.mark_replicated(self.router, partial=shard.sequence_parallel)

    def forward(self, x):
        scores = self.router(x)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        losses = {"aux": wide.square().sum(), "z": wide.logsumexp(-1).square().sum()}
        return self.down(self.up(x).relu()) * scores.softmax(-1)[..., :1], losses
