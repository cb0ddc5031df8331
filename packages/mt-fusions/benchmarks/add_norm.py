"""A residual and its norm against torch's, eager and compiled.

    python packages/mt-fusions/benchmarks/add_norm.py [inductor]

Prints the times of the others over ours (above 1 ours is faster) and the share of a copy of
the bytes that have to move: both terms and both results forward; backward the sum, the gradients
of both results and that of the terms.
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from mt_fusions import add_layer_norm, add_rms_norm
from timing import eager_and_inductor, forward_of, report, step_of
from torch import Tensor

ROWS, WIDTH = 4096, 1024
Pair = tuple[Tensor, Tensor]


def plain_rms(x: Tensor, residual: Tensor, weight: Tensor) -> Pair:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, 1e-5), total


def plain_layer(x: Tensor, residual: Tensor, weight: Tensor) -> Pair:
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, None, 1e-5), total


def rms(x: Tensor, residual: Tensor, weight: Tensor) -> Pair:
    return add_rms_norm(x, residual, weight, 1e-5)


def layer(x: Tensor, residual: Tensor, weight: Tensor) -> Pair:
    return add_layer_norm(x, residual, weight, None, 1e-5)


def stacked(function: Callable[..., Pair], grads: Pair) -> Callable[..., Tensor]:
    """One number whose gradient gives both results those gradients."""

    def run(*args: Tensor) -> Tensor:
        y, total = function(*args)
        return _Given.apply(y, total, *grads)  # pyright: ignore[reportReturnType]

    return run


class _Given(torch.autograd.Function):
    """Nothing forward, and given gradients backward: a sum would cost time of its own."""

    @staticmethod
    def forward(ctx, y, total, grad_y, grad_total):  # noqa: ANN001, ANN205
        ctx.grads = grad_y, grad_total
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, *_):  # noqa: ANN001, ANN002, ANN205
        return (*ctx.grads, None, None)


def main() -> None:
    inductor = "inductor" in sys.argv
    for dtype in (torch.float32, torch.bfloat16):
        x, residual, *grads = torch.randn(4, ROWS, WIDTH).to(dtype)
        args = x, residual, torch.rand(WIDTH).to(dtype)
        for ours, plain in ((rms, plain_rms), (layer, plain_layer)):
            torch.testing.assert_close(ours(*args), plain(*args))
            functions = {"ours": ours, **eager_and_inductor(plain, inductor=inductor)}
            name = f"add_{ours.__name__}_norm {dtype}"
            forward = {key: forward_of(f, *args) for key, f in functions.items()}
            report(f"{name} forward", forward, 4 * x.nbytes)
            ways = {key: stacked(f, tuple(grads)) for key, f in functions.items()}
            step = {key: step_of(f, torch.ones((), dtype=dtype), *args) for key, f in ways.items()}
            report(f"{name} with backward", step, 8 * x.nbytes)


if __name__ == "__main__":
    main()
