"""Published shapes by name: the family with its version, then the size, as in `llama3.2-1b`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mt_model.attend.score_bias import RelativeConfig
from mt_model.attention.config import AttentionConfig
from mt_model.feed_forward.mlp_config import MLPConfig
from mt_model.language.config import ModelConfig
from mt_model.presets.encoder_decoders import encoder_decoder_layers
from mt_model.presets.gpt import FIELDS, SHORT_FORMS, model_of
from mt_model.presets.image_encoders import preset_arguments, vision_preset

_Arguments = Mapping[str, Any]


def _published() -> _Arguments:
    """Return the fields of each model in `published.toml`, its family's included."""
    families = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))
    found = {}
    for family in families.values():
        models = family.pop("models")
        found |= {name: _joined(family, own) for name, own in models.items()}
    return found


def _joined(common: _Arguments, own: _Arguments) -> dict[str, Any]:
    """Join two mappings, and those that stand in both under one name."""
    tables = {
        name: {**common[name], **value}
        for name, value in own.items()
        if isinstance(value, dict) and name in common
    }
    return {**common, **own, **tables}


_PRESETS: Mapping[str, _Arguments] = MappingProxyType(_published())
PRESETS: tuple[str, ...] = tuple(_PRESETS)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """Build a published shape, with any argument of `gpt` replaced, in all layers.

    Raises:
        FieldError: The name or an override is unknown, or sizes do not fit; the message suggests
            the nearest.
    """
    arguments = preset_arguments(name, _PRESETS, (*FIELDS, *SHORT_FORMS), overrides)
    if "image_encoder" in arguments:
        tower = vision_preset(arguments.pop("image_encoder"), projection_size=None)
        arguments["images"] = {"tower": tower, **arguments["images"]}
    if "mlp" in arguments:
        arguments = _encoder_decoder(**arguments)
    mixer = arguments.pop("mixer", None)
    if mixer is not None:
        arguments["layers"] = [{"mixer": mixer, **layer} for layer in arguments["layers"]]
    turns = arguments.pop("turns", ())
    config = model_of(arguments)
    layers = [model_of({**arguments, **turn, **overrides}).layers[0] for turn in turns]
    if not layers:
        return config
    repeats = -(-config.num_layers // len(layers))
    return replace(config, layers=tuple(layers * repeats)[: config.num_layers])


def _encoder_decoder(
    *, num_heads: int, head_dim: int, ffn_size: int, mlp: _Arguments, **rest: Any
) -> dict[str, Any]:
    """Return the arguments for a T5: as many layers in the decoder as in the encoder."""
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=1.0,
        score_bias=RelativeConfig(),
    )
    feed_forward, count = MLPConfig(ffn_size=ffn_size, **mlp), rest["encoder_layers"]
    layers = encoder_decoder_layers(attention, feed_forward, encoder=count, decoder=count)
    return {"layers": layers, **rest}
