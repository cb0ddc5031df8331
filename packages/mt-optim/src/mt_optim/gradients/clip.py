"""The gradient norm of the whole model, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from mt_data_parallel import ParamShard, param_shards
from mt_files import check_type
from mt_parallel_state import ParallelState
from torch import Tensor, nn

from mt_optim.checks import check_number
from mt_optim.gradients.scaling import multiply_, root
from mt_optim.gradients.statistics import GradMeter


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor by which gradients of a norm are clipped; 1 for a small norm."""
    return (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0)


def check_once(shards: Iterable[ParamShard]) -> None:
    """Check that no parameter is listed twice.

    Raises:
        ValueError: A parameter is.
    """
    names: dict[int, str] = {}
    for shard in shards:
        if names.setdefault(id(shard.param), shard.name) != shard.name:
            raise ValueError(
                f"parameter {shard.name!r} is listed twice, also as {names[id(shard.param)]!r}; "
                "list a shared parameter once, as module.named_parameters() does"
            )


def grad_norm(
    named_params: Iterable[tuple[str, nn.Parameter] | ParamShard], state: ParallelState
) -> float:
    """Return the L2 norm of the whole model's gradient; every rank gets the same bits.

    Each logical element is counted on one rank, which follows from the parameter's sharding record
    and from the shard of it that a rank steps (`mt_parallel_state.is_owner`): shards are added over
    the axes that split them, a replicated parameter counts on the first rank of its axis, and
    copies that another pipeline stage owns (`is_copy`) are left out. Gradients that a rank does not
    count are still checked: if one is not finite, the norm is not finite either. Call it after the
    gradients are reduced. It communicates once, over all ranks of the layout.

    Squares are summed in fp32 over rows and then in fp64 (entirely in fp64 for fp64 gradients), so
    the norm depends on the layout by a relative 1e-7 only.

    Args:
        named_params: This rank's names and parameters, or the shards that it steps
            (`GradBuffer.shards()`, required where a reduction has shards). Gradients are read by
            `mt_data_parallel.grad_of`; a missing one counts as zero.
        state: Process groups and this rank's place in them.

    Returns:
        The norm; inf or nan if some gradient is not finite.

    Raises:
        ValueError: A parameter is listed twice.
        TypeError: `state` is not a ParallelState, or an item is not a parameter.
    """
    return float(_norm(param_shards(named_params), state))


@torch.no_grad()
def clip_grad_norm(
    named_params: Iterable[tuple[str, nn.Parameter] | ParamShard],
    state: ParallelState,
    max_norm: float,
) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`.

    Gradients are multiplied in place by `max_norm / (norm + 1e-6)` if this is below 1, as
    torch.nn.utils.clip_grad_norm_ does. If the norm is inf or nan, they stay as they are, and
    since all ranks get the same norm they can all skip the step:
    `if math.isfinite(norm): optimizer.step()`.

    Args:
        named_params: As for `grad_norm`.
        state: Process groups and this rank's place in them.
        max_norm: The largest norm without clipping; `math.inf` only measures.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not check_number("max_norm", max_norm) > 0:
        raise ValueError(f"max_norm must be positive (math.inf never clips), got {max_norm}")
    shards = param_shards(named_params)
    norm = _norm(shards, state)
    read = float(norm)  # the only wait for the device
    if max_norm < read + 1e-6 < math.inf:
        grads = [grad for shard in shards if (grad := shard.grad) is not None]
        multiply_(grads, clip_factor(norm, max_norm))
    return read


def _norm(shards: list[ParamShard], state: ParallelState) -> Tensor:
    check_type("state", state, ParallelState)
    check_once(shards)
    return root(GradMeter([shards], state).sums()[0])
