"""Parameters that a run does not train."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from mt_files import did_you_mean, shorten
from mt_model import ModelConfig, unknown_layers
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

from mt_train.config.loading import LoadedConfig
from mt_train.training.base_codes import check_base_format

_SHOWN = 8


def freeze(modules: Iterable[nn.Module], patterns: Iterable[str]) -> None:
    """Freeze the parameters that a glob matches, by their own name or by their part's name."""
    for module in modules:
        for name, param in module.named_parameters():
            if any(_names(pattern, name) for pattern in patterns):
                param.requires_grad = False


def _names(pattern: str, name: str) -> bool:
    """Return whether a glob matches a parameter, or a part of the model around it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def whole_model(loaded: LoadedConfig, model: ModelConfig) -> nn.Module:
    """Return the model on no device, with its adapters and without its frozen gradients."""
    config = loaded.config
    how = {"device": "meta", "seed": None, "lora": config.lora}
    whole = model.build(ParallelState(ParallelLayout()), **how)
    freeze([whole], config.training.freeze)
    return whole


def check_freezing(loaded: LoadedConfig, model: ModelConfig) -> None:
    """Check that adapters and frozen parameters exist in the model, and that something is trained.

    Every rank finds the same problems, whatever part of the model it has.

    Raises:
        ConfigError: A glob matches nothing, adapters do not fit, or nothing is left to train.
    """
    config = loaded.config
    if config.lora is not None:
        if config.lora.dropout and model.encoder_layers:
            text = f"{config.lora.dropout} does not go with an encoder and a decoder; use 0"
            raise loaded.error("lora.dropout", text)
        plain = model.build(ParallelState(ParallelLayout()), device="meta", seed=None)
        for index, text in unknown_layers(plain, config.lora).items():
            raise loaded.error(f"lora.layers[{index}]", text)
        check_base_format(loaded, model)
    try:
        whole = whole_model(loaded, model)
    except ValueError as error:
        raise loaded.error("lora", str(error)) from error
    names = [name for name, _ in whole.named_parameters()]
    for index, pattern in enumerate(config.training.freeze):
        if not any(_names(pattern, name) for name in names):
            hint = did_you_mean(pattern, names) or f"There are {', '.join(names[:_SHOWN])} ..."
            text = f"{shorten(pattern)} is the name of no parameter. {hint}"
            raise loaded.error(f"training.freeze[{index}]", text)
    if not any(param.requires_grad for param in whole.parameters()):
        field = "training.freeze" if config.training.freeze else "lora.layers"
        raise loaded.error(field, "leaves nothing to train; name fewer parameters")
