"""SigLIP's image encoder, with or without its attention pooling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mt_model import AttentionPoolingConfig, VisionConfig

from mt_hf.family.decoder import first_layer
from mt_hf.family.encoder import (
    EncoderFields,
    clip_links,
    clip_mlp_links,
    encoder_config,
    encoder_fields,
    only_square,
)
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves


@dataclass(frozen=True, kw_only=True)
class SiglipVisionFields(EncoderFields):
    """The fields of a SigLIP vision config.json, with the defaults of transformers."""

    layer_norm_eps: float = 1e-6
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    attention_dropout: float = 0.0
    vision_use_head: bool = True


def _read(given: SiglipVisionFields) -> VisionConfig:
    pooling = AttentionPoolingConfig(
        num_heads=given.num_attention_heads, head_dim=given.head_dim, feed_forward=given.mlp
    )
    return encoder_config(
        given,
        eps=given.layer_norm_eps,
        attention_dropout=given.attention_dropout,
        image_size=(given.image_size,) * 2,
        patch_size=(given.patch_size,) * 2,
        class_token=False,
        pooling=pooling if given.vision_use_head else None,
    )


def _write(config: VisionConfig) -> SiglipVisionFields:
    mixer, _ = first_layer(config)
    return SiglipVisionFields(
        **encoder_fields(config, "SiglipVisionModel"),
        **only_square(config),
        layer_norm_eps=config.norm.eps,
        attention_dropout=mixer.dropout,
        vision_use_head=config.pooling is not None,
    )


def _links(config: VisionConfig) -> Iterator[Link]:
    hidden, pooling = config.hidden_size, config.pooling
    yield from clip_links(config)
    yield from leaves("post_layernorm", "final_norm", hidden)
    if not isinstance(pooling, AttentionPoolingConfig):
        return
    yield Link(source="head.probe", shape=(1, 1, hidden), target="pooling.query")
    name, target = "head.attention", "pooling.attention"
    for leaf, shape in (("weight", (3 * hidden, hidden)), ("bias", (3 * hidden,))):
        for index, part in enumerate(("query", "key_value", "key_value")):
            yield Link(
                source=f"{name}.in_proj_{leaf}",
                shape=shape,
                target=f"{target}.{part}.{leaf}",
                part={0: (index * hidden, (index + 1) * hidden)},
                box={1: (index - 1, index)} if index else {},
            )
    yield from leaves(f"{name}.out_proj", f"{target}.out", hidden, hidden)
    yield from leaves("head.layernorm", "pooling.norm", hidden)
    ours = "pooling.feed_forward"
    yield from clip_mlp_links("head.mlp", ours, pooling.feed_forward, hidden)


FAMILY = Family(
    name="siglip_vision",
    architectures=("SiglipVisionModel",),
    model_types=("siglip_vision_model",),
    fields=SiglipVisionFields,
    builds=VisionConfig,
    read=_read,
    write=_write,
    links=_links,
    ignored=("embeddings.position_ids",),
    copies=(),
    wrapper="vision_model.",
)
