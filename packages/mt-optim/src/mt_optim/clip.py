"""The global gradient norm, every logical element counted once, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from mt_data_parallel import grad_of
from mt_parallel_state import ParallelState, sharding_of
from torch import Tensor, nn

from mt_optim.group import check_number

# Elements whose squares are summed in fp32 before fp64 takes over. One fp32 norm over millions of
# elements is off by 1e-4 on CPUs; rows of this length keep 1e-7 at about the same speed.
_ROW = 512

_DENSE = ("tp", "pp")
_EXPERT = ("etp", "ep", "pp")


def grad_norm(named_params: Iterable[tuple[str, nn.Parameter]], state: ParallelState) -> float:
    """Return the L2 norm of the whole model's gradient.

    Which elements this rank answers for is read from each parameter's sharding record: shards are
    added over the axes that split them, a parameter that an axis replicates counts on that axis's
    first rank only, pipeline stages hold different parameters, and copies owned by another stage
    (``is_copy``) are left out. Data- and context-parallel ranks hold equal gradients and do not
    talk: call it after those are reduced. Communicates once over tp and pp, and once more over
    etp, ep and pp where those groups consist of other ranks.

    Squares are summed in fp32 rows and then fp64 (all in fp64 for fp64 gradients), so the norm
    depends on how parameters are cut by about 1e-7 relative only. Every rank gets the same bits.

    Args:
        named_params: This rank's names and parameters; gradients are read by
            `mt_data_parallel.grad_of`, a missing one counts as zero.
        state: Process groups and this rank's place in them.

    Returns:
        The norm; inf or nan if some gradient is not finite.

    Raises:
        ValueError: A parameter is split over an axis that is not part of the model (dp, cp, edp),
            or listed twice.
        TypeError: `state` is no ParallelState, or something is not a parameter.
    """
    if not isinstance(state, ParallelState):
        raise TypeError(f"state must be a ParallelState, got {type(state).__name__}")
    dense: list[Tensor] = []
    expert: list[Tensor] = []
    names: dict[int, str] = {}
    for name, param in named_params:
        grad = grad_of(param)
        if names.setdefault(id(param), name) != name:
            raise ValueError(
                f"parameter {name!r} is listed twice, also as {names[id(param)]!r}; list a shared "
                "parameter once, as module.named_parameters() does"
            )
        axes = sharding_of(param).spec.axes
        is_expert = bool(axes & {"etp", "ep", "edp"})
        model_axes = _EXPERT if is_expert else _DENSE
        if not axes <= set(model_axes):
            raise ValueError(
                f"parameter {name!r} is split over {', '.join(sorted(axes))}; a gradient norm is "
                f"summed over {'-'.join(model_axes)}"
            )
        if grad is not None and _counts_here(param, model_axes, state):
            (expert if is_expert else dense).append(grad)
    if state.ranks("-".join(_DENSE)) == state.ranks("-".join(_EXPERT)):
        total = _sum_over(_squared_sum(dense + expert, state), state.group("-".join(_DENSE)))
    else:
        total = _sum_over(_squared_sum(dense, state), state.group("-".join(_DENSE)))
        total += _sum_over(_squared_sum(expert, state), state.group("-".join(_EXPERT)))
    return math.sqrt(total)


@torch.no_grad()
def clip_grad_norm(
    named_params: Iterable[tuple[str, nn.Parameter]], state: ParallelState, max_norm: float
) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`.

    Gradients are multiplied in place by ``max_norm / (norm + 1e-6)`` if that is below 1 (the rule
    of torch.nn.utils.clip_grad_norm_). If the norm is inf or nan they are left as they are, and
    since all ranks get the same norm they can all skip the step:
    ``if math.isfinite(norm): optimizer.step()``.

    Args:
        named_params: This rank's names and parameters.
        state: Process groups and this rank's place in them.
        max_norm: Largest norm to let through; ``math.inf`` only measures.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not check_number("max_norm", max_norm) > 0:
        raise ValueError(f"max_norm must be positive (math.inf never clips), got {max_norm}")
    named = list(named_params)
    norm = grad_norm(named, state)
    scale = max_norm / (norm + 1e-6)
    if math.isfinite(norm) and scale < 1:
        grads = [grad for _, param in named if (grad := grad_of(param)) is not None]
        torch._foreach_mul_(grads, scale)
    return norm


def _counts_here(param: nn.Parameter, model_axes: Sequence[str], state: ParallelState) -> bool:
    """Whether this rank answers for its part of the parameter."""
    sharding = sharding_of(param)
    return not sharding.is_copy and all(
        state.index(axis) == 0
        for axis in model_axes
        if axis != "pp" and axis not in sharding.spec.axes
    )


def _squared_sum(grads: Sequence[Tensor], state: ParallelState) -> Tensor:
    """Return the sum of squares of all elements as an fp64 scalar on the gradients' device."""
    norms: list[Tensor] = []
    for grad in grads:
        flat = grad.detach().reshape(-1)
        if flat.dtype not in (torch.float32, torch.float64):
            flat = flat.float()
        whole = flat.numel() // _ROW * _ROW
        if whole:
            norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1))
        if whole < flat.numel():
            norms.append(torch.linalg.vector_norm(flat[whole:]).view(1))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=state.device)
    return torch.cat([norm.double() for norm in norms]).square().sum()


def _sum_over(value: Tensor, group: dist.ProcessGroup | None) -> float:
    if group is not None:
        dist.all_reduce(value, group=group)
    return value.item()
