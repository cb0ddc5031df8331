"""Initial values of a stage's parameters, the same on every layout."""

from __future__ import annotations

import math

import torch
from mt_parallel_state import ParallelState, initialize_, shard_param, sharding_of
from torch import nn

from mt_model.config import ModelConfig


def materialize(
    stage: nn.Module,
    config: ModelConfig,
    state: ParallelState,
    *,
    seed: int | None,
    device: torch.device,
) -> None:
    """Give the stage's parameters that are on the meta device memory and their initial values.

    Biases are zeros. Weights are normal with the config's `init_std`, those that write to the
    residual stream with `init_std / sqrt(2 * num_layers)` (Radford et al., 2019). Each value
    depends on the parameter's global name, the seed and its global index only. Without a seed the
    values are undefined.
    """
    residual_std = config.init_std / math.sqrt(2 * config.num_layers)
    for name, meta in list(stage.named_parameters()):
        if not meta.is_meta:
            continue
        owner, _, leaf = name.rpartition(".")
        param = nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype, device=device))
        record = sharding_of(meta)
        shard_param(param, record.spec, partial_grad=record.partial_grad, is_copy=record.is_copy)
        setattr(stage.get_submodule(owner), leaf, param)
        if seed is None:
            continue
        if leaf == "bias":
            nn.init.zeros_(param)
            continue
        std = residual_std if owner.endswith(("attention.out", "mlp.down")) else config.init_std
        initialize_(param, seed=seed, name=name, layout=state.layout, rank=state.rank, std=std)
