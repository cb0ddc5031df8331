"""Bytes that modules keep, counted without data, against those that real passes keep."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from mt_model import (
    GPT,
    ImageInputConfig,
    Mamba2Config,
    MLAConfig,
    OffloadConfig,
    RecomputePlan,
    RecomputeRule,
    RopeConfig,
    gpt,
    kept_by_module,
    preset,
    vit,
    without_data,
)
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import sample

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "ffn_size": 96}


def with_mixer(mixer):
    config = gpt(**SIZES)
    first, *rest = config.layers
    return replace(config, layers=(first, *(replace(layer, mixer=mixer) for layer in rest)))


TOWER = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_layers": 3, "num_heads": 2}
CONFIGS = {
    "gqa": gpt(**SIZES, num_kv_heads=2),
    "dropout": gpt(**SIZES, dropout=0.1, attention_dropout=0.1, tied=True),
    "layer norms": gpt(
        **SIZES, norm="layer", activation="gelu", gated=False, bias=True, qk_norm="head"
    ),
    "two norms": gpt(**SIZES, norms="sandwich", positions="learned"),
    "mixture": preset("moe-tiny"),
    "mla": with_mixer(
        MLAConfig(
            num_heads=4,
            kv_lora_rank=16,
            nope_head_dim=8,
            rope_head_dim=4,
            v_head_dim=8,
            rope=RopeConfig(),
        )
    ),
    "mamba": with_mixer(Mamba2Config(num_heads=4, head_dim=8, state_size=8, chunk_size=8)),
    "images": gpt(
        **SIZES,
        num_kv_heads=2,
        images=ImageInputConfig(tower=vit(**TOWER, dropout=0.1), token_id=0),
    ),
}
PLANS = {
    "none": "none",
    "selective": "selective",
    "full": "full",
    "attention": RecomputePlan(rules=(RecomputeRule(modules=("attention", "mixer_norm")),)),
    "modules": RecomputePlan(rules=(RecomputeRule(first=1, modules=("mixer", "feed_forward")),)),
    "offload": RecomputePlan(offload=OffloadConfig(min_bytes=0, every=2)),
}


def count(config, *, state=None, rows=2, length=32, layers=None, frozen=(), **options):
    """By module, and by layer as a pass itself counts."""
    stage = GPT(config, state, layers=layers, **options)
    for name in frozen:
        stage.get_submodule(name).requires_grad_(False)
    tokens = torch.zeros(rows, length, dtype=torch.long)
    batch = {"tokens": tokens, "labels": tokens, "sample_ids": torch.zeros(rows, dtype=torch.long)}
    if config.images is not None:  # every token is one of an image
        images = rows * length * (1 if state is None else state.size("cp"))
        batch["pixel_values"] = torch.zeros(images // config.images.num_tokens, 3, 8, 8)
    x = None
    if not stage.has_embedding:
        shards = stage.shard.tp if stage.shard.sequence_parallel else 1
        sizes = rows, length // shards, config.hidden_size
        x = torch.zeros(sizes, dtype=stage.shard.dtype, requires_grad=True)
    found = kept_by_module(stage, batch, x)
    with stage.watch_activations() as kept:
        stage(x, batch)
    return found, kept


def check(config, **options):
    real, by_layer = count(config, **options)
    with without_data():
        found, _ = count(config, **options)
    assert found == real
    for index, layer in by_layer.items():
        own = [k for n, k in found.items() if f"{n}.".startswith(f"layers.{index}.")]
        assert sum(k.device for k in own) == layer.device
        assert sum(k.host for k in own) == layer.host
    return found


GRID = [
    pytest.param(name, plan, marks=() if i % len(PLANS) == j else pytest.mark.campaign)
    for i, name in enumerate(CONFIGS)
    for j, plan in enumerate(PLANS)
]


@pytest.mark.parametrize(("name", "plan"), GRID)
def test_what_is_counted_without_data_is_what_a_pass_keeps(name, plan):
    check(CONFIGS[name], recompute=PLANS[plan])


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    sample(product(("auto", "reference", "fused"), (torch.bfloat16, torch.float64)), every=5),
)
def test_it_is_so_for_every_choice_of_kernels(kernels, dtype):
    check(CONFIGS["gqa"], kernels=kernels, dtype=dtype)


QUICK = ((True, "none"),)


@pytest.mark.parametrize(
    ("sequence_parallel", "plan"),
    [
        pytest.param(sp, plan, marks=() if (sp, plan) in QUICK else pytest.mark.campaign)
        for sp in (False, True)
        for plan in ("none", "selective", "full", "modules")
    ],
)
def test_ranks_that_share_a_layer_keep_what_one_of_a_fake_world_does(
    ranks, sequence_parallel, plan
):
    options = {"sequence_parallel": sequence_parallel, "recompute": PLANS[plan]}

    def body(fake):
        with ParallelState(ParallelLayout(tp=2)) as state:
            stages = [range(1), range(1, 3)]
            return [count(CONFIGS["images"], state=state, layers=s, **options)[0] for s in stages]

    def without(rank):
        from mt_testing import fake_world

        with fake_world(2, rank), without_data():
            return body(fake=True)

    found = ranks(2, body, False)
    assert [without(rank) for rank in range(2)] == found


def test_modules_have_the_memory_that_they_save():
    found = check(CONFIGS["gqa"], dtype=torch.float32)
    rows = 2 * 32 * 4  # bytes of one number for each token
    assert found["layers.1.mixer.qkv"].device == rows * 32
    assert any(name.startswith("head") for name in found)


@pytest.mark.parametrize("plan", ["none", "full"])
def test_an_image_encoder_has_its_memory_and_a_frozen_one_none(plan):
    def of_tower(**options):
        found = check(CONFIGS["images"], recompute=PLANS[plan], **options)
        kept = (k.device for name, k in found.items() if name.startswith("images.tower."))
        return sum(kept), found["images.projector.down"].device

    patches = 16 * 5 * 16 * 4  # bytes of the hidden states of all images' tokens
    tower, projector = of_tower()
    assert tower > (2 if plan == "full" else 16) * patches
    assert of_tower(frozen=["images.tower"]) == (0, projector)
    assert projector == 16 * 4 * 32 * 4


def test_values_that_are_not_there_are_asked_for_in_vain():
    with pytest.raises(ValueError, match="ep=1"), without_data():
        torch.ones(2).sum().item()
