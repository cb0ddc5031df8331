"""One sum over ranks that is on its way: in any dtype, by one collective or in two steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mt_data_parallel.reduction import Reduction


class Sum:
    """The sum of one flat tensor per rank, started when it is made; `wait` ends it.

    Where `out` is as large as the addends, every rank gets the whole sum, else rank `r` the `r`-th
    equal part of it. Communicated is what `Reduction` says: `reduce_dtype` elements, summed by the
    collective (all-reduce or reduce-scatter), or, with `local_sum`, sent to the rank that has the
    part (all-to-all), added there in fp32 (fp64) in the order of the ranks, and where everybody
    wants all of it gathered in the dtype of `out`.

    Args:
        addend: This rank's, which may be overwritten; `out` may be it, or a part of it.
        out: Where the sum goes.
        group: Over whom.
        how: Dtype and place of the additions, and whether to divide by the ranks.
        scale: Multiplies every addend before it is sent.
    """

    def __init__(
        self, addend: Tensor, out: Tensor, group: dist.ProcessGroup, how: Reduction, scale: float
    ) -> None:
        self._out, self._group, self._how = out, group, how
        self._parts: Tensor | None = None
        self._sent = _sent(addend, how.reduce_dtype or addend.dtype, scale)
        self._found = out
        is_whole = out.numel() == addend.numel()
        op = dist.ReduceOp.AVG if how.average else dist.ReduceOp.SUM
        if how.local_sum:
            self._parts = torch.empty_like(self._sent)
            work = dist.all_to_all_single(self._parts, self._sent, group=group, async_op=True)
        elif is_whole:
            self._found = self._sent
            work = dist.all_reduce(self._sent, op=op, group=group, async_op=True)
        else:
            if self._sent.dtype != out.dtype:
                self._found = torch.empty_like(out, dtype=self._sent.dtype)
            work = dist.reduce_scatter_tensor(
                self._found, self._sent, op=op, group=group, async_op=True
            )
        self._work: dist.Work | None = work

    def advance(self) -> None:
        """Do the second step of a local sum as far as it does not wait for other ranks' sums."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        self._finish_work()
        ranks, out = self._group.size(), self._out
        first, *others = parts.view(ranks, -1).unbind()
        own = first.to(torch.promote_types(out.dtype, torch.float32), copy=True)
        for other in others:
            own += other
        if self._how.average:
            own /= ranks
        if out.numel() == own.numel():
            out.copy_(own)
            return
        self._sent = own.to(out.dtype)
        self._work = dist.all_gather_into_tensor(out, self._sent, group=self._group, async_op=True)

    def wait(self) -> None:
        """Have the sum in `out`."""
        self.advance()
        self._finish_work()
        if self._found.data_ptr() != self._out.data_ptr():
            self._out.copy_(self._found)

    def _finish_work(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def _sent(addend: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return what is communicated; it is scaled in the wider one of the two dtypes."""
    if dtype.itemsize > addend.dtype.itemsize:
        sent = addend.to(dtype)
        return sent if scale == 1 else sent.mul_(scale)
    if scale != 1:
        addend.mul_(scale)
    return addend.to(dtype)
