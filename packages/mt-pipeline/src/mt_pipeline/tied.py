"""Sums the gradients of a weight that several stages hold a copy of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_tied_gradients(
    copies: Iterable[nn.Parameter], *, group: dist.ProcessGroup | None, async_op: bool = False
) -> Callable[[], None]:
    """Give all copies of one weight the sum of their gradients.

    For an embedding that the first stage looks up and the last one multiplies with, and for the
    two copies of the model under DualPipe. Called once after the gradients of a step are there.
    Forward it has no part; here it is one all-reduce (sum, in the gradient's dtype) over `group`,
    and none where a rank holds all copies. A copy without a gradient counts as zeros.

    Bits: each copy has first added up its own micro-batches, then a rank adds its copies in the
    order given, then ranks are added. Of two summands the order does not matter, so with two
    copies, or two ranks, the sum is one number; one weight that is used at both ends without a
    pipeline adds in another order where there are several micro-batches.

    From a REDUCE hook use `async_op=True`: the hook comes before the rank's last messages, so
    ranks that wait for each other in hooks may wait for ever. A rank that holds several copies
    starts when the last of their stages is reduced.

    Args:
        copies: The copies on this rank, at least one; a parameter that occurs twice counts once.
        group: The ranks with copies; each calls this, with several weights in one order. None:
            this rank has them all.
        async_op: Whether only to start; else this waits.

    Returns:
        A function that waits and gives the sum to all copies: to be called before the gradients
        are used. Where `async_op` is False that has been done.

    Raises:
        ValueError: No copies, or copies of different shape or dtype.

    Example:
        >>> embedding, head = (nn.Parameter(torch.zeros(2)) for _ in range(2))
        >>> embedding.grad, head.grad = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        >>> _ = sum_tied_gradients([embedding, head], group=None)
        >>> embedding.grad, head.grad
        (tensor([4., 6.]), tensor([4., 6.]))
    """
    parameters = list({id(copy): copy for copy in copies}.values())
    if len({(copy.shape, copy.dtype) for copy in parameters}) != 1:
        shown = ", ".join(f"{tuple(copy.shape)} {copy.dtype}" for copy in parameters)
        raise ValueError(
            f"the copies are [{shown}]: pass at least one, all of the same shape and dtype; a rank "
            "without a copy is not in the group"
        )
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    total, *others = gradients
    for other in others:
        total += other
    work = None if group is None else dist.all_reduce(total, group=group, async_op=True)

    def finish() -> None:
        if work is not None:
            work.wait()
        for other in others:
            other.copy_(total)

    if not async_op:
        finish()
    return finish
