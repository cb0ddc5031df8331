"""Initial values are the same on every layout: bit-equal to one rank's."""

import random
from dataclasses import replace

import pytest
import torch
from mt_model import (
    AttentionConfig,
    CrossAttentionConfig,
    GatedDeltaNetConfig,
    ImageInputConfig,
    Mamba2Config,
    MLAConfig,
    MLPConfig,
    ModelConfig,
    MTPConfig,
    PooledHeadConfig,
    VisionConfig,
    encoder_decoder_layers,
    gpt,
    vit,
)
from mt_parallel_state import ParallelLayout, ParallelState, global_shape_of, offsets_of
from mt_testing import fake_world, sample

SEEDS = range(100)
KINDS = {AttentionConfig, MLAConfig, CrossAttentionConfig, Mamba2Config, GatedDeltaNetConfig}


def draw_attention(rng: random.Random, positions: str):
    attention = {
        "num_heads": rng.choice([4, 8]),
        "num_kv_heads": rng.choice([1, 2, 4]),
        "head_dim": rng.choice([4, 8]),
        "qk_norm": rng.choice(["none", "head", "whole"]),
        "qkv_bias": rng.random() < 0.5,
        "out_bias": rng.random() < 0.5,
        "sinks": rng.choice(["none", "learned"]),
        "output_gate": rng.random() < 0.3,
    }
    if positions == "rope":
        attention["rope"] = {"theta": 10000.0}
    elif rng.random() < 0.5:
        bias = {"type": "relative", "buckets": 8, "table": rng.choice([None, "shared"])}
        attention["score_bias"] = bias
    return attention


def draw_text(rng: random.Random) -> ModelConfig:
    """Return a decoder of any mixers with sizes that four ranks can share."""
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
        "mtp": rng.choice([None, {"depths": 2}]),
    }
    attention = draw_attention(rng, options["positions"])
    heads = {"num_heads": attention["num_heads"]}
    mla = {**heads, "kv_lora_rank": 6, "nope_head_dim": 4, "rope_head_dim": 2, "v_head_dim": 3}
    mla["q_lora_rank"] = rng.choice([None, 5])
    cross = {**heads, "num_kv_heads": attention["num_kv_heads"], "head_dim": 4, "memory_size": 12}
    mamba2 = {"num_heads": 8, "head_dim": 4, "num_groups": rng.choice([1, 4]), "state_size": 4}
    delta = {"num_key_heads": 4, "num_value_heads": 8, "key_dim": 4, "value_dim": 2}
    others = {"mla": mla, "crossattention": cross, "mamba2": mamba2, "gateddeltanet": delta}
    mixers = [attention, *({"type": kind, **sizes} for kind, sizes in others.items())]
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
    return gpt(**options, layers=layers)


def draw_images(rng: random.Random, num_classes: int | None) -> VisionConfig:
    pooling = rng.choice(["class", "attention"])
    return vit(
        image_size=8,
        patch_size=4,
        hidden_size=rng.choice([16, 24]),
        num_layers=rng.randint(2, 3),
        num_heads=4,
        class_token=pooling == "class",
        pooling=pooling,
        num_classes=num_classes,
    )


def with_encoder(rng: random.Random) -> ModelConfig:
    attention = AttentionConfig(num_heads=4, num_kv_heads=rng.choice([2, 4]), head_dim=4)
    mlp, encoder = MLPConfig(ffn_size=8, gated=rng.random() < 0.5), rng.randint(1, 2)
    layers = encoder_decoder_layers(attention, mlp, encoder=encoder, decoder=rng.randint(1, 2))
    text = gpt(vocab_size=48, hidden_size=16, positions="none", layers=layers, vocab_multiple=4)
    return replace(text, encoder_layers=encoder, tied=rng.random() < 0.5)


def draw(rng: random.Random):
    """Return a model of any kind, and a layout."""
    kind = rng.choice(["text"] * 5 + ["vision", "encoder", "images", "mtp", "pooled"])
    if kind == "vision":
        config = draw_images(rng, num_classes=rng.choice([None, 5]))
    elif kind == "encoder":
        config = with_encoder(rng)
    else:
        config = draw_text(rng)
    if kind == "images":
        images = ImageInputConfig(tower=draw_images(rng, None), token_id=3, drop_first=False)
        config = replace(config, images=images, mtp=None)
    elif kind == "mtp":
        config = replace(config, mtp=MTPConfig(depths=2, layer=config.layers[0]))
    elif kind == "pooled":
        config = replace(config, pooled_head=PooledHeadConfig(num_classes=3), head_bias=True)
    tp, pp = rng.choice([1, 2, 4]), rng.choice([1, 2])
    return config, ParallelLayout(tp=tp, pp=pp, dp=rng.choice([1, 2]) if tp * pp < 4 else 1)


def test_every_kind_of_mixer_and_of_model_is_drawn() -> None:
    configs = [draw(random.Random(seed))[0] for seed in SEEDS]
    text = [config for config in configs if isinstance(config, ModelConfig)]
    assert {type(mixer) for config in configs for mixer in config.mixers.values()} >= KINDS
    assert any(isinstance(config, VisionConfig) for config in configs)
    for field in ("images", "mtp", "pooled_head", "encoder_layers", "score_tables"):
        assert any(getattr(config, field) for config in text), field


@pytest.mark.parametrize("first", sample(((seed,) for seed in SEEDS[::10]), every=4))
def test_every_rank_starts_from_its_part_of_the_values_of_one_rank(first) -> None:
    for seed in SEEDS[first : first + 10]:
        rng = random.Random(seed)
        config, layout = draw(rng)
        whole = dict(config.build(seed=seed).named_parameters())
        seen = set()
        cut = rng.randint(1, config.num_layers - 1) if layout.pp > 1 else None
        for rank in range(layout.world_size):
            with fake_world(layout.world_size, rank):
                state = ParallelState(layout, device="cpu")
                stage = state.index("pp")
                layers = (range(cut), range(cut, config.num_layers))[stage] if cut else None
                model = config.build(state, layers=layers, seed=seed)
                for name, param in model.named_parameters():
                    assert global_shape_of(param, layout) == whole[name].shape
                    start = offsets_of(param, layout, rank)
                    box = tuple(slice(s, s + n) for s, n in zip(start, param.shape, strict=True))
                    assert torch.equal(whole[name][box], param), (seed, rank, name)
                    seen.add(name)
        assert seen == whole.keys()
