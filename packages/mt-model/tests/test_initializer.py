"""A model on the meta device gets the values it would have been made with, one by one."""

import pytest
import torch
from mt_model import GPT, gpt, initializer
from mt_parallel_state import ParallelLayout, ParallelState, shard_param, sharding_of
from torch import nn

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 4}


def filled(config, state=None, seed=5):
    """Return the values by name, each given to a new parameter with the record of the old one."""
    model = GPT(config, state, device="meta")
    fill = initializer(model, config, state, seed=seed)
    values = {}
    for name, meta in model.named_parameters():
        param = nn.Parameter(torch.full(meta.shape, float("nan")))
        shard_param(param, sharding_of(meta).spec)
        fill(name, param)
        values[name] = param.detach()
    return values


@pytest.mark.parametrize("options", [{}, {"bias": True, "qk_norm": "head"}, {"tied": False}])
def test_values_are_those_of_a_model_made_on_its_device(options):
    config = gpt(**SIZES, **options)
    expected = dict(GPT(config, seed=5).named_parameters())
    values = filled(config)
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    assert not torch.equal(filled(config, seed=6)["embedding.weight"], values["embedding.weight"])


def test_each_rank_gets_its_part(ranks):
    def body():
        with ParallelState(ParallelLayout(tp=2)) as state:
            config = gpt(**SIZES)
            expected = dict(GPT(config, state, seed=5).named_parameters())
            values = filled(config, state)
            assert all(torch.equal(values[name], expected[name]) for name in expected)

    ranks(2, body)


def test_a_model_from_the_meta_device_runs_where_its_tokens_are():
    config = gpt(**SIZES)
    model = GPT(config, device="meta").to_empty(device="cpu")
    assert repr(model.shard.gemm) == repr(GPT(config).shard.gemm)
    fill = initializer(GPT(config, device="meta"), config, seed=5)
    with torch.no_grad():
        for name, param in model.named_parameters():
            fill(name, param)
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens), GPT(config, seed=5)(tokens))
