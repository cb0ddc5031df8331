"""Gradients that arrive as partial sums over a model axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from mt_parallel_state import ParallelState, sharding_of
from torch import Tensor, nn

from mt_data_parallel.grad import grad_of
from mt_data_parallel.param_shard import ParamShard, param_shards

# Not axes of the layout but pairs of pipeline ranks: those of tied embeddings, and those that hold
# the same stages under a bidirectional schedule.
PAIRS = ("embedding", "mirror")


def reduce_partial_grads(
    named_params: Iterable[tuple[str, nn.Parameter] | ParamShard], state: ParallelState
) -> None:
    """Sum every gradient over the axes named in its `ParamSharding.partial_grad`, in place.

    Norm weights under sequence parallelism see a part of the sequence on each tensor-parallel
    rank; a tied embedding sees its lookup on the first pipeline stage and its head on the last.
    Their gradients are partial sums, and which axes miss is written on the parameter, so this
    function knows no layer. Gradients with the same axes and dtype travel in one all-reduce, in
    the gradient's dtype. Frozen parameters are left alone. Call it after `GradBuffer.finish`;
    without a GradBuffer it reads and writes `param.grad`. Where a gradient is missing it becomes
    zero first, because the other ranks count on this one.

    Args:
        named_params: This rank's names and parameters, or shards (`GradBuffer.shards()`). Ranks
            of one group hold the same shards of parameters of equal names with these axes;
            parameters of other stages do not matter.
        state: Process groups of the axes.

    Raises:
        TypeError: `state` is no ParallelState, or something is not a parameter.
    """
    if not isinstance(state, ParallelState):
        raise TypeError(f"state must be a ParallelState, got {type(state).__name__}")
    grads_of: dict[tuple[bool, str, str], list[tuple[str, Tensor]]] = {}
    for shard in param_shards(named_params):
        if not shard.source.requires_grad:
            continue
        for axes in _reductions(cast("nn.Parameter", shard.source), state):
            grad = _present_grad(shard.param)
            key = (axes in PAIRS, axes, str(grad.dtype))
            grads_of.setdefault(key, []).append((shard.name, grad))
    # Sorted, so that all ranks of a group issue their collectives in the same order; the mesh
    # axes come first, then the pairs, in which not all pipeline ranks take part.
    for key in sorted(grads_of):
        group = state.group(key[1])
        if group is not None:
            grads = [grad for _, grad in sorted(grads_of[key], key=lambda item: item[0])]
            _all_reduce_coalesced(grads, group, state.device)


def is_partial(param: Tensor) -> bool:
    """Return whether a parameter's gradient is summed over model axes."""
    return isinstance(param, nn.Parameter) and bool(sharding_of(param).partial_grad)


def _reductions(param: nn.Parameter, state: ParallelState) -> list[str]:
    """Return the axes strings to sum over, without axes of size 1."""
    axes = sharding_of(param).partial_grad
    mesh = [axis for axis in sorted(axes) if axis not in PAIRS and state.size(axis) > 1]
    pairs = [axis for axis in PAIRS if axis in axes and state.size(axis) > 1]
    return ["-".join(mesh), *pairs] if mesh else pairs


def _present_grad(param: Tensor) -> Tensor:
    grad = grad_of(param)
    if grad is None:
        grad = param.grad = torch.zeros_like(param)
    return grad


def _all_reduce_coalesced(
    grads: list[Tensor], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Sum all gradients in one collective; offloaded ones are copied to the device and back."""
    if len(grads) == 1 and grads[0].is_contiguous() and grads[0].device == device:
        dist.all_reduce(grads[0], group=group)
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads]).to(device)
    dist.all_reduce(flat, group=group)
    parts = flat.split([grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view(grad.shape))
