"""Encoders of images: what they are made of, and that no layout changes a number."""

import json
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from mt_files import FieldError, SchemaError
from mt_model import (
    VISION_PRESETS,
    AttentionPoolingConfig,
    ClassPoolingConfig,
    MLPConfig,
    ModelConfig,
    RopeConfig,
    StackConfig,
    VisionConfig,
    VisionEncoder,
    gpt,
    vision_preset,
    vit,
)
from mt_model.vision.patch_embedding import cut_patches
from mt_parallel_state import (
    ParallelLayout,
    ParallelState,
    global_shape_of,
    is_owner,
    offsets_of,
    sharding_of,
)
from mt_testing import fake_world, sample

TINY = {
    "image_size": 12,
    "patch_size": 4,
    "hidden_size": 16,
    "num_layers": 3,
    "num_heads": 4,
    "ffn_size": 24,
    "init_std": 0.3,
    "num_classes": 5,
}
CLIP = {"embedding_norm": True, "final_norm": False, "pooling": ClassPoolingConfig(norm=True)}
# 9 patches and a class token are 10 tokens, which 2 ranks share; 9 are not.
VARIANTS = {
    "vit": {"dropout": 0.1, "attention_dropout": 0.1},
    "pooler": {"pooling": ClassPoolingConfig(dense_size=7)},
    "clip": {**CLIP, "patch_bias": False, "activation": "gelu_quick"},
    "clip_odd": {**CLIP, "image_size": (12, 16), "dropout": 0.1},
    "siglip": {"class_token": False, "pooling": "attention", "activation": "gelu_tanh"},
    "attention_class": {"pooling": "attention"},
    "siglip_odd": {"class_token": False, "pooling": "attention", "dropout": 0.1, "num_channels": 2},
}


def config_of(variant):
    return vit(**{**TINY, **VARIANTS[variant]})


def batch_of(config):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(4, config.num_channels, *config.image_size, generator=generator)
    labels = torch.tensor([1, 4, -100, 0])
    return {"images": images, "labels": labels, "sample_ids": torch.tensor([7, 3, 12, 4])}


def spread(model, layout, rank):
    """Give norms and biases values that depend on the global index alone, for any layout."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                shape, starts = global_shape_of(param, layout), offsets_of(param, layout, rank)
                index = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
                for dim, (start, size) in enumerate(zip(starts, param.shape, strict=True)):
                    index = index.narrow(dim, start, size)
                param += 0.1 * torch.sin(index + len(name))


def on_rank(variant, tp, stages, sequence_parallel, recompute):
    """Losses, and each gradient with its offsets, through stages of these layers."""
    config, state = config_of(variant), ParallelState(ParallelLayout(tp=tp))
    x, batch, models = None, batch_of(config), []
    for layers in stages:
        like = {"dtype": torch.float64, "seed": 11, "recompute": recompute}
        model = VisionEncoder(
            config, state, layers=layers, sequence_parallel=sequence_parallel, **like
        )
        spread(model, state.layout, state.rank)
        models.append(model)
        x = model(x, batch)
    x["classes"].backward()
    grads = {}
    for model in models:
        for name, param in model.named_parameters():
            grad = param.grad.clone()
            if "tp" in sharding_of(param).partial_grad and tp > 1:
                torch.distributed.all_reduce(grad, group=state.group("tp"))
            grads[name] = grad, offsets_of(param, state.layout, state.rank)
    return x["classes"].detach(), int(x["tokens"]), grads


@pytest.mark.parametrize(
    ("variant", "sequence_parallel", "recompute"),
    sample(product(VARIANTS, (False, True), ("none", "selective", "full")), every=5),
)
def test_every_layout_matches_one_rank(ranks, variant, sequence_parallel, recompute):
    loss, tokens, grads = on_rank(variant, 1, [range(3)], False, "none")
    stages = [range(3)] if recompute == "none" else [range(1), range(1, 3)]
    for got_loss, got_tokens, got in ranks(
        2, on_rank, variant, 2, stages, sequence_parallel, recompute
    ):
        assert got_tokens == tokens == 3
        assert torch.allclose(got_loss, loss, rtol=1e-10, atol=0)
        assert got.keys() == grads.keys()
        for name, (grad, offsets) in got.items():
            box = tuple(slice(o, o + s) for o, s in zip(offsets, grad.shape, strict=True))
            expected = grads[name][0][box]
            assert (grad - expected).norm() <= 1e-10 * expected.norm(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_rank_starts_from_its_part_of_the_values_of_one_rank(variant):
    config, layout, seen = config_of(variant), ParallelLayout(tp=2, pp=2), set()
    whole = dict(VisionEncoder(config, seed=5).named_parameters())
    for rank in range(layout.world_size):
        with fake_world(layout.world_size, rank):
            state = ParallelState(layout, device="cpu")
            layers = (range(1), range(1, 3))[state.index("pp")]
            model = VisionEncoder(config, state, layers=layers, seed=5)
            for name, param in model.named_parameters():
                start = offsets_of(param, layout, rank)
                box = tuple(slice(s, s + n) for s, n in zip(start, param.shape, strict=True))
                assert torch.equal(whole[name][box], param), name
                if is_owner(sharding_of(param), layout, rank):
                    seen.add(name)
    assert seen == whole.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_as_many_as_the_sizes_say(variant):
    config = config_of(variant)
    model = VisionEncoder(config, device="meta")
    assert sum(param.numel() for param in model.parameters()) == config.num_parameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_comes_back_from_json_and_knows_its_class(variant):
    config = config_of(variant)
    plain = json.loads(json.dumps(config.to_dict()))
    assert VisionConfig.from_dict(plain) == config
    assert StackConfig.from_dict(plain) == config
    assert type(StackConfig.from_dict(plain).build(device="meta")) is VisionEncoder
    with pytest.raises(SchemaError, match="'vision' is not known here"):
        ModelConfig.from_dict(plain)


def test_a_language_model_is_what_has_no_type():
    config = gpt(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2)
    assert StackConfig.from_dict(config.to_dict()) == config


def test_flops_of_an_image_are_those_of_its_products():
    config = vision_preset("vit-base")
    tokens, hidden = 197, 768
    layer = 24 * hidden * hidden * tokens + 4 * hidden * tokens * tokens
    expected = 12 * layer + 2 * hidden * (16 * 16 * 3) * 196 + 2 * hidden * 1000
    assert config.flops_per_image == 3 * expected
    assert config.flops_per_token(197) == 3 * expected // 197
    with pytest.raises(ValueError, match="images have 197 tokens"):
        config.flops_per_token(512)
    siglip = vision_preset("siglip-base")
    without = replace(siglip, pooling=None)
    more = 2 * hidden * hidden * (2 + 2 * 196) + 4 * hidden * 196 + 16 * hidden * hidden
    assert siglip.flops_per_image - without.flops_per_image == 3 * more


# From the published checkpoints; SigLIP's has the pooling.
PUBLISHED = {
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "clip-vit-base-32": 87_456_000 + 393_216,
    "clip-vit-large-14-336": 303_507_456 + 786_432,
    "siglip-base": 92_884_224,
    "siglip-so400m-14-384": 428_225_600,
}


@pytest.mark.parametrize("name", VISION_PRESETS)
def test_presets_have_their_published_sizes(name):
    config = vision_preset(name)
    assert config.num_parameters == PUBLISHED.get(name, config.num_parameters)
    smaller = vision_preset(name, num_layers=1, hidden_size=64, num_heads=4)
    model = VisionEncoder(smaller, device="meta")
    assert sum(param.numel() for param in model.parameters()) == smaller.num_parameters


def test_the_table_has_rows_for_layers_and_for_what_is_around_them():
    text = str(vision_preset("siglip-so400m-14-384"))
    assert "0-26" in text
    assert "patches 14 x 14 x 3" in text
    assert "attention pooling" in text
    assert f"{vision_preset('siglip-so400m-14-384').num_parameters:,}" in text
    text = str(vision_preset("clip-vit-large-14-336"))
    assert "class token" in text
    assert "positions [577]" in text
    assert "projection [768]" in text
    assert "embedding_norm" in text
    assert "classes [1000]" in str(vision_preset("vit-base"))


def test_patches_are_those_of_a_convolution():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 13, 11, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 3, 4, 5, generator=generator, dtype=torch.float64)
    expected = F.conv2d(images, weight, stride=(4, 5)).flatten(2).transpose(1, 2)
    got = cut_patches(images, (4, 5)) @ weight.flatten(1).T
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_it_learns_which_half_of_an_image_is_bright():
    model = VisionEncoder(vit(**{**TINY, "num_classes": 2, "init_std": 0.05}), seed=1)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(32) % 2
    images = 0.1 * torch.randn(32, 3, 12, 12, generator=generator)
    images[labels == 1, :, :, 6:] += 1
    images[labels == 0, :, :, :6] += 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        losses = model(images, labels=labels)
        (losses["classes"] / losses["tokens"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses["classes"] / losses["tokens"] < 0.05
    assert torch.equal(model(images).argmax(-1), labels)


def test_features_of_a_layer_don_t_run_those_behind_it():
    config = config_of("clip")
    model, images = VisionEncoder(config).eval(), batch_of(config)["images"]
    whole = model.features(images, layer=-2)
    assert torch.equal(whole, model.features(images, layer=1))
    assert torch.equal(whole[:, 1:], model.features(images, layer=1, class_token=False))
    model.layers["2"].forward = None
    assert torch.equal(whole, model.features(images, layer=-2))
    assert whole.shape == (4, 10, 16)
    with pytest.raises(ValueError, match="layer=3 is not between -3 and 2"):
        model.features(images, layer=3)


def features_of_ranks(variant):
    """Features and pooled ones, and the gradient of the patches' weight, under sp and without."""
    config, found = config_of(variant), []
    images = batch_of(config)["images"].double()
    for tp, parallel in ((1, False), (2, False), (2, True)):
        state = ParallelState(ParallelLayout(tp=2)) if tp == 2 else None
        model = VisionEncoder(config, state, sequence_parallel=parallel, dtype=torch.float64).eval()
        middle, last = model.features(images, layer=-2), model.features(images)
        (middle.square().sum() + model.pool(last).square().sum()).backward()
        weight = model.embedding.patches.weight
        if "tp" in sharding_of(weight).partial_grad:
            torch.distributed.all_reduce(weight.grad, group=state.group("tp"))
        found.append((middle.detach(), last.detach(), weight.grad))
    return found


@pytest.mark.parametrize("variant", ["clip", "clip_odd", "siglip"])
def test_features_are_whole_on_every_rank(ranks, variant):
    for expected, *others in ranks(2, features_of_ranks, variant):
        for found in others:
            for a, b in zip(found, expected, strict=True):
                assert (a - b).norm() <= 1e-10 * b.norm()


def attention_dropout_with_padding():
    config = vit(**{**TINY, "class_token": False, "pooling": "attention", "attention_dropout": 0.1})
    with ParallelState(ParallelLayout(tp=2)) as state:
        model = VisionEncoder(config, state, sequence_parallel=True)
        with pytest.raises(ValueError, match="1 tokens of padding that 9 tokens need for tp=2"):
            model(None, batch_of(config))
        return model.eval()(batch_of(config)["images"]).shape


def test_dropout_that_padding_would_change_is_refused(ranks):
    assert ranks(2, attention_dropout_with_padding) == [(4, 5), (4, 5)]


def refused(match, **options):
    with pytest.raises(FieldError, match=match):
        vit(**{**TINY, **options})


def test_configs_say_what_does_not_fit():
    refused("patch_size: .*larger than image_size", patch_size=13)
    refused("image_size: .*use sizes of 1 to", image_size=0)
    refused("hidden_size: 16 is not a multiple of num_heads=3", num_heads=3)
    refused("pooling: .*class_token is False", class_token=False)
    refused("num_classes: 5 without a pooling", pooling=None)
    refused("projection_size: does not go with num_classes", projection_size=4)
    refused("pooling: .*attention", pooling="atention")
    refused("num_channels", num_channels=0)
    mixer = config_of("vit").layers[0].mixer
    layer = replace(config_of("vit").layers[0], mixer=replace(mixer, rope=RopeConfig()))
    with pytest.raises(FieldError, match="layer 1 has a rope"):
        replace(config_of("vit"), layers=(config_of("vit").layers[0], layer))
    odd = AttentionPoolingConfig(num_heads=3, head_dim=4, feed_forward=MLPConfig(ffn_size=24))
    config = vit(**{**TINY, "pooling": odd})
    with pytest.raises(FieldError, match=r"0\.1, and a pooling drops nothing; leave it out"):
        replace(odd, feed_forward=MLPConfig(ffn_size=24, dropout=0.1))
    with pytest.raises(ValueError, match=r"num_heads=3 does not divide by tp=2.*\(pooling\)"):
        config.check_split(2)
    with pytest.raises(FieldError, match="vit-bas"):
        vision_preset("vit-bas")
    with pytest.raises(FieldError, match="Did you mean num_heads"):
        vision_preset("vit-base", num_head=2)


def test_passes_say_what_is_missing_or_of_another_shape():
    config = config_of("vit")
    model, batch = VisionEncoder(config), batch_of(config)
    with pytest.raises(ValueError, match="dropout in training needs"):
        model(batch["images"])
    model.eval()
    with pytest.raises(TypeError, match="images must be a floating-point tensor"):
        model(batch["images"].long())
    with pytest.raises(TypeError, match="images must be a floating-point tensor"):
        model(None, {})
    with pytest.raises(TypeError, match="batch must be a mapping"):
        model(None, [batch["images"]])
    with pytest.raises(ValueError, match=r"images must be \[B, 3, 12, 12\], got \(4, 3, 12, 11\)"):
        model(batch["images"][..., :11])
    with pytest.raises(ValueError, match=r"labels must be \[4\]"):
        model(batch["images"], labels=batch["labels"][:3])
    with pytest.raises(TypeError, match="labels must be a tensor of integers"):
        model(batch["images"], labels=batch["labels"].float())
    with pytest.raises(ValueError, match="in the batch"):
        model(None, batch, labels=batch["labels"])
    plain = VisionEncoder(replace(config, num_classes=None)).eval()
    with pytest.raises(ValueError, match="the model has no classes"):
        plain(batch["images"], labels=batch["labels"])
    with pytest.raises(ValueError, match="with a pooling pools"):
        VisionEncoder(replace(config, num_classes=None, pooling=None)).pool(batch["images"])
    stage = VisionEncoder(config, layers=range(1, 3)).eval()
    with pytest.raises(ValueError, match="only the first stage starts from images"):
        stage(None, batch)
    with pytest.raises(ValueError, match=r"features\(\) needs the whole model"):
        stage.features(batch["images"])
    with pytest.raises(TypeError, match="config must be a VisionConfig"):
        VisionEncoder(gpt(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2))
    with fake_world(2, 0):
        state = ParallelState(ParallelLayout(cp=2), device="cpu")
        with pytest.raises(ValueError, match="can't share an image"):
            VisionEncoder(config, state)
