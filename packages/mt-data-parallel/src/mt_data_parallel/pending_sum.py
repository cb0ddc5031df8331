"""A sum over ranks under way: in any dtype, by one collective or in two steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mt_data_parallel.exchange import Exchange, start_gather, start_swap
from mt_data_parallel.reduction import Reduction


class PendingSum:
    """The sum of one flat tensor per rank, started when it is made; `wait` ends it.

    If `out` is as large as the addends, every rank gets the whole sum; otherwise rank `r` gets the
    `r`-th equal part. Elements are sent in `reduce_dtype` and summed by the collective (all-reduce
    or reduce-scatter). With `local_sum` they are sent to the rank of their part, added there in
    fp32 (fp64) in rank order, and, for an all-reduce, gathered in the dtype of `out`. On a CPU a
    reduce-scatter works like this too, in the dtype of the message.

    Args:
        addend: This rank's addend, which may be overwritten; `out` may be a view of it.
        out: The memory for the sum.
        group: The ranks of the sum.
        how: Dtype and place of the additions, and whether to divide by the number of ranks.
        scale: Multiplies every addend before it is sent.
    """

    def __init__(
        self, addend: Tensor, out: Tensor, group: dist.ProcessGroup, how: Reduction, scale: float
    ) -> None:
        # A gradient may still be part of an autograd graph.
        addend, out = addend.detach(), out.detach()
        self._out, self._group, self._how = out, group, how
        self._parts: list[Tensor] = []
        self._sent = _sent(addend, how.reduce_dtype or addend.dtype, scale)
        self._found = out
        is_whole = out.numel() == addend.numel()
        op = dist.ReduceOp.AVG if how.average else dist.ReduceOp.SUM
        self._work: Exchange | dist.Work | None
        # gloo's reduce-scatter is an all-reduce, so the CPU exchanges parts instead.
        if how.local_sum or (not is_whole and addend.device.type == "cpu"):
            self._work, self._parts = start_swap(self._sent, group)
        elif is_whole:
            self._found = self._sent
            self._work = dist.all_reduce(self._sent, op=op, group=group, async_op=True)
        else:
            if self._sent.dtype != out.dtype:
                self._found = torch.empty_like(out, dtype=self._sent.dtype)
            self._work = dist.reduce_scatter_tensor(
                self._found, self._sent, op=op, group=group, async_op=True
            )

    def advance(self) -> None:
        """Start the second step of a local sum, without waiting for the other ranks' sums."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        self._finish_work()
        ranks, out = self._group.size(), self._out
        own = self._added(parts)
        if self._how.average:
            own /= ranks
        if out.numel() == own.numel():
            out.copy_(own)
            return
        self._sent = own.to(out.dtype)
        self._work = start_gather(out, self._sent, self._group)

    def wait(self) -> None:
        """Wait until the sum is in `out`."""
        self.advance()
        self._finish_work()
        if self._found.data_ptr() != self._out.data_ptr():
            self._out.copy_(self._found)

    def _added(self, parts: list[Tensor]) -> Tensor:
        """Add the parts in rank order; a received part is overwritten, this rank's own is not.

        A local sum is computed in fp32 or wider, and the replacement of a collective in the dtype
        of the message.
        """
        first, second, *others = parts
        wide = torch.promote_types(self._out.dtype, torch.float32)
        if not self._how.local_sum or first.dtype == wide:
            own = torch.add(first, second, out=second if self._group.rank() == 0 else first)
        else:
            own = first.to(wide).add_(second)
        for other in others:
            own += other
        return own

    def _finish_work(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def _sent(addend: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return the message; it is scaled in the wider of the two dtypes."""
    if dtype.itemsize > addend.dtype.itemsize:
        sent = addend.to(dtype)
        return sent if scale == 1 else sent.mul_(scale)
    if scale != 1:
        addend.mul_(scale)
    return addend.to(dtype)
