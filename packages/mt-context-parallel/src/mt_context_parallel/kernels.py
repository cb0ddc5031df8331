"""Attention of one tile: output and log-sum-exp forward, a backward given the global log-sum-exp.

With the log-sum-exp over *all* keys of a query, the gradients of one tile are exact on their own:
P = exp(scores - lse) are the true weights, and delta = <dout, out> is the same for every tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from mt_kernels import AUTO, Candidate, KernelError, Registry
from torch import Tensor

from mt_context_parallel.tiles import Tile


class TileGrads(NamedTuple):
    """Gradients of a tile's queries, keys and values, and of the whole bias if there is one."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None


class TileKernel(Protocol):
    """Computes attention of a tile. Neighbouring query heads may share a key head.

    Shape:
        q: [B, q, H, D]; k: [B, kv, G, D]; v: [B, kv, G, V]; out: [B, q, H, V]; lse: [B, H, q].
    """

    name: str
    block: int | None
    """The longest tile side that it takes; the caller cuts longer sides."""

    def obstacle(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
        """Return why this kernel cannot compute the tile, or None where it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp over the tile's keys; -inf for a query that sees none."""
        ...

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, of_queries: tuple[Tensor, ...]
    ) -> TileGrads:
        """Return gradients, given (dout, out, lse, delta) over all keys, not only the tile's."""
        ...


class TileKernels:
    """Kernels in order of preference; each kind of tile gets the first kernel that serves.

    The choice is made once for each device, dtype, head size and kind of mask, and kept.

    Args:
        kernels: Kernels, best first.
    """

    def __init__(self, kernels: Iterable[TileKernel]) -> None:
        candidates = (Candidate(kernel.name, kernel, kernel.obstacle) for kernel in kernels)
        self._registry = Registry("tile_attention", tuple(candidates))
        self._found: dict[tuple[object, ...], TileKernel] = {}

    def find(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> TileKernel:
        """Return the kernel for a tile.

        Raises:
            KernelError: No kernel serves; the message has each one's reason.
        """
        key = (q.device, q.dtype, q.shape[2:], k.shape[2:], v.shape[-1], tile.kind)
        if key not in self._found:
            try:
                self._found[key] = self._registry.find(AUTO, q, k, v, tile).function
            except KernelError as error:
                raise KernelError(f"{error}; add ReferenceKernel() at their end") from error
        return self._found[key]


class ReferenceKernel:
    """Plain torch, on any device: every mask and dropout; scores of one block at a time."""

    name = "reference"

    def __init__(self, block: int = 1024) -> None:
        if not isinstance(block, int) or block < 1:
            raise ValueError(f"block must be at least 1 token, got {block}")
        self.block: int | None = block

    def obstacle(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
        """Return None, because this kernel can compute every tile."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """See `TileKernel`. Softmax in fp32, or fp64 for fp64 inputs."""
        scores = _scores(q, k, tile)
        lse = torch.logsumexp(scores, dim=-1)
        weights = scores.sub_(_finite(lse)[..., None]).exp_()
        kept = tile.kept(q.shape[2], weights.dtype, q.device)
        if kept is not None:
            weights *= kept
        out = _grouped(weights, k.shape[2]) @ _heads_first(v, weights.dtype)
        return _heads_last(out, q), lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, of_queries: tuple[Tensor, ...]
    ) -> TileGrads:
        """See `TileKernel`."""
        dout, _, lse, delta = of_queries
        groups = k.shape[2]
        scores = _scores(q, k, tile)
        # The derivative of the cap is 1 - tanh^2. A masked score is -inf and has weight 0 anyway.
        slope = None
        if tile.softcap is not None:
            capped = scores if tile.bias is None else scores - _spread(tile.bias, tile, scores)
            slope = 1 - (capped / tile.softcap).clamp_(-1).square_()
        weights = scores.sub_(_finite(lse)[..., None]).exp_()
        kept = tile.kept(q.shape[2], weights.dtype, q.device)
        dropped = weights if kept is None else weights * kept
        dout_rows = _grouped(_heads_first(dout, weights.dtype), groups)
        dv = _grouped(dropped, groups).transpose(-1, -2) @ dout_rows
        dweights = (dout_rows @ _heads_first(v, weights.dtype).transpose(-1, -2)).view_as(weights)
        if kept is not None:
            dweights *= kept
        dweights.sub_(delta[..., None]).mul_(weights)
        dbias = _bias_grad(tile, dweights) if tile.trains_bias else None
        dweights.mul_(tile.scale)
        dscores = _grouped(dweights if slope is None else dweights.mul_(slope), groups)
        dq = dscores @ _heads_first(k, weights.dtype)
        dk = dscores.transpose(-1, -2) @ _grouped(_heads_first(q, weights.dtype), groups)
        return TileGrads(_heads_last(dq, q), dk.transpose(1, 2), dv.transpose(1, 2), dbias)


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.transpose(1, 2).to(dtype)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Group rows of query heads that share a key head. [B, H, q, n] -> [B, G, R * q, n]."""
    return x.reshape(x.shape[0], groups, -1, x.shape[-1])


def _heads_last(rows: Tensor, like: Tensor) -> Tensor:
    """[B, G, R * q, D] -> [B, q, H, D]."""
    batch, length, heads, _ = like.shape
    return rows.reshape(batch, heads, length, rows.shape[-1]).transpose(1, 2)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf by 0: where no key is seen, -inf - -inf would be NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _scores(q: Tensor, k: Tensor, tile: Tile) -> Tensor:
    """Return masked scores. [B, H, q, kv]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = _grouped(_heads_first(q, dtype), k.shape[2])
    scores = (rows @ _heads_first(k, dtype).transpose(-1, -2)).mul_(tile.scale)
    scores = scores.view(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if tile.softcap is not None:
        scores.div_(tile.softcap).tanh_().mul_(tile.softcap)
    if tile.bias is not None:
        scores += _spread(tile.bias, tile, scores)
    allowed = tile.allowed(q.device)
    return scores if allowed is None else scores.masked_fill_(~allowed, -torch.inf)


def _spread(bias: Tensor, tile: Tile, scores: Tensor) -> Tensor:
    """Return the bias of each pair's score. [H, 2 length - 1] -> [H, q, kv]."""
    return bias.to(scores.dtype)[:, tile.distances(scores.device)]


def _bias_grad(tile: Tile, dscores: Tensor) -> Tensor:
    """Sum [B, H, q, kv] over samples and over pairs of one distance. [H, 2 length - 1]."""
    sums = dscores.new_zeros(dscores.shape[1], 2 * tile.length - 1)
    return sums.index_add_(1, tile.distances(dscores.device).flatten(), dscores.sum(0).flatten(1))


def _plain_causal(q: Tensor, v: Tensor, tile: Tile) -> str | None:
    """Return why a kernel whose only mask is `is_causal` cannot compute the tile."""
    if q.shape[-1] != v.shape[-1]:
        return f"head_dim {q.shape[-1]} of queries and {v.shape[-1]} of values"
    if tile.dropout is not None and tile.dropout.probability:
        return "dropout by global index"
    if tile.softcap is not None:
        return f"a soft cap of {tile.softcap}"
    if tile.bias is not None:
        return "a bias of the scores"
    if tile.documents is not None:
        return "document ids"
    if tile.window is not None:
        return f"a window of {tile.window}"
    if tile.causal and not tile.is_square:
        return "a causal mask over different queries and keys"
    return None


class SdpaCpuKernel:
    """torch's flash attention for the CPU: full and causal tiles."""

    name = "sdpa-cpu"
    block: int | None = None

    def obstacle(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
        """See `TileKernel`."""
        if q.device.type != "cpu":
            return f"device {q.device.type}"
        return _plain_causal(q, v, tile)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """See `TileKernel`."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (q, k, v)), 0.0, tile.causal, scale=tile.scale
        )
        return out.transpose(1, 2), lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, of_queries: tuple[Tensor, ...]
    ) -> TileGrads:
        """See `TileKernel`."""
        dout, out, lse, _ = of_queries
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in (dout, q, k, v, out)),
            lse,
            0.0,
            tile.causal,
            scale=tile.scale,
        )
        return TileGrads(*(g.transpose(1, 2) for g in grads))


class FlashKernel:
    """torch's flash attention for CUDA, fp16 and bf16: full and causal tiles."""

    name = "flash"
    block: int | None = None

    def obstacle(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
        """See `TileKernel`."""
        reason = _plain_half_precision(q, v, tile, largest=256)
        if reason is not None:
            return reason
        if not torch.backends.cuda.is_flash_attention_available():
            return "a torch built without flash attention"
        # torch's own choice of kernels rules this out for training, since backward raises.
        small = _capability(q) in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
        if small and 192 < q.shape[-1] <= 224:
            return f"head_dim {q.shape[-1]} in backward on compute capability {_capability(q)}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """See `TileKernel`."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, tile.causal, False),
            scale=tile.scale,
        )
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, of_queries: tuple[Tensor, ...]
    ) -> TileGrads:
        """See `TileKernel`."""
        dout, out, lse, _ = of_queries
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # seeds of a dropout of 0
        sizes = (q.shape[1], k.shape[1])
        grads = torch.ops.aten._flash_attention_backward(
            dout.contiguous(),
            *(q, k, v, out.contiguous(), lse.contiguous(), None, None, *sizes, 0.0, tile.causal),
            *(unused, unused),
            scale=tile.scale,
        )
        return TileGrads(*grads)


class CudnnKernel:
    """cuDNN's attention for CUDA, fp16 and bf16: full and causal tiles."""

    name = "cudnn"
    block: int | None = None

    def obstacle(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> str | None:
        """See `TileKernel`."""
        reason = _plain_half_precision(q, v, tile, largest=128)
        if reason is not None:
            return reason
        if not torch.backends.cudnn.is_available() or (torch.backends.cudnn.version() or 0) < 90000:
            return f"cuDNN {torch.backends.cudnn.version()}, older than 9"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """See `TileKernel`."""
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            *(None, True, 0.0, tile.causal, False),
            scale=tile.scale,
        )
        return out.transpose(1, 2), lse.view(q.shape[0], q.shape[2], q.shape[1])

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, of_queries: tuple[Tensor, ...]
    ) -> TileGrads:
        """See `TileKernel`."""
        dout, out, lse, _ = of_queries
        unused = torch.zeros(1, dtype=torch.int64, device=q.device)  # seeds of a dropout of 0
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(x.transpose(1, 2) for x in (dout.contiguous(), q, k, v, out.contiguous())),
            lse.contiguous()[..., None],
            *(unused, unused, None, None, None, q.shape[1], k.shape[1], 0.0, tile.causal),
            scale=tile.scale,
        )
        return TileGrads(*(g.transpose(1, 2) for g in grads))


def _plain_half_precision(q: Tensor, v: Tensor, tile: Tile, *, largest: int) -> str | None:
    """Return why a CUDA kernel for plain tiles in half precision cannot compute the tile."""
    if q.device.type != "cuda":
        return f"device {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {q.dtype}"
    if q.shape[-1] > largest or q.shape[-1] % 8:
        return f"head_dim {q.shape[-1]}, not a multiple of 8 up to {largest}"
    reason = _plain_causal(q, v, tile)
    if reason is None and _capability(q) < (8, 0):
        return f"compute capability {_capability(q)}, below 8.0"
    return reason


def _capability(q: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(q.device)
