"""The global gradient norm, every logical element counted once, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from mt_data_parallel import Piece, pieces_of
from mt_parallel_state import ParallelState, is_owner, sharding_of
from torch import Tensor, nn

from mt_optim.group import check_number

# Elements whose squares are summed in fp32 before fp64 takes over. One fp32 norm over millions of
# elements is off by 1e-4 on CPUs; rows of this length keep 1e-7 at about the same speed.
_ROW = 512

_WORLD = "tp-cp-dp-pp"


def grad_norm(
    named_params: Iterable[tuple[str, nn.Parameter] | Piece], state: ParallelState
) -> float:
    """Return the L2 norm of the whole model's gradient.

    Which elements this rank answers for follows from each parameter's sharding record and the
    piece of it that the rank steps (`mt_parallel_state.is_owner`): shards are added over the axes
    that split them, a parameter that an axis replicates counts on that axis's first rank only,
    ranges of a sharded optimizer count where they are stepped, pipeline stages hold different
    parameters, and copies owned by another stage (`is_copy`) are left out. Call it after the
    gradients are reduced. It communicates once, over all ranks of the layout.

    Squares are summed in fp32 rows and then fp64 (all in fp64 for fp64 gradients), so the norm
    depends on how parameters are cut by about 1e-7 relative only. Every rank gets the same bits.

    Args:
        named_params: This rank's names and parameters, or pieces (`GradBuffer.pieces()`), which it
            has to be where a reduction has shards; gradients are read by
            `mt_data_parallel.grad_of`, a missing one counts as zero.
        state: Process groups and this rank's place in them.

    Returns:
        The norm; inf or nan if some gradient is not finite.

    Raises:
        ValueError: A parameter is listed twice.
        TypeError: `state` is no ParallelState, or something is not a parameter.
    """
    if not isinstance(state, ParallelState):
        raise TypeError(f"state must be a ParallelState, got {type(state).__name__}")
    grads: list[Tensor] = []
    names: dict[int, str] = {}
    for piece in pieces_of(named_params):
        grad = piece.grad
        if names.setdefault(id(piece.param), piece.name) != piece.name:
            raise ValueError(
                f"parameter {piece.name!r} is listed twice, also as {names[id(piece.param)]!r}; "
                "list a shared parameter once, as module.named_parameters() does"
            )
        if grad is not None and _counts_here(piece, state):
            grads.append(grad)
    total = _squared_sum(grads, state)
    group = state.group(_WORLD)
    if group is not None:
        dist.all_reduce(total, group=group)
    return math.sqrt(total.item())


@torch.no_grad()
def clip_grad_norm(
    named_params: Iterable[tuple[str, nn.Parameter] | Piece], state: ParallelState, max_norm: float
) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`.

    Gradients are multiplied in place by `max_norm / (norm + 1e-6)` if that is below 1 (the rule
    of torch.nn.utils.clip_grad_norm_). If the norm is inf or nan they are left as they are, and
    since all ranks get the same norm they can all skip the step:
    `if math.isfinite(norm): optimizer.step()`.

    Args:
        named_params: This rank's names and parameters, or pieces.
        state: Process groups and this rank's place in them.
        max_norm: Largest norm to let through; `math.inf` only measures.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: `max_norm` is not positive.
    """
    if not check_number("max_norm", max_norm) > 0:
        raise ValueError(f"max_norm must be positive (math.inf never clips), got {max_norm}")
    pieces = pieces_of(named_params)
    norm = grad_norm(pieces, state)
    scale = max_norm / (norm + 1e-6)
    if math.isfinite(norm) and scale < 1:
        grads = [grad for piece in pieces if (grad := piece.grad) is not None]
        if grads:
            torch._foreach_mul_(grads, scale)
    return norm


def _counts_here(piece: Piece, state: ParallelState) -> bool:
    """Whether this rank answers for its piece of the parameter."""
    sharding = sharding_of(cast("nn.Parameter", piece.source))
    peers = [peer - state.offset for peer in piece.peers]
    return is_owner(sharding, state.layout, state.rank, peers=peers, replica=piece.replica)


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
