"""Encoders of images from their sizes, and published ones by name."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal

from mt_files import FieldError, did_you_mean, shorten

from mt_model.attention.config import AttentionConfig
from mt_model.block.norm_config import NormConfig
from mt_model.feed_forward.mlp_config import MLPConfig
from mt_model.kernels.words import Activation
from mt_model.stack.layer_config import LayerConfig
from mt_model.vision.config import VisionConfig
from mt_model.vision.pooling_config import AttentionPoolingConfig, ClassPoolingConfig, PoolingConfig

_Arguments = Mapping[str, Any]


def vit(  # noqa: PLR0913 - the keyword list is the vocabulary of a uniform encoder
    *,
    image_size: int | tuple[int, int],
    patch_size: int | tuple[int, int],
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    ffn_size: int | None = None,
    activation: Activation = "gelu",
    norm_eps: float = 1e-12,
    num_channels: int = 3,
    patch_bias: bool = True,
    class_token: bool = True,
    embedding_norm: bool = False,
    final_norm: bool = True,
    pooling: Literal["class", "attention"] | PoolingConfig | None = "class",
    num_classes: int | None = None,
    projection_size: int | None = None,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    init_std: float = 0.02,
) -> VisionConfig:
    """Build an encoder of images whose layers are equal, from its sizes.

    Args:
        image_size: Size of the images in pixels, or height and width.
        patch_size: Size of a patch in pixels, or height and width.
        hidden_size: Width of the residual stream.
        num_layers: Number of layers.
        num_heads: Number of heads of each layer, and of an attention pooling.
        ffn_size: Width of each feed-forward; four times `hidden_size` where None.
        activation: Activation of each feed-forward.
        norm_eps: Eps of the LayerNorms.
        num_channels: See `VisionConfig`, as for all that follow.
        patch_bias: Bias of the patch embedding.
        class_token: Learned token in front of the patches.
        embedding_norm: Norm in front of the first layer.
        final_norm: Norm after the last layer.
        pooling: Pooling, or the word of a kind with its usual settings.
        num_classes: Number of classes.
        projection_size: Width of the projection.
        dropout: Dropout of embedding, attention and feed-forward outputs.
        attention_dropout: Dropout of attention weights.
        init_std: Standard deviation of the initial weights.

    Raises:
        FieldError: Sizes do not fit.

    Example:
        >>> vit(
        ...     image_size=32, patch_size=8, hidden_size=64, num_layers=2, num_heads=4
        ... ).max_sequence_length
        17
    """
    if num_heads < 1 or hidden_size % num_heads:
        text = f"{hidden_size} is not a multiple of num_heads={num_heads}; change one of them"
        raise FieldError({"hidden_size": text}, "vit")
    head_dim, ffn = hidden_size // num_heads, 4 * hidden_size if ffn_size is None else ffn_size
    mlp = MLPConfig(ffn_size=ffn, activation=activation, gated=False, bias=True)
    mixer = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        qkv_bias=True,
        out_bias=True,
        causal=False,
        dropout=attention_dropout,
    )
    usual: dict[str, PoolingConfig] = {
        "class": ClassPoolingConfig(),
        "attention": AttentionPoolingConfig(
            num_heads=num_heads, head_dim=head_dim, feed_forward=mlp
        ),
    }
    if isinstance(pooling, str) and pooling not in usual:
        raise FieldError({"pooling": f"{shorten(pooling)}. {did_you_mean(pooling, usual)}"}, "vit")
    return VisionConfig(
        image_size=pair(image_size),
        patch_size=pair(patch_size),
        hidden_size=hidden_size,
        layers=(LayerConfig(mixer=mixer, feed_forward=mlp, repeat=num_layers),),
        norm=NormConfig(kind="layer", eps=norm_eps),
        num_channels=num_channels,
        patch_bias=patch_bias,
        class_token=class_token,
        embedding_norm=embedding_norm,
        final_norm=final_norm,
        pooling=usual[pooling] if isinstance(pooling, str) else pooling,
        num_classes=num_classes,
        projection_size=projection_size,
        dropout=dropout,
        init_std=init_std,
    )


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width, of which one number stands for both."""
    return (size, size) if isinstance(size, int) else size


def _shape(image: int, patch: int, hidden: int, layers: int, heads: int, **rest: Any) -> _Arguments:
    sizes = {"image_size": image, "patch_size": patch, "hidden_size": hidden}
    return MappingProxyType({**sizes, "num_layers": layers, "num_heads": heads, **rest})


_CLIP: _Arguments = {
    "activation": "gelu_quick",
    "norm_eps": 1e-5,
    "patch_bias": False,
    "embedding_norm": True,
    "final_norm": False,
    "pooling": ClassPoolingConfig(norm=True),
}
_SIGLIP: _Arguments = {
    "activation": "gelu_tanh",
    "norm_eps": 1e-6,
    "class_token": False,
    "pooling": "attention",
}
_PRESETS: Mapping[str, _Arguments] = MappingProxyType(
    {
        "vit-base": _shape(224, 16, 768, 12, 12, num_classes=1000),
        "vit-large": _shape(224, 16, 1024, 24, 16, num_classes=1000),
        "vit-huge-14": _shape(224, 14, 1280, 32, 16, num_classes=1000),
        "clip-vit-base-32": _shape(224, 32, 768, 12, 12, projection_size=512, **_CLIP),
        "clip-vit-large-14": _shape(224, 14, 1024, 24, 16, projection_size=768, **_CLIP),
        "clip-vit-large-14-336": _shape(336, 14, 1024, 24, 16, projection_size=768, **_CLIP),
        "siglip-base": _shape(224, 16, 768, 12, 12, **_SIGLIP),
        "siglip-large-384": _shape(384, 16, 1024, 24, 16, **_SIGLIP),
        "siglip-so400m-14-384": _shape(384, 14, 1152, 27, 16, ffn_size=4304, **_SIGLIP),
    }
)
VISION_PRESETS: tuple[str, ...] = tuple(_PRESETS)


def vision_preset(name: str, **overrides: Any) -> VisionConfig:
    """The named encoder of images, with any argument of `vit` replaced.

    Raises:
        FieldError: The name or an override is unknown, or sizes do not fit; the message suggests
            the nearest.
    """
    return vit(**preset_arguments(name, _PRESETS, inspect.signature(vit).parameters, overrides))


def preset_arguments(
    name: str,
    presets: Mapping[str, Mapping[str, Any]],
    known: Collection[str],
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Give the arguments for a preset, with some of them replaced.

    Raises:
        FieldError: The name or an override is unknown; the message suggests the nearest.
    """
    if name not in presets:
        text = f"{shorten(name)} is not known. {did_you_mean(name, tuple(presets))}"
        raise FieldError({"preset": text})
    for key in overrides:
        if key not in known:
            text = f"unknown override of preset {name!r}. {did_you_mean(key, sorted(known))}"
            raise FieldError({key: text})
    return {**presets[name], **overrides}
