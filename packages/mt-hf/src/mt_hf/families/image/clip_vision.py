"""CLIP's image encoder, with or without its projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mt_model import ClassPoolingConfig, VisionConfig

from mt_hf.family.decoder import first_layer
from mt_hf.family.encoder import (
    EncoderFields,
    clip_links,
    encoder_config,
    encoder_fields,
    only_square,
)
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves

_WITHOUT, _WITH_PROJECTION = "CLIPVisionModel", "CLIPVisionModelWithProjection"


@dataclass(frozen=True, kw_only=True)
class ClipVisionFields(EncoderFields):
    """The fields of a CLIP vision config.json, with the defaults of transformers.

    `initializer_factor` only scales initial values, and nothing reads the old field `dropout`.
    """

    layer_norm_eps: float = 1e-5
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "quick_gelu"
    attention_dropout: float | None = 0.0
    projection_dim: int = 512
    initializer_range: float = 0.02
    initializer_factor: float = 1.0
    dropout: float = 0.0


def _read(given: ClipVisionFields) -> VisionConfig:
    projects = given.architecture == _WITH_PROJECTION
    return encoder_config(
        given,
        eps=given.layer_norm_eps,
        attention_dropout=given.attention_dropout or 0.0,
        image_size=(given.image_size,) * 2,
        patch_size=(given.patch_size,) * 2,
        patch_bias=False,
        embedding_norm=True,
        final_norm=False,
        init_std=given.initializer_range or VisionConfig.init_std,
        pooling=ClassPoolingConfig(norm=True),
        projection_size=given.projection_dim if projects else None,
    )


def _write(config: VisionConfig) -> ClipVisionFields:
    mixer, _ = first_layer(config)
    size = config.projection_size
    return ClipVisionFields(
        **encoder_fields(config, _WITHOUT if size is None else _WITH_PROJECTION),
        **only_square(config),
        layer_norm_eps=config.norm.eps,
        attention_dropout=mixer.dropout,
        projection_dim=ClipVisionFields.projection_dim if size is None else size,
        initializer_range=config.init_std,
    )


def _links(config: VisionConfig) -> Iterator[Link]:
    hidden, size = config.hidden_size, config.projection_size
    prefix = "" if size is None else "vision_model."
    yield from clip_links(config, prefix)
    source = f"{prefix}embeddings.class_embedding"
    yield Link(source=source, shape=(hidden,), target="embedding.class_token")
    yield from leaves(f"{prefix}pre_layrnorm", "embedding.norm", hidden)
    yield from leaves(f"{prefix}post_layernorm", "pooling.norm", hidden)
    if size is not None:
        yield from leaves("visual_projection", "projection", size, hidden, bias=False)


FAMILY = Family(
    name="clip_vision",
    architectures=(_WITHOUT, _WITH_PROJECTION),
    model_types=("clip_vision_model",),
    fields=ClipVisionFields,
    builds=VisionConfig,
    read=_read,
    write=_write,
    links=_links,
    ignored=("embeddings.position_ids",),
    copies=(),
    wrapper="vision_model.",
)
