"""The autograd function that all algorithms share: sinks, and a backward from the saved output.

Keys either arrive shard by shard (a ring), or all at once: the keys of this rank, or of the whole
group after an all-gather, as for Llama 3 (2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from mt_parallel_state import start_all_gather, start_reduce_scatter
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_context_parallel.local import LocalAttention, Partial
from mt_context_parallel.ring import ring_backward, ring_forward

Triple = tuple[Tensor, Tensor, Tensor]


# Alike by identity: torch.compile of torch 2.11 hashes the object before it has its fields.
@dataclass(frozen=True, kw_only=True, eq=False)
class SplitAttention:
    """Attention of this rank's queries to the keys of a group.

    Attributes:
        local: This rank's part of the attention.
        group: The ranks that share the keys; None for this rank alone.
        order: Order of the gathered keys (`order_of`), to get them all at once; None for a ring.
    """

    local: LocalAttention
    group: dist.ProcessGroup | None
    order: Tensor | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None = None
    ) -> Tensor:
        """Return the attention output; `bias` is the bias of the tiles, for its gradient.

        Shape:
            q: [B, S, H, D]; k: [B, S, G, D]; v: [B, S, G, V]; sinks: [H]; bias: [H, 2 * whole - 1].
            Returns [B, S, H, V].
        """
        return cast(Tensor, _Function.apply(q, k, v, sinks, bias, self))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp, without sinks."""
        if self.group is not None and self.order is None:
            return ring_forward(self.local, q, k, v, self.group)
        partial = Partial(q, v.shape[-1])
        self.local.forward(partial, q, self._whole(k), self._whole(v), 0)
        return partial.result()

    def backward(
        self, qkv: Triple, of_queries: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return gradients of queries, keys, values and bias, given (dout, out, lse, delta).

        Keys are gathered again rather than kept.
        """
        q, k, v = qkv
        dq = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        tile, dbias = self.local.whole, None
        if tile.bias is not None and tile.trains_bias:
            dbias = torch.zeros_like(tile.bias, dtype=dq.dtype)
        into = dq, dbias
        if self.group is not None and self.order is None:
            return dq, *ring_backward(self.local, qkv, of_queries, into, self.group), dbias
        dk, dv = self.local.backward((q, self._whole(k), self._whole(v)), 0, of_queries, into)
        return dq, self._own(dk), self._own(dv), dbias

    def _whole(self, x: Tensor) -> Tensor:
        """Gather the shards, in the order of the sequence. [B, S, ...] -> [B, ranks * S, ...]."""
        if self.group is None or self.order is None:
            return x
        return start_all_gather(x, self.group, 1).wait().index_select(1, self.order)

    def _own(self, x: Tensor) -> Tensor:
        """Apply the adjoint of `_whole`."""
        if self.group is None or self.order is None:
            return x
        shards = torch.empty_like(x).index_copy_(1, self.order, x)
        return start_reduce_scatter(shards, self.group, 1).wait()


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        attention: SplitAttention,
    ) -> Tensor:
        del bias  # the tiles have it
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
        dq, dk, dv, dbias = ctx.attention.backward((q, k, v), (dout, out, lse, delta))
        dsinks = None
        if sinks is not None:
            # A sink is a key with the value 0: its weight exp(sink - lse) times (0 - delta).
            weight = (sinks.to(lse.dtype)[None, :, None] - lse).exp_()
            dsinks = (weight * delta).sum(dim=(0, 2)).neg_().to(sinks.dtype)
        if dbias is not None:
            dbias = dbias.to(ctx.attention.local.whole.bias.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, dbias, None
