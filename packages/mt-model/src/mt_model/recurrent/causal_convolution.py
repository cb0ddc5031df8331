"""Depthwise convolution of each channel with its last few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from mt_fusions import invariant_activation
from mt_kernels import AUTO, Candidate, Registry, eager_obstacle
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mt_model.block.initial import Uniform, start_from


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    before: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """`y_t = bias + sum over j < K of weight_j x_(t - K + 1 + j)`, in each channel.

    Summed in fp32 (fp64 for fp64) and rounded once.

    Args:
        x: the tokens.
        weight: of the last K tokens, the current one last.
        bias: of each channel.
        before: the K - 1 tokens before the first; zeros if None.
        segments: as of `segments_of`; tokens of an earlier one count as zeros.

    Shape:
        x: [B, S, C]; weight: [C, K]; bias: [C]; before: [B, K - 1, C]; segments: [B, S].
        Returns [B, S, C].
    """
    length, taps = x.shape[1], weight.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    known, factors = with_tail(x, before, taps).to(wide), weight.to(wide)
    y = x.to(wide) * factors[:, -1]
    for back in range(1, taps):
        part = known[:, taps - 1 - back : taps - 1 - back + length]
        if segments is not None:
            part = part * _same(segments, back)
        y = torch.addcmul(y, part, factors[:, -1 - back])
    return (y if bias is None else y + bias).to(x.dtype)


def silu_convolution_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    before: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """SiLU of `causal_convolution`, which has the arguments."""
    return F.silu(causal_convolution(x, weight, bias, before=before, segments=segments))


def silu_convolution_invariant(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    before: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """`silu_convolution_reference`, with the same bits for a token in any pass."""
    y = causal_convolution(x, weight, bias, before=before, segments=segments)
    return invariant_activation(y, "silu")


def silu_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    before: Tensor | None = None,
    segments: Tensor | None = None,
    kernel: str = AUTO,
) -> Tensor:
    """`silu_convolution_reference`; in eager mode with a backward of few passes.

    Shape:
        As `causal_convolution`.
    """
    found = SILU_CONVOLUTION.find(kernel, before, segments)
    return found.function(x, weight, bias, before=before, segments=segments)


class _SiluConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        known, factors = x.to(wide), weight.t().to(wide).contiguous()
        if bias is None:
            y = known * factors[-1]
        else:
            y = torch.addcmul(bias.to(wide), known, factors[-1])
        for back in range(1, min(len(factors), x.shape[1])):
            y[:, back:].addcmul_(known[:, :-back], factors[-1 - back])
        y = y.to(x.dtype)
        ctx.save_for_backward(x, factors, y)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return F.silu(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, factors, y = ctx.saved_tensors
        of_weight, of_bias = ctx.dtypes
        grad = torch.ops.aten.silu_backward(grads[0], y).to(factors.dtype)
        known, length = x.to(factors.dtype), x.shape[1]
        grad_x, product = grad * factors[-1], grad * known
        grad_factors = torch.zeros_like(factors)
        torch.sum(product, (0, 1), out=grad_factors[-1])
        for back in range(1, min(len(factors), length)):
            grad_x[:, :-back].addcmul_(grad[:, back:], factors[-1 - back])
            product = torch.mul(grad[:, back:], known[:, :-back])
            torch.sum(product, (0, 1), out=grad_factors[-1 - back])
        grad_bias = None if of_bias is None else grad.sum((0, 1)).to(of_bias)
        return grad_x.to(x.dtype), grad_factors.t().to(of_weight), grad_bias


def _eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    before: Tensor | None,
    segments: Tensor | None,
) -> Tensor:
    del before, segments
    return _SiluConvolution.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


def _eager_obstacle(before: Tensor | None, segments: Tensor | None) -> str | None:
    if before is not None or segments is not None:
        return "tokens before the first, or documents"
    return eager_obstacle()


SILU_CONVOLUTION: Registry[Callable[..., Tensor]] = Registry(
    "silu_convolution",
    (
        Candidate("eager", _eager, _eager_obstacle),
        Candidate("reference", silu_convolution_reference),
        Candidate("invariant", silu_convolution_invariant),
    ),
)


def with_tail(x: Tensor, before: Tensor | None, taps: int) -> Tensor:
    """Put the last `taps - 1` tokens before the first in front; zeros if None.

    The result's last `taps - 1` tokens are then the ones to keep for the next call.

    Shape:
        x: [B, S, C]; before: [B, taps - 1, C]. Returns [B, taps - 1 + S, C].
    """
    return F.pad(x, (0, 0, taps - 1, 0)) if before is None else torch.cat((before, x), 1)


def _same(segments: Tensor, back: int) -> Tensor:
    """Return whether the token `places` before is of the same document; True before the start."""
    same = torch.ones_like(segments, dtype=torch.bool)
    same[:, back:] = segments[:, back:] == segments[:, : max(0, segments.shape[1] - back)]
    return same[..., None]


class CausalConvolution(nn.Module):
    """`silu_convolution`, of channels that may have several dims.

    Args:
        channels: of this rank, in as many dims as the sharding record needs.
        taps: tokens that the output depends on.
        bias: add one.
        dtype: of the parameters.
        kernel: Candidate of `SILU_CONVOLUTION`, by name.

    Shape:
        weight: [*channels, taps]; bias: [*channels]; forward(x): [B, S, product of channels] ->
        the same, and [B, taps - 1, product of channels].
    """

    def __init__(
        self,
        channels: tuple[int, ...],
        taps: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        kernel: str = AUTO,
    ) -> None:
        super().__init__()
        like = {"dtype": dtype, "device": torch.device("meta")}
        initial = Uniform(low=-(taps**-0.5), high=taps**-0.5)  # as torch's Conv1d
        self.taps, self.kernel = taps, kernel
        self.weight = nn.Parameter(torch.empty(*channels, taps, **like))
        self.bias = nn.Parameter(torch.empty(*channels, **like)) if bias else None
        for param in self.parameters():
            start_from(param, initial)

    def forward(
        self, x: Tensor, *, tail: Tensor | None, segments: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve, and return the tokens to keep for the next call.

        Args:
            x: Tokens.
            tail: Tokens before; None where none are kept.
            segments: Document numbers, as `segments_of` returns them.
        """
        weight = self.weight.flatten(0, -2)
        bias = None if self.bias is None else self.bias.flatten()
        given = {"before": tail, "segments": segments, "kernel": self.kernel}
        y = silu_convolution(x, weight, bias, **given)
        if tail is None:
            return y, None
        last = with_tail(x.detach(), tail, self.taps)[:, x.shape[1] :]
        if segments is not None:
            first = segments[:, :1].expand(-1, self.taps - 1)
            known = torch.cat((first, segments), 1)[:, x.shape[1] :]
            last = last * (known == segments[:, -1:])[..., None]
        return y, last
