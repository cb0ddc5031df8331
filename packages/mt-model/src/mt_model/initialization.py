"""Initial values of a stage's parameters, the same on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from mt_parallel_state import (
    ParallelLayout,
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
    fill = None if seed is None else _initializer(stage, config, state, seed=seed)
    for name, meta in list(stage.named_parameters()):
        if not meta.is_meta:
            continue
        owner, _, leaf = name.rpartition(".")
        param = nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype, device=device))
        record = sharding_of(meta)
        shard_param(param, record.spec, partial_grad=record.partial_grad, is_copy=record.is_copy)
        mark_matrix(param, record.matrix)
        setattr(stage.get_submodule(owner), leaf, param)
        if fill is not None:
            fill(name, param)
    shardings(stage)  # from here the stage answers for its records, whatever its parameters become


def initializer(
    model: nn.Module,
    config: ModelConfig,
    state: ParallelState | None = None,
    *,
    seed: int = 0,
) -> Callable[[str, nn.Parameter], None]:
    """Return what gives parameters of a model on the meta device their initial values, one by one.

    It is what `mt_data_parallel.shard` takes as `init`, for a model that no rank ever has whole.
    The values are those that the model has when it is made on a device with the same seed.

    Args:
        model: A model or stage that was made with `device="meta"`.
        config: Its configuration.
        state: What it was made with.
        seed: Of the values.

    Example:
        >>> config = gpt(vocab_size=8, hidden_size=4, num_layers=1, num_heads=1)
        >>> fill = initializer(GPT(config, device="meta"), config, seed=3)
        >>> weight = torch.nn.Parameter(torch.empty(4))
        >>> fill("layers.0.mixer_norm.weight", weight)
        >>> weight.tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    state = ParallelState(ParallelLayout()) if state is None else state
    return _initializer(model, config, state, seed=seed)


def _initializer(
    stage: nn.Module, config: ModelConfig, state: ParallelState, *, seed: int
) -> Callable[[str, nn.Parameter], None]:
    std = {
        "normal": config.init_std,
        "residual": config.init_std / math.sqrt(2 * config.num_layers),
    }
    known: dict[str, Initial] = {
        name: getattr(meta, _ATTRIBUTE, "zeros" if name.split(".")[-1] == "bias" else "normal")
        for name, meta in stage.named_parameters()
    }

    def fill(name: str, param: nn.Parameter) -> None:
        if known[name] in std:
            at = {"layout": state.layout, "rank": state.rank, "std": std[known[name]]}
            initialize_(param, seed=seed, name=name, **at)
        else:
            nn.init.constant_(param, float(known[name] == "ones"))

    return fill
