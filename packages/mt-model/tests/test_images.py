"""Images in a text: what a model of them is made of, and that no layout changes a number."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from mt_context_parallel import shard
from mt_files import FieldError
from mt_model import (
    GPT,
    ClassPoolingConfig,
    ImageInputConfig,
    ModelConfig,
    StackConfig,
    expand_image_tokens,
    expected_bytes,
    gpt,
    vit,
)
from mt_parallel_state import (
    ParallelLayout,
    ParallelState,
    is_owner,
    offsets_of,
    sharding_of,
)
from mt_testing import fake_world, sample
from torch.utils.flop_counter import FlopCounterMode

IMAGE = 41
TOWER = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 12,
    "num_layers": 3,
    "num_heads": 2,
    "ffn_size": 20,
    "init_std": 0.4,
    "pooling": None,
}
TEXT = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 24,
    "max_sequence_length": 32,
    "init_std": 0.3,
}
# By name: the encoder, how the model takes images, and the model.
VARIANTS = {
    "clip": ({"embedding_norm": True, "pooling": ClassPoolingConfig(norm=True)}, {}, {}),
    "siglip": (
        {"class_token": False, "pooling": "attention", "dropout": 0.1},
        {"feature_layers": (-1,), "drop_first": False, "activation": "gelu_tanh"},
        {"tied": False},
    ),
    "several": (
        {"attention_dropout": 0.0, "patch_bias": False},
        {"feature_layers": (0, -1), "bias": False},
        {"dropout": 0.1, "positions": "learned", "embedding_scale": 3.0},
    ),
}


def config_of(variant):
    tower, images, text = VARIANTS[variant]
    images = ImageInputConfig(tower=vit(**{**TOWER, **tower}), token_id=IMAGE, **images)
    return gpt(**{**TEXT, **text}, images=images)


def batch_of(config):
    """Two images in the first row, next to each other; one in the second, at its end."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, IMAGE, (2, 16), generator=generator)
    tokens[0, 3 : 3 + 2 * config.images.num_tokens] = IMAGE
    tokens[1, -config.images.num_tokens :] = IMAGE
    labels = tokens.roll(-1, 1).masked_fill(tokens.roll(-1, 1) == IMAGE, -100)
    tower = config.images.tower
    pixels = torch.randn(3, tower.num_channels, *tower.image_size, generator=generator)
    ids = torch.tensor([7, 3])
    return {"tokens": tokens, "labels": labels, "pixel_values": pixels, "sample_ids": ids}


def on_rank(variant, sizes, stages, sequence_parallel=False, recompute="none"):
    """The loss, and each gradient with its offsets, through stages of these layers."""
    config, state = config_of(variant), ParallelState(ParallelLayout(**sizes))
    batch, context = batch_of(config), state.group("cp")
    for name in ("tokens", "labels"):
        batch[name] = shard(batch[name], context)
    x, models = None, []
    for layers in stages:
        like = {"dtype": torch.float64, "seed": 11, "recompute": recompute}
        models.append(
            GPT(config, state, layers=layers, sequence_parallel=sequence_parallel, **like)
        )
        x = models[-1](x, batch)
    x["lm"].backward()
    loss, grads = x["lm"].detach(), {}
    for model in models:
        for name, param in model.named_parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
            if "tp" in sharding_of(param).partial_grad and state.size("tp") > 1:
                dist.all_reduce(grad, group=state.group("tp"))
            if name in grads:
                grad += grads[name][0]
            grads[name] = grad, offsets_of(param, state.layout, state.rank)
    if context is not None:
        for part in (loss, *(grad for grad, _ in grads.values())):
            dist.all_reduce(part, group=context)
    return loss, grads


LAYOUTS = [
    ({"tp": 2}, [range(2)], False, "none"),
    ({"tp": 2}, [range(1), range(1, 2)], True, "selective"),
    ({"tp": 1}, [range(1), range(1, 2)], False, "full"),
    ({"cp": 2}, [range(2)], False, "none"),
    ({"tp": 2, "cp": 2}, [range(2)], True, "full"),
]


@pytest.mark.parametrize(
    ("variant", "layout"),
    sample([(name, layout) for layout in LAYOUTS for name in VARIANTS], every=4),
)
def test_every_layout_matches_one_rank(ranks, variant, layout):
    loss, grads = on_rank(variant, {}, [range(2)])
    if "dropout" not in VARIANTS[variant][2]:
        assert grads["images.tower.layers.0.mixer.qkv.weight"][0].norm() > 0
    world = ParallelLayout(**layout[0]).world_size
    for got_loss, got in ranks(world, on_rank, variant, *layout):
        assert torch.allclose(got_loss, loss, rtol=1e-10, atol=0)
        assert got.keys() == grads.keys()
        for name, (grad, offsets) in got.items():
            box = tuple(slice(o, o + s) for o, s in zip(offsets, grad.shape, strict=True))
            expected = grads[name][0][box]
            assert (grad - expected).norm() <= 1e-10 * max(expected.norm(), 1e-6), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_rank_starts_from_its_part_of_the_values_of_one_rank(variant):
    config, layout = config_of(variant), ParallelLayout(tp=2, pp=2)
    whole, seen = GPT(config, dtype=torch.float64, seed=2), set()
    for rank in range(4):
        with fake_world(4, rank):
            state = ParallelState(layout, rank=rank)
            stage = state.index("pp")
            model = GPT(config, state, layers=range(stage, stage + 1), dtype=torch.float64, seed=2)
            for name, param in model.named_parameters():
                offsets = offsets_of(param, layout, rank)
                box = tuple(slice(o, o + s) for o, s in zip(offsets, param.shape, strict=True))
                assert torch.equal(param, whole.get_parameter(name)[box]), name
                if is_owner(sharding_of(param), layout, rank):
                    seen.add(name)
                assert not name.startswith("images.") or stage == 0
    assert seen == dict(whole.named_parameters()).keys()
    tower = whole.get_parameter("images.tower.layers.0.feed_forward.up.weight")
    assert tower.std().item() == pytest.approx(0.4, rel=0.2)
    projector = whole.get_parameter("images.projector.up.weight")
    assert projector.std().item() == pytest.approx(0.3, rel=0.2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_comes_back_and_counts_its_parameters(variant):
    config = config_of(variant)
    plain = json.loads(json.dumps(config.to_dict()))
    assert StackConfig.from_dict(plain) == ModelConfig.from_dict(plain) == config
    assert gpt(**config.to_dict()) == config
    model = GPT(config, device="meta")
    assert config.num_parameters == sum(param.numel() for param in model.parameters())
    assert f"images [3 layers, {config.images.num_tokens} tokens each]" in str(config)
    assert config.flops_per_token(16) == replace(config, images=None).flops_per_token(16)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("frozen", [(), ("tower",), ("projector",), ("tower", "projector")])
def test_flops_of_an_image_are_those_that_torch_counts(variant, frozen):
    config = config_of(variant)
    images, tower, hidden = config.images, config.images.tower, config.hidden_size
    model = GPT(config, kernels="reference")
    for name in frozen:
        model.images.get_submodule(name).requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        found = model.images.features(batch_of(config)["pixel_values"], torch.arange(3))
        if len(frozen) < 2:
            found.sum().backward()
    # A backward of twice the forward has products that nothing asks for.
    up, down = hidden * images.feature_size * images.num_tokens, hidden**2 * images.num_tokens
    pixels = tower.hidden_size * tower.patch_elements * tower.num_patches
    unused = {(): pixels, ("tower",): up, ("projector",): pixels + up + down}.get(frozen, 0)
    assert counter.get_total_flops() / 3 == model.images.flops_per_image - 2 * unused


def test_features_stand_where_the_image_tokens_are():
    config = config_of("clip")
    model = GPT(config, dtype=torch.float64).eval()
    batch = batch_of(config)
    del batch["labels"]
    x = model.embedding(batch["tokens"])
    features = model.images.features(batch["pixel_values"].double())
    assert features.shape == (3, 4, 16)
    x[0, 3:11], x[1, 12:] = features[:2].flatten(0, 1), features[2]
    with torch.no_grad():
        assert torch.equal(model(None, batch), model(None, {"embeddings": x}))
        both = model.images.tower.features(batch["pixel_values"].double(), layer=(0, -1))
        first = model.images.tower.features(batch["pixel_values"].double(), layer=0)
    assert both.shape == (3, 5, 24)
    assert torch.equal(both[..., :12], first)


def test_a_frozen_encoder_changes_no_other_gradient():
    config, found = config_of("clip"), []
    for frozen in (False, True):
        model = GPT(config, dtype=torch.float64)
        model.images.tower.requires_grad_(not frozen)
        model(None, batch_of(config))["lm"].backward()
        found.append({name: param.grad for name, param in model.named_parameters()})
    for name, grad in found[1].items():
        if name.startswith("images.tower."):
            assert grad is None
        else:
            assert torch.equal(grad, found[0][name]), name
    assert found[0]["images.tower.embedding.patches.weight"] is not None


def test_layers_keep_what_a_row_with_its_images_lets_expect():
    model, batch = GPT(config_of("siglip")), batch_of(config_of("siglip"))
    expected = expected_bytes(model, batch)
    with model.watch_activations() as kept:
        model(None, batch)
    assert [expected[i].device for i in range(2)] == [kept[i].device for i in range(2)]


def test_it_learns_what_is_in_an_image():
    """The token behind an image says which half of it is bright."""
    torch.manual_seed(0)
    images = ImageInputConfig(tower=vit(**TOWER), token_id=IMAGE)
    model = GPT(gpt(**TEXT, images=images), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        answer = torch.randint(0, 2, (16,))
        pixels = 0.3 * torch.randn(16, 3, 8, 8)
        pixels[answer == 1, :, :4] += 1
        pixels[answer == 0, :, 4:] += 1
        row = expand_image_tokens([1, IMAGE, 2], images, num_images=1)
        tokens = torch.tensor([row] * 16)
        labels = torch.full_like(tokens, -100)
        labels[:, -1] = answer
        losses = model(None, {"tokens": tokens, "labels": labels, "pixel_values": pixels})
        (losses["lm"] / losses["tokens"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses["lm"] / losses["tokens"] < 0.1


def test_logits_of_a_model_in_training_drop_nothing():
    config = config_of("siglip")
    model, batch = GPT(config), batch_of(config)
    assert config.drops
    assert not replace(config, images=None).drops
    given = {"pixel_values": batch["pixel_values"]}
    first = model.logits(batch["tokens"], **given)
    assert torch.equal(first, model.logits(batch["tokens"], **given))
    with pytest.raises(ValueError, match="dropout in training needs"):
        model(None, {"tokens": batch["tokens"], **given})


def test_image_tokens_are_expanded():
    images = config_of("clip").images
    assert expand_image_tokens([IMAGE, 1, IMAGE], images) == [*[IMAGE] * 4, 1, *[IMAGE] * 4]
    assert expand_image_tokens([], images, num_images=0) == []
    with pytest.raises(ValueError, match=r"have 1 image tokens \(41\), and there are 2 images"):
        expand_image_tokens([IMAGE, 1], images, num_images=2)


def test_passes_say_what_does_not_fit():
    config = config_of("clip")
    model, batch = GPT(config).eval(), batch_of(config)
    with pytest.raises(ValueError, match=r"12 image tokens \(41\).* 2 images of 4, which is 8"):
        model(None, {**batch, "pixel_values": batch["pixel_values"][:2]})
    with pytest.raises(ValueError, match=r"images must be \[B, 3, 8, 8\], got \(3, 3, 8, 7\)"):
        model(None, {**batch, "pixel_values": batch["pixel_values"][..., :7]})
    with pytest.raises(TypeError, match="images must be a floating-point tensor"):
        model(None, {**batch, "pixel_values": batch["pixel_values"].long()})
    with pytest.raises(ValueError, match="do not go with embeddings"):
        model(None, {"embeddings": torch.zeros(2, 16, 16), "pixel_values": batch["pixel_values"]})
    text = GPT(gpt(**TEXT)).eval()
    with pytest.raises(ValueError, match="the model takes no images"):
        text(None, batch)


def test_configs_say_what_does_not_fit():
    tower = vit(**TOWER)
    for match, given in (
        ("token_id: -1", {"token_id": -1}),
        ("feature_layers: an empty list", {"feature_layers": ()}),
        ("feature_layers: 3 is not between -3 and 2", {"feature_layers": (0, 3)}),
        ("has num_classes=5", {"tower": vit(**{**TOWER, "pooling": "class"}, num_classes=5)}),
    ):
        with pytest.raises(FieldError, match=match):
            ImageInputConfig(**{"tower": tower, "token_id": 1, **given})
    one = vit(**{**TOWER, "patch_size": 8, "class_token": False})
    with pytest.raises(FieldError, match="leaves nothing of an image"):
        ImageInputConfig(tower=one, token_id=1)
    with pytest.raises(FieldError, match="token_id=48 is not below vocab_size=48"):
        gpt(**TEXT, images=ImageInputConfig(tower=tower, token_id=48))
    with pytest.raises(FieldError, match=r"images\.tower\.hidden_size: missing"):
        gpt(**TEXT, images={"tower": {}, "token_id": 1})
    with pytest.raises(ValueError, match=r"num_heads=2 .*images\.tower"):
        config_of("clip").check_split(4)
