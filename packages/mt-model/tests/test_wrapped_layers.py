"""Layers that run through something else, such as a compiler."""

from __future__ import annotations

import pytest
import torch
from mt_model import GPT, AttentionConfig, LayerConfig, MLPConfig, gpt
from torch._dynamo.utils import counters

# Dynamo itself looks at .grad of what enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
SIZES = {"vocab_size": 32, "positions": "none", "hidden_size": 16, "max_sequence_length": 16}


def compiled(function):
    return torch.compile(function, backend="aot_eager")


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(3))
    return {"tokens": tokens, "labels": tokens, "sample_ids": torch.arange(2)}


def results(model: GPT) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(None, batch())["lm"]
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


def graphs() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def layer(**options) -> LayerConfig:
    return LayerConfig(
        mixer=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, **options),
        feed_forward=MLPConfig(ffn_size=24),
    )


def test_each_kind_of_layer_is_compiled_once_however_many_there_are() -> None:
    torch._dynamo.reset()
    counters.clear()
    # More than the 8 that torch compiles of one function.
    layers = [layer(), layer(window=4)] * 5
    model = GPT(gpt(**SIZES, layers=layers), dtype=torch.float64)
    expected = results(model)
    model.wrap_layers(compiled)
    for _ in range(2):
        torch.testing.assert_close(results(model), expected, rtol=1e-11, atol=1e-12)
        assert graphs() == (2, 0)
    model.logits(batch()["tokens"][:, :3])
    cache = model.new_cache(batch_size=2, max_length=8)
    model.logits(batch()["tokens"], cache=cache)
    assert graphs() == (2, 0)
    model.wrap_layers(None)
    torch.testing.assert_close(results(model), expected, rtol=0, atol=0)


def test_layers_that_drop_by_their_own_keys_share_a_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    config = gpt(**SIZES, num_layers=3, num_heads=4, ffn_size=24, dropout=0.2, attention_dropout=0)
    model = GPT(config, dtype=torch.float64)
    expected = results(model)
    model.wrap_layers(compiled)
    torch.testing.assert_close(results(model), expected, rtol=1e-11, atol=1e-12)
    assert graphs() == (1, 0)
