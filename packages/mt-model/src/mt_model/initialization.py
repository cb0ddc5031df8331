"""Initial values of a stage's parameters, the same on every layout."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from mt_parallel_state import (
    ParallelState,
    initialize_,
    mark_matrix,
    shard_param,
    sharding_of,
    shardings,
)
from torch import nn

from mt_model.config import ModelConfig

Initial: TypeAlias = Literal["normal", "residual", "ones", "zeros"]
_ATTRIBUTE = "_mt_initial"


def start_from(param: nn.Parameter, initial: Initial) -> None:
    """Say what a parameter on the meta device starts from; else biases are zeros, others `normal`.

    Args:
        param: Of a module under construction.
        initial: `normal` has the config's `init_std`, and `residual`, for what writes to the
            residual stream, `init_std / sqrt(2 * num_layers)` (Radford et al., 2019).
    """
    setattr(param, _ATTRIBUTE, initial)


def materialize(
    stage: nn.Module,
    config: ModelConfig,
    state: ParallelState,
    *,
    seed: int | None,
    device: torch.device,
) -> None:
    """Give the stage's parameters that are on the meta device memory and their initial values.

    Each value depends on the parameter's global name, the seed and its global index only. Without
    a seed the values are undefined.
    """
    std = {
        "normal": config.init_std,
        "residual": config.init_std / math.sqrt(2 * config.num_layers),
    }
    for name, meta in list(stage.named_parameters()):
        if not meta.is_meta:
            continue
        owner, _, leaf = name.rpartition(".")
        param = nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype, device=device))
        record = sharding_of(meta)
        shard_param(param, record.spec, partial_grad=record.partial_grad, is_copy=record.is_copy)
        mark_matrix(param, record.matrix)
        setattr(stage.get_submodule(owner), leaf, param)
        if seed is None:
            continue
        initial: Initial = getattr(meta, _ATTRIBUTE, "zeros" if leaf == "bias" else "normal")
        if initial in std:
            at = {"layout": state.layout, "rank": state.rank, "std": std[initial]}
            initialize_(param, seed=seed, name=name, **at)
        else:
            nn.init.constant_(param, float(initial == "ones"))
    shardings(stage)  # from here the stage answers for its records, whatever its parameters become
