"""Rows of the families of encoders of images, as `family_row.Row` has them."""

import pytest
import torch
from family_row import Row
from mt_testing import sample

SIZES = [
    {"hidden_size": 24, "num_attention_heads": 4, "image_size": 12, "patch_size": 4},
    {"hidden_size": 32, "num_attention_heads": 2, "image_size": 15, "patch_size": 6},
    {"hidden_size": 16, "num_attention_heads": 4, "image_size": 8, "patch_size": 4},
]


def sizes(index, random):
    """Arguments of a config of a small encoder."""
    return {
        **SIZES[index],
        "intermediate_size": 4 * random.randint(5, 12),
        "num_hidden_layers": 3,
        "num_channels": (3, 1, 2)[index],
        "hidden_act": random.choice(["gelu", "quick_gelu", "gelu_pytorch_tanh"]),
        "layer_norm_eps": random.choice([1e-5, 1e-6, 1e-12]),
    }


def vit(index, random):
    wide = {"image_size": [8, 12], "patch_size": [4, 2]} if index == 2 else {}
    return {**sizes(index, random), "qkv_bias": index != 1, **wide}


def classes(index, random):
    return {**vit(index, random), "num_labels": (5, 2, 11)[index]}


def pooler(index, random):
    return {**vit(index, random), "pooler_output_size": (None, 7, 12)[index]}


def clip(index, random):
    return {**sizes(index, random), "projection_dim": random.randint(5, 20)}


def siglip(index, random):
    return {**sizes(index, random), "vision_use_head": index != 2}


_CLIP = {"name": "clip_vision", "module": "clip", "config": "CLIPVisionConfig"}
ROWS = [
    Row(name="vit", model="ViTForImageClassification", draw=classes, draws=3),
    Row(name="vit", model="ViTModel", draw=pooler, draws=3),
    Row(**_CLIP, model="CLIPVisionModel", draw=clip, draws=3),
    Row(**_CLIP, model="CLIPVisionModelWithProjection", draw=clip, draws=3),
    Row(
        name="siglip_vision",
        module="siglip",
        config="SiglipVisionConfig",
        model="SiglipVisionModel",
        draw=siglip,
        draws=3,
    ),
]
_DRAWN = [(row, i) for row in ROWS for i in range(row.draws)]


def _name(row, index):
    return f"{row.model}-{index}"


DRAWS = sample(_DRAWN, every=1, name=_name)
SOME_DRAWS = sample(_DRAWN, every=2, name=_name)
FIRST = [pytest.param(row, id=row.model) for row in ROWS]


def images_of(config, rows=3):
    """Random images for a config of ours."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, config.num_channels, *config.image_size, generator=generator)
