"""ViT: Vision Transformers with classes or with a pooler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mt_files import Checks, to_plain
from mt_model import ClassPoolingConfig, VisionConfig

from mt_hf.family.decoder import first_layer
from mt_hf.family.encoder import (
    EncoderFields,
    encoder_config,
    encoder_fields,
    encoder_layer_links,
    patch_shape,
)
from mt_hf.family.family import Family
from mt_hf.family.link import Link, leaves

_WITH_CLASSES, _WITH_POOLER = "ViTForImageClassification", "ViTModel"


@dataclass(frozen=True, kw_only=True)
class ViTFields(EncoderFields):
    """The fields of a ViT's config.json, with the defaults of transformers.

    The number of classes is the length of `id2label`. `encoder_stride` belongs to an
    unsupported head, and a model with classes has no pooler.
    """

    layer_norm_eps: float = 1e-12
    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    qkv_bias: bool = True
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    initializer_range: float = 0.02
    pooler_output_size: int | None = None
    pooler_act: str = "tanh"
    id2label: Mapping[str, Any] | None = None
    num_labels: int | None = None
    encoder_stride: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        checks.at_least(1, "pooler_output_size")
        if self.has_classes:
            if not self.num_classes:
                checks.add("num_labels", "0: a model without classes is read as a ViTModel only")
        elif self.pooler_act != "tanh":
            checks.add("pooler_act", f"{self.pooler_act!r} is not built; it is 'tanh'")
        checks.done()

    @property
    def has_classes(self) -> bool:
        """Whether there are classes, rather than a pooler."""
        return self.architecture != _WITH_POOLER

    @property
    def num_classes(self) -> int:
        """Number of classes; two by default."""
        if self.id2label is not None:
            return len(self.id2label)
        return 2 if self.num_labels is None else self.num_labels


def _read(given: ViTFields) -> VisionConfig:
    dense = None if given.has_classes else given.pooler_output_size or given.hidden_size
    return encoder_config(
        given,
        eps=given.layer_norm_eps,
        attention_dropout=given.attention_probs_dropout_prob,
        qkv_bias=given.qkv_bias,
        image_size=_pair(given.image_size),
        patch_size=_pair(given.patch_size),
        dropout=given.hidden_dropout_prob,
        init_std=given.initializer_range or VisionConfig.init_std,
        pooling=ClassPoolingConfig(dense_size=dense),
        num_classes=given.num_classes if given.has_classes else None,
    )


def _write(config: VisionConfig) -> dict[str, Any]:
    mixer, _ = first_layer(config)
    pooling, classes = config.pooling, config.num_classes
    if not isinstance(pooling, ClassPoolingConfig):
        raise ValueError("pooling is not that of the class token")  # noqa: TRY004
    labels = None
    if classes is not None:
        labels = {str(index): f"LABEL_{index}" for index in range(classes)}
    fields = ViTFields(
        **encoder_fields(config, _WITH_POOLER if classes is None else _WITH_CLASSES),
        layer_norm_eps=config.norm.eps,
        image_size=_number(config.image_size),
        patch_size=_number(config.patch_size),
        qkv_bias=mixer.qkv_bias,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=mixer.dropout,
        initializer_range=config.init_std,
        pooler_output_size=pooling.dense_size,
        id2label=labels,
    )
    return {name: value for name, value in to_plain(fields).items() if value is not None}


def _links(config: VisionConfig) -> Iterator[Link]:
    hidden = config.hidden_size
    classes = config.num_classes
    prefix = "" if classes is None else "vit."
    first = f"{prefix}embeddings"
    yield from leaves(
        f"{first}.patch_embeddings.projection", "embedding.patches", *patch_shape(config)
    )
    shape, target = (1, 1, hidden), "embedding.class_token"
    yield Link(source=f"{first}.cls_token", shape=shape, target=target)
    shape, target = (1, config.max_sequence_length, hidden), "embedding.positions.weight"
    yield Link(source=f"{first}.position_embeddings", shape=shape, target=target)
    for index, layer in enumerate(config.layers):
        source, target = f"{prefix}encoder.layer.{index}", f"layers.{index}"
        yield from encoder_layer_links(source, target, layer, hidden, inner="attention")
        yield from leaves(f"{source}.layernorm_before", f"{target}.mixer_norm", hidden)
        yield from leaves(f"{source}.layernorm_after", f"{target}.feed_forward_norm", hidden)
    yield from leaves(f"{prefix}layernorm", "final_norm", hidden)
    if classes is None:
        yield from leaves("pooler.dense", "pooling.dense", config.pooled_size, hidden)
    else:
        yield from leaves("classifier", "classifier", classes, hidden)


def _number(size: tuple[int, int]) -> int | tuple[int, int]:
    return size[0] if size[0] == size[1] else size


FAMILY = Family(
    name="vit",
    architectures=(_WITH_CLASSES, _WITH_POOLER),
    fields=ViTFields,
    builds=VisionConfig,
    read=_read,
    write=_write,
    links=_links,
    ignored=(),
    copies=(),
)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width; one number means both."""
    return (size, size) if isinstance(size, int) else size
