"""The optimizer of a run, from its section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from mt_files import did_you_mean, shorten
from mt_model import ModelConfig
from mt_optim import (
    GroupOverride,
    OptimizerConfig,
    Orthogonalization,
    build_optimizer,
    is_hidden_matrix,
    mup_overrides,
)
from mt_parallel_state import ParallelLayout, ParallelState

from mt_train.config.loading import LoadedConfig
from mt_train.config.optimizer_section import OptimizerSection
from mt_train.config.run_config import RunConfig
from mt_train.training.freezing import whole_model

_OF_MATRICES = ("muon", "adaptive_muon", "soap")
_ADAMW_SIZE = 0.2  # factor of a spectral step that gives it the size of AdamW's steps


def optimizer_config(config: RunConfig) -> OptimizerConfig:
    """Return mt-optim's config of the run's optimizer; fields of one name are the same setting.

    A run in fp64 also makes matrices orthogonal in fp64, which shows that the layout changes
    nothing; other runs do that in bf16.
    """
    section = config.optimizer
    shared = {item.name for item in fields(OptimizerConfig)} & {x.name for x in fields(section)}
    spectral = section.muon_scale == "spectral"
    settings: dict[str, Any] = {name: getattr(section, name) for name in shared}
    settings |= {
        "betas": None if section.name == "sgd" else section.betas,
        "orthogonalization": Orthogonalization(
            coefficients=section.muon_coefficients,
            scale=section.muon_scale,
            extra_scale=_ADAMW_SIZE if spectral else 1.0,
            tp=section.muon_tp,
            dtype=torch.float64 if config.training.dtype == "fp64" else torch.bfloat16,
        ),
        "overrides": _overrides(section),
        "max_norm": config.training.grad_clip,
        "count_zeros": config.logging.zeros,
        "statistics": "layer" if config.logging.gradients else None,
    }
    return OptimizerConfig(**settings)


def _overrides(section: OptimizerSection) -> tuple[GroupOverride, ...]:
    """Return the overrides of the configuration and of `width_multiplier`."""
    given = [*section.overrides]
    if section.width_multiplier != 1:
        given += mup_overrides(section.width_multiplier, is_hidden_matrix, name=section.name)
    return tuple(given)


def check_overrides(loaded: LoadedConfig, model: ModelConfig) -> None:
    """Check that each override and norm group matches a parameter, and none contradict.

    Every rank finds the same problems, whatever part of the model it has.

    Raises:
        ConfigError: One matches no parameter, or two contradict each other.
    """
    section = loaded.config.optimizer
    globs = {"overrides": section.overrides, "norm_groups": section.norm_groups}
    if not any(globs.values()):
        return
    state, whole = ParallelState(ParallelLayout()), whole_model(loaded, model)
    names = [name for name, _ in whole.named_parameters()]
    for key, entries in globs.items():
        for index, entry in enumerate(entries):
            if entry.names and not any(fnmatchcase(name, entry.names) for name in names):
                text = f"{shorten(entry.names)} is the name of no parameter"
                hint = did_you_mean(entry.names, names) or f"There are {', '.join(names[:8])} ..."
                raise loaded.error(f"optimizer.{key}[{index}].names", f"{text}. {hint}")
    try:
        build_optimizer(whole, optimizer_config(loaded.config), state)
    except ValueError as error:
        key = "norm_groups" if "norm groups" in str(error) else "overrides"
        raise loaded.error(f"optimizer.{key}", str(error)) from error


def kept_whole(config: RunConfig) -> Callable[[str, torch.Tensor], bool] | None:
    """Return which parameters one data-parallel rank must step as a whole; None if none."""
    return is_hidden_matrix if config.optimizer.name in _OF_MATRICES else None
