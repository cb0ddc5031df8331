"""The autograd function that all algorithms share: sinks, and a backward from the saved output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_context_parallel.gathered import gathered_backward, gathered_forward
from mt_context_parallel.local import LocalAttention, Partial
from mt_context_parallel.ring import ring_backward, ring_forward

Triple = tuple[Tensor, Tensor, Tensor]


# Alike by identity: torch.compile of torch 2.11 hashes the object before it has its fields.
@dataclass(frozen=True, kw_only=True, eq=False)
class SplitAttention:
    """Attention of this rank's queries to the keys of a group.

    Attributes:
        local: what this rank computes.
        group: the ranks that share the keys; None for this one alone.
        order: where to put the gathered keys, to get all of them at once; None for a ring.
    """

    local: LocalAttention
    group: dist.ProcessGroup | None
    order: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """The attention output.

        Shape:
            q: [B, S, H, D]; k: [B, S, G, D]; v: [B, S, G, V]; sinks: [H]. Returns [B, S, H, V].
        """
        return cast(Tensor, _Function.apply(q, k, v, sinks, self))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, without sinks."""
        if self.group is not None and self.order is not None:
            return gathered_forward(self.local, q, k, v, self.group, self.order)
        if self.group is not None:
            return ring_forward(self.local, q, k, v, self.group)
        partial = Partial(q, v.shape[-1])
        self.local.forward(partial, q, k, v, 0)
        return partial.result()

    def backward(self, qkv: Triple, of_queries: tuple[Tensor, Tensor, Tensor, Tensor]) -> Triple:
        """Gradients of queries, keys and values from (dout, out, lse, delta)."""
        if self.group is not None and self.order is not None:
            return gathered_backward(self.local, qkv, of_queries, self.group, self.order)
        if self.group is not None:
            return ring_backward(self.local, qkv, of_queries, self.group)
        q, k, v = qkv
        dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        dkv = self.local.backward(qkv, 0, of_queries, dq)
        return (dq, *(dkv or (torch.zeros_like(k), torch.zeros_like(v))))


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, attention: SplitAttention
    ) -> Tensor:
        out, lse = attention.forward(q, k, v)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
            out = out * (lse - total).exp_().transpose(1, 2)[..., None]
            lse = total
        out = out.to(q.dtype)
        ctx.attention = attention
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dout = grads[0]
        delta = (dout.to(lse.dtype) * out).sum(dim=-1).transpose(1, 2)
        dq, dk, dv = ctx.attention.backward((q, k, v), (dout, out, lse, delta))
        dsinks = None
        if sinks is not None:
            # A sink is a key with the value 0: its weight exp(sink - lse) times (0 - delta).
            weight = (sinks.to(lse.dtype)[None, :, None] - lse).exp_()
            dsinks = (weight * delta).sum(dim=(0, 2)).neg_().to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None
