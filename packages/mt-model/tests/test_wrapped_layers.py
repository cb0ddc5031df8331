"""Layers that run through something else, such as a compiler."""

from __future__ import annotations

import pytest
import torch
from mt_model import GPT, AttentionConfig, Kernels, LayerConfig, MLPConfig, gpt
from mt_parallel_state import ParallelLayout, ParallelState

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


def graphs(*, anew: bool = False) -> tuple[int, int]:
    """How many graphs were made, and how often one broke."""
    from torch._dynamo.utils import counters  # the rank's own: globals travel as copies

    if anew:
        torch._dynamo.reset()
        counters.clear()
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def layer(**options) -> LayerConfig:
    return LayerConfig(
        mixer=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, **options),
        feed_forward=MLPConfig(ffn_size=24),
    )


def test_each_kind_of_layer_is_compiled_once_however_many_there_are() -> None:
    graphs(anew=True)
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
    graphs(anew=True)
    config = gpt(**SIZES, num_layers=2, num_heads=4, ffn_size=24, dropout=0.2, attention_dropout=0)
    model = GPT(config, dtype=torch.float64)
    expected = results(model)
    model.wrap_layers(compiled)
    torch.testing.assert_close(results(model), expected, rtol=1e-11, atol=1e-12)
    assert graphs() == (1, 0)


class Counted:
    """A gradient sink that counts."""

    def __init__(self, param: torch.Tensor) -> None:
        self.total, self.count = torch.zeros_like(param, requires_grad=False), 0

    def begin(self) -> tuple[torch.Tensor, bool]:
        return self.total, self.count > 0

    def end(self) -> None:
        self.count += 1


def tensor_parallel_difference(sequence_parallel: bool) -> tuple[float, tuple[int, int], bool]:
    """Compiled from eager, relative to the largest; graphs and breaks; whether sinks agree."""
    graphs(anew=True)
    config = gpt(**SIZES, num_layers=3, num_heads=4, ffn_size=24)
    state = ParallelState(ParallelLayout(tp=2))
    model = GPT(config, state, dtype=torch.float64, sequence_parallel=sequence_parallel)
    found = []
    for wrap in (None, compiled):
        sinks: list[Counted] = []
        model.sum_weight_gradients(lambda p, sinks=sinks: sinks.append(Counted(p)) or sinks[-1])
        model.wrap_layers(wrap)
        model.zero_grad()
        loss = model(None, batch())["lm"]
        loss.backward()
        own = [p.grad for p in model.parameters() if p.grad is not None]
        counts = [sink.count for sink in sinks]
        found.append(([loss.detach(), *own, *(sink.total for sink in sinks)], counts, len(own)))
    (eager, *first), (other, *second) = found
    pairs = zip(other, eager, strict=True)
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return difference, graphs(), first == second


@pytest.mark.parametrize(
    "sequence_parallel", [True, pytest.param(False, marks=pytest.mark.campaign)]
)
def test_layers_of_several_ranks_are_one_graph_with_their_sinks(ranks, sequence_parallel) -> None:
    for difference, counts, same in ranks(2, tensor_parallel_difference, sequence_parallel):
        assert difference < 1e-12
        assert counts == (1, 0)
        assert same


def test_layers_that_hand_on_their_last_branch_are_compiled_by_their_place() -> None:
    graphs(anew=True)
    config = gpt(**SIZES, num_layers=3, num_heads=4, ffn_size=24)
    model = GPT(config, kernels=Kernels(residual="fused"), dtype=torch.float64)
    expected = results(model)
    model.wrap_layers(compiled)
    torch.testing.assert_close(results(model), expected, rtol=1e-11, atol=1e-12)
    assert graphs() == (3, 0)  # the first, the one between and the last
