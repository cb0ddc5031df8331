"""Tables of fields of config.json, each with the name of the value in our config."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from mt_model import StackConfig

Names: TypeAlias = Mapping[str, str]

_MODEL: Names = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tied",
    }
)


def read_values(given: object, names: Names, **changed: Any) -> dict[str, Any]:
    """Return the values of fields of config.json by our names, with some of them changed."""
    return {own: getattr(given, name) for name, own in names.items()} | changed


def write_values(config: object, names: Names) -> dict[str, Any]:
    """Return the values of one of our configs, by the names of config.json."""
    return {name: getattr(config, own) for name, own in names.items()}


def model_values(given: Any) -> dict[str, Any]:
    """Return the values of `ModelConfig` that most families have under the same names.

    An `initializer_range` of 0, in a model that was not initialised randomly, means the default.
    """
    init_std = given.initializer_range or StackConfig.init_std
    return read_values(given, _MODEL, init_std=init_std)


def model_fields(config: StackConfig) -> dict[str, Any]:
    """Return the fields of a model that most families have under the same names."""
    return write_values(config, _MODEL) | {"num_hidden_layers": config.num_layers}
