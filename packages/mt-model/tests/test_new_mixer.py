"""A kind of mixer added from this file alone, in under 60 lines that the package does not know."""

from dataclasses import dataclass, replace

import torch
from mt_model import GPT, MixerConfig, ModelConfig, gpt, start_from, validate_split
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn


@dataclass(frozen=True, kw_only=True)
class RunningMeanConfig(MixerConfig):
    width: int

    def build(self, model, *, layer, shard):
        return RunningMean(self.width, model.hidden_size, shard.linear_arguments())

    def num_parameters(self, hidden_size):
        return 2 * self.width * hidden_size

    def flops_per_token(self, hidden_size, sequence_length):
        return 12 * self.width * hidden_size

    def split_sizes(self, tp):
        yield "width", self.width


class RunningMean(nn.Module):
    def __init__(self, width, hidden_size, linear):
        super().__init__()
        self.up = ColumnParallelLinear(hidden_size, width, bias=False, **linear)
        self.out = RowParallelLinear(width, hidden_size, bias=False, **linear)
        start_from(self.out.weight, "residual")

    def forward(self, x, shared):
        seen = self.up(x).cumsum(1)
        return self.out(seen / torch.arange(1, seen.shape[1] + 1).unsqueeze(1))


def loss(config, tp):
    model = GPT(config, ParallelState(ParallelLayout(tp=tp)), dtype=torch.float64, seed=3)
    tokens = torch.arange(16).view(2, 8)
    return model(tokens, labels=tokens)["lm"].detach(), {n for n, _ in model.named_parameters()}


def test_a_new_mixer_trains_splits_counts_and_is_stored(ranks):
    config = gpt(vocab_size=32, hidden_size=8, num_layers=2, num_heads=2)
    layer = replace(config.layers[0], mixer=RunningMeanConfig(width=6))
    config = replace(config, layers=(config.layers[0], layer))
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert config.num_parameters == sum(p.numel() for p in GPT(config).parameters())
    assert config.flops_per_token(8) > 0
    validate_split(config, 2)
    expected, names = loss(config, 1)
    assert "layers.1.mixer.up.weight" in names
    for found, _ in ranks(2, loss, config, 2):
        assert torch.allclose(found, expected, rtol=1e-10, atol=0)
