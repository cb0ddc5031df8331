"""Initial values of a stage's parameters, the same on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from mt_parallel_state import (
    ParallelLayout,
    ParallelState,
    hash_key,
    initialize_,
    mark_matrix,
    offsets_of,
    shard_param,
    sharding_of,
    shardings,
)
from torch import nn

from mt_model.block.initial import Initial, Uniform, initial_of
from mt_model.stack.config import StackConfig


def materialize(
    stage: nn.Module,
    config: StackConfig,
    state: ParallelState,
    *,
    seed: int | None,
    device: torch.device,
) -> None:
    """Allocate the stage's parameters on the meta device, and give them initial values.

    Each value depends on the parameter's global name, the seed and its global index only. Without
    a seed the values are undefined.
    """
    fill = None if seed is None else _initializer(stage, config, state, seed=seed)
    for name, meta in list(stage.named_parameters()):
        if not meta.is_meta:
            continue
        owner, _, leaf = name.rpartition(".")
        made = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        param = nn.Parameter(made, requires_grad=meta.requires_grad)
        record = sharding_of(meta)
        shard_param(param, record.spec, partial_grad=record.partial_grad, is_copy=record.is_copy)
        mark_matrix(param, record.matrix)
        setattr(stage.get_submodule(owner), leaf, param)
        if fill is not None:
            fill(name, param)
    shardings(stage)  # from here the stage answers for its records, whatever its parameters become


def initializer(
    model: nn.Module, config: StackConfig, state: ParallelState | None = None, *, seed: int = 0
) -> Callable[[str, nn.Parameter], None]:
    """Return a function that fills one parameter of a model with its initial values.

    `mt_data_parallel.shard` takes it as `init`, for a model that no rank ever holds whole. The
    values are the same as in a model built on a device with the same seed.

    Args:
        model: A model or stage built with `device="meta"`.
        config: Its configuration.
        state: The state that it was built with.
        seed: Seed of the values.

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
    stage: nn.Module, config: StackConfig, state: ParallelState, *, seed: int
) -> Callable[[str, nn.Parameter], None]:
    known: dict[str, Initial] = {
        name: initial_of(name, meta) for name, meta in stage.named_parameters()
    }

    def fill(name: str, param: nn.Parameter) -> None:
        initial, layout, rank = known[name], state.layout, state.rank
        std = _deviations(config.part_of(name))
        if isinstance(initial, Uniform):
            initial.fill_(param, key=hash_key("init", seed, name), layout=layout, rank=rank)
        elif initial in std:
            at = {"layout": layout, "rank": rank, "std": std[initial]}
            initialize_(param, seed=seed, name=name, **at)
            rows = config.rows_of(name)
            if rows is not None:
                first = offsets_of(param, state.layout, state.rank)[0]
                param.data[max(0, rows - first) :] = 0
        else:
            nn.init.constant_(param, float(initial == "ones"))

    return fill


def _deviations(config: StackConfig) -> dict[Initial, float]:
    return {
        "normal": config.init_std,
        "residual": config.init_std / math.sqrt(2 * config.num_layers),
        "embedding": config.init_std if config.embedding_std is None else config.embedding_std,
    }
