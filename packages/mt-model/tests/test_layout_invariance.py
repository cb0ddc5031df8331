"""The values a model starts from are the same whatever the layout: bit-equal to one rank's."""

import random

import pytest
import torch
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState, global_shape_of, offsets_of
from mt_testing import fake_world

SEEDS = range(100)


def draw(rng: random.Random):
    """Return a config with sizes that four ranks can share, and a layout."""
    num_kv_heads = rng.choice([1, 2, 4])
    options = {
        "vocab_size": rng.choice([48, 50]),
        "vocab_multiple": 4,
        "hidden_size": rng.choice([16, 24]),
        "max_sequence_length": 8,
        "init_std": rng.choice([0.02, 0.3]),
        "tied": rng.random() < 0.5,
        "positions": rng.choice(["rope", "learned", "none"]),
        "embedding_norm": rng.random() < 0.3,
        "norm": rng.choice(["rms", "layer"]),
    }
    attention = {
        "num_heads": rng.choice([4, 8]),
        "num_kv_heads": num_kv_heads,
        "head_dim": rng.choice([4, 8]),
        "qk_norm": rng.choice(["none", "head", "whole"]),
        "qkv_bias": rng.random() < 0.5,
        "out_bias": rng.random() < 0.5,
        "sinks": rng.choice(["none", "learned"]),
        "output_gate": rng.random() < 0.3,
    }
    if options["positions"] == "rope":
        attention["rope"] = {"theta": 10000.0}
    mamba2 = {"num_heads": 8, "head_dim": 4, "num_groups": rng.choice([1, 4]), "state_size": 4}
    delta = {"num_key_heads": 4, "num_value_heads": 8, "key_dim": 4, "value_dim": 2}
    mixers = [attention, {"type": "mamba2", **mamba2}, {"type": "gateddeltanet", **delta}]
    mlp = {
        "ffn_size": rng.choice([8, 24]),
        "gated": rng.random() < 0.5,
        "bias": rng.random() < 0.5,
        "activation": rng.choice(["silu", "gelu"]),
    }
    layers = [
        {"mixer": rng.choice(mixers), "feed_forward": rng.choice([mlp, None])}
        for _ in range(rng.randint(2, 5))
    ]
    layers[0]["mixer"] = attention
    layout = ParallelLayout(tp=rng.choice([1, 2, 4]), pp=rng.choice([1, 2]), dp=rng.choice([1, 2]))
    return gpt(**options, layers=layers), layout


@pytest.mark.parametrize("first", SEEDS[::10])
def test_every_rank_starts_from_its_part_of_the_values_of_one_rank(first) -> None:
    for seed in SEEDS[first : first + 10]:
        rng = random.Random(seed)
        config, layout = draw(rng)
        whole = dict(GPT(config, seed=seed).named_parameters())
        seen = set()
        cut = rng.randint(1, config.num_layers - 1) if layout.pp > 1 else None
        for rank in range(layout.world_size):
            with fake_world(layout.world_size, rank):
                state = ParallelState(layout, device="cpu")
                stage = state.index("pp")
                layers = (range(cut), range(cut, config.num_layers))[stage] if cut else None
                model = GPT(config, state, layers=layers, seed=seed)
                for name, param in model.named_parameters():
                    assert global_shape_of(param, layout) == whole[name].shape
                    start = offsets_of(param, layout, rank)
                    box = tuple(slice(s, s + n) for s, n in zip(start, param.shape, strict=True))
                    assert torch.equal(whole[name][box], param), (seed, rank, name)
                    seen.add(name)
        assert seen == whole.keys()
