"""Encoders of images, shared by several families."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from mt_files import Checks
from mt_model import (
    MAX_LAYERS,
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
    Sizes,
    VisionConfig,
)

from mt_hf.family.decoder import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    attention_links,
    check_activation,
    check_heads,
    first_layer,
)
from mt_hf.family.link import Link, leaves


@dataclass(frozen=True, kw_only=True)
class EncoderFields:
    """Fields of config.json that ViT, CLIP and SigLIP have in common.

    `architectures` decides what follows the layers. Defaults are taken from transformers, because a
    config.json may omit fields.
    """

    architectures: tuple[str, ...] | None = None
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    hidden_act: str = "gelu"

    def __post_init__(self) -> None:
        checks = Checks(self)
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        checks.at_least(1, *sizes, "num_channels")
        checks.at_most(MAX_LAYERS, "num_hidden_layers")
        check_activation(checks, "hidden_act", self.hidden_act)
        check_heads(checks, self.hidden_size, self.num_attention_heads)
        checks.done()

    @property
    def architecture(self) -> str | None:
        """The first of `architectures`, if any."""
        return self.architectures[0] if self.architectures else None

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def mlp(self) -> MLPConfig:
        """Feed-forward of each layer."""
        activation = ACTIVATIONS[self.hidden_act]
        return MLPConfig(
            ffn_size=self.intermediate_size, activation=activation, gated=False, bias=True
        )


def encoder_config(
    given: EncoderFields,
    *,
    eps: float,
    attention_dropout: float,
    qkv_bias: bool = True,
    **rest: Any,
) -> VisionConfig:
    """Return the model of a config.json.

    Args:
        given: Fields of the config.json.
        eps: Epsilon of the norms.
        attention_dropout: Dropout of attention weights.
        qkv_bias: Whether query, key and value projections have biases.
        rest: Further fields of `VisionConfig`.
    """
    mixer = AttentionConfig(
        num_heads=given.num_attention_heads,
        num_kv_heads=given.num_attention_heads,
        head_dim=given.head_dim,
        qkv_bias=qkv_bias,
        out_bias=True,
        causal=False,
        dropout=attention_dropout,
    )
    layer = LayerConfig(mixer=mixer, feed_forward=given.mlp, repeat=given.num_hidden_layers)
    return VisionConfig(
        hidden_size=given.hidden_size,
        layers=(layer,),
        norm=NormConfig(kind="layer", eps=eps),
        num_channels=given.num_channels,
        **rest,
    )


def encoder_fields(config: VisionConfig, architecture: str) -> dict[str, Any]:
    """Return the `EncoderFields` of a model whose layers equal the first one.

    Args:
        config: The model.
        architecture: Architecture of the family.

    Raises:
        ValueError: The first layer is not attention and an MLP.
    """
    mixer, mlp = first_layer(config)
    return {
        "architectures": (architecture,),
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_channels": config.num_channels,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
    }


def only_square(config: VisionConfig) -> dict[str, Any]:
    """Return the sizes of square images and patches, as one number each.

    Raises:
        ValueError: A height differs from its width.
    """
    for name in ("image_size", "patch_size"):
        height, width = getattr(config, name)
        if height != width:
            raise ValueError(f"{name} is {height} x {width}, and the family has squares only")
    return {"image_size": config.image_size[0], "patch_size": config.patch_size[0]}


def patch_shape(config: VisionConfig) -> Sizes:
    """Return the shape of the convolution's weight."""
    return (config.hidden_size, config.num_channels, *config.patch_size)


def encoder_layer_links(
    source: str, target: str, layer: LayerConfig, hidden: int, *, inner: str
) -> Iterator[Link]:
    """Yield the links of a layer's projections, with the names of BERT and ViT.

    Args:
        source: Prefix of the tensors.
        target: Prefix of the parameters.
        layer: The layer.
        hidden: Width of the residual stream.
        inner: Name of the module with the projections of queries, keys and values.
    """
    mixer, mlp = cast("AttentionConfig", layer.mixer), cast("MLPConfig", layer.feed_forward)
    attention, ffn = f"{source}.attention", mlp.ffn_size
    names = {"q": f"{inner}.query", "k": f"{inner}.key", "v": f"{inner}.value"}
    yield from attention_links(
        attention, f"{target}.mixer", mixer, hidden, names=names, out="output.dense"
    )
    yield from leaves(f"{source}.intermediate.dense", f"{target}.feed_forward.up", ffn, hidden)
    yield from leaves(f"{source}.output.dense", f"{target}.feed_forward.down", hidden, ffn)


def clip_links(config: VisionConfig, prefix: str = "") -> Iterator[Link]:
    """Yield the links of the embedding and the layers, by the tensor names of CLIP and SigLIP.

    Args:
        config: The model.
        prefix: Prefix of the tensors.
    """
    hidden, first = config.hidden_size, f"{prefix}embeddings"
    yield from leaves(
        f"{first}.patch_embedding",
        "embedding.patches",
        *patch_shape(config),
        bias=config.patch_bias,
    )
    positions = config.max_sequence_length, hidden
    name = f"{first}.position_embedding"
    yield from leaves(name, "embedding.positions", *positions, bias=False)
    for index in range(config.num_layers):
        source, target = f"{prefix}encoder.layers.{index}", f"layers.{index}"
        mixer, mlp = first_layer(config)
        yield from attention_links(
            f"{source}.self_attn", f"{target}.mixer", mixer, hidden, out="out_proj"
        )
        yield from leaves(f"{source}.layer_norm1", f"{target}.mixer_norm", hidden)
        yield from leaves(f"{source}.layer_norm2", f"{target}.feed_forward_norm", hidden)
        yield from clip_mlp_links(f"{source}.mlp", f"{target}.feed_forward", mlp, hidden)


def clip_mlp_links(source: str, target: str, mlp: MLPConfig, hidden: int) -> Iterator[Link]:
    """Yield the links of the two projections of a feed-forward.

    Args:
        source: Prefix of the tensors.
        target: Prefix of the parameters.
        mlp: The feed-forward.
        hidden: Width of the residual stream.
    """
    yield from leaves(f"{source}.fc1", f"{target}.up", mlp.ffn_size, hidden)
    yield from leaves(f"{source}.fc2", f"{target}.down", hidden, mlp.ffn_size)
