"""torch's flex attention as a kernel: windows, documents and uneven causal tiles, fused on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from mt_kernels import flex_attention
from torch import Tensor

from mt_context_parallel.kernels import TileGrads
from mt_context_parallel.tiles import Tile


class FlexKernel:
    """torch's `flex_attention`, compiled: every mask, no dropout.

    Each size of a tile is compiled once in the process, without torch's `recompile_limit`; past
    that limit torch would run the unfused form with all scores in memory. A new size costs a
    compilation, so packed documents should have few different lengths.

    flex takes no log-sum-exp from outside, so backward computes the tile's own output and
    log-sum-exp again and differentiates them with the tile's weight in the whole: one forward more
    than a kernel with its own backward.

    Args:
        block: The longest tile side; a tile's mask is a boolean tensor of at most block x block.
        fused: Whether to compile it. `False` runs torch's unfused form on any device, for tests.
            (On a CPU, torch has a backward of it only in tests that disable a check.)
    """

    name = "flex"

    def __init__(self, *, block: int = 8192, fused: bool = True) -> None:
        if block < 1:
            raise ValueError(f"block must be at least 1 token, got {block}")
        self.block: int | None = block
        self.fused = fused
        self._backend: Any = "inductor"

    def obstacle(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
        """See `TileKernel`."""
        if self.fused and q.device.type != "cuda":
            return f"device {q.device.type}"
        if self.fused and q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"dtype {q.dtype}"
        if self.fused and min(q.shape[-1], v.shape[-1]) < 16:
            return f"head_dim {min(q.shape[-1], v.shape[-1])}, below 16"
        if tile.softcap is not None:
            return f"a soft cap of {tile.softcap}"
        if tile.bias is not None:
            return "a bias of the scores"
        if tile.dropout is not None and tile.dropout.probability:
            return "dropout by global index"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """See `TileKernel`."""
        return self._attend(q.detach(), k.detach(), v.detach(), tile)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, of_queries: tuple[Tensor, ...]
    ) -> TileGrads:
        """See `TileKernel`.

        With w = exp(own lse - whole lse), the tile adds w * own out to the whole output. So its
        output has the gradient w * dout, and its log-sum-exp w * (<dout, own out> - delta).
        """
        dout, _, lse, delta = of_queries
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            own_out, own_lse = self._attend(q, k, v, tile)
        seen = lse.masked_fill(lse == -torch.inf, 0.0)  # -inf - -inf would be NaN
        weight = (own_lse.detach() - seen).exp()
        dout = dout.to(weight.dtype)
        share = (dout * own_out.detach()).sum(-1).transpose(1, 2)
        grad_out = (weight.transpose(1, 2)[..., None] * dout).to(own_out.dtype)
        grad_lse = (weight * (share - delta)).to(own_lse.dtype)
        grads = torch.autograd.grad([own_out, own_lse], [q, k, v], [grad_out, grad_lse])
        return TileGrads(*grads)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = _block_mask(tile, q.shape[0], q.device)
        backend = self._backend if self.fused else None
        out, lse = flex_attention(q, k, v, mask, tile.scale, backend=backend)
        return out.transpose(1, 2), lse


def _block_mask(tile: Tile, batch: int, device: torch.device) -> Any:
    """Return the tile's mask in flex's form; None where all pairs are allowed."""
    from torch.nn.attention.flex_attention import create_block_mask

    allowed = tile.allowed(device)
    if allowed is None:
        return None
    of_sample = allowed.expand(batch, -1, -1, -1)

    def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        return of_sample[sample, 0, query, key]

    samples = None if allowed.shape[0] == 1 else batch
    sizes = (tile.q.length, tile.kv.length)
    return create_block_mask(sees, samples, None, *sizes, device=device)
