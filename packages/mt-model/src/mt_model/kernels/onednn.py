"""fp32 products by oneDNN, after a check of their errors and of their speed.

torch's wheels multiply fp32 with MKL, which on some CPUs is slower than the oneDNN beside it.
torch's switch for oneDNN is named after bf16, to which a CPU with AMX may then round the operands.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
from mt_tensor_parallel import Gemm, TorchGemm
from torch import Tensor

MIN_ROWS = 64  # for fewer rows oneDNN takes longer to start than it saves
_LARGEST_ERROR = 1e-6
# Clear of what a busy machine makes of equal speeds, so that a run chooses again as it chose.
_LEAST_GAIN = 1.25
_TIMED = (256, 256, 768)  # rows, input and output features


_matmul = cast("Any", torch.backends.mkldnn).matmul


class _Switch(AbstractContextManager[None]):
    """Sends fp32 products to oneDNN; threads and nested uses share one count."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = Lock(), 0, ""

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = _matmul.fp32_precision
                _matmul.fp32_precision = "bf16"
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                _matmul.fp32_precision = self._before


_SWITCH = _Switch()


def onednn_products(*, when: bool = True) -> AbstractContextManager[None]:
    """Return a context in which torch sends fp32 products to oneDNN, if `when`.

    Only `Probe` says whether this machine's oneDNN then computes in fp32.
    """
    return _SWITCH if when and not torch.compiler.is_compiling() else nullcontext()


class OneDnnGemm(TorchGemm):
    """torch's products, with oneDNN for many fp32 rows; see `Gemm` for shapes."""

    @property
    def is_torch(self) -> bool:
        """True: these are torch's products of the tensors, by another of its libraries."""
        return True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`."""
        with onednn_products(when=_is_large(x)):
            return super().forward(x, weight, bias)

    def dgrad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """`grad_y @ weight`."""
        with onednn_products(when=_is_large(grad_y)):
            return super().dgrad(grad_y, weight)

    def wgrad(self, grad_y: Tensor, x: Tensor) -> Tensor:
        """`grad_y.T @ x`."""
        with onednn_products(when=_is_large(x)):
            return super().wgrad(grad_y, x)

    def wgrad_into(self, grad_y: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Add `grad_y.T @ x` to `out`, or write it there."""
        with onednn_products(when=_is_large(x)):
            super().wgrad_into(grad_y, x, out, accumulate=accumulate)

    def __repr__(self) -> str:
        return "OneDnnGemm()"


def _is_large(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.numel() >= MIN_ROWS * x.shape[-1]


class Probe(NamedTuple):
    """Measurements of a strategy's fp32 products on this machine.

    Attributes:
        error: Largest relative error of a product against fp64.
        gain: Speed over torch's own products.
    """

    error: float
    gain: float

    @classmethod
    def of(cls, gemm: Gemm) -> Probe:
        """Measure a strategy, which takes some tens of milliseconds."""
        with torch.inference_mode(), torch.autocast("cpu", enabled=False), _one_thread():
            values = [_values(*shape) for shape in (_TIMED, (96, 320, 33), (65, 7, 512))]
            error = max(_error(gemm, *tensors) for tensors in values)
            sides = (TorchGemm(), gemm)
            rounds = [[_seconds(side, *values[0]) for side in sides] for _ in range(7)]
        plain, own = (min(times) for times in zip(*rounds, strict=True))
        return cls(error, plain / own)

    @property
    def obstacle(self) -> str | None:
        """Why the products may not stand for fp32 ones."""
        if self.error <= _LARGEST_ERROR:
            return None
        return f"its products are off by {self.error:.0e}, more than fp32's {_LARGEST_ERROR:.0e}"

    @property
    def drawback(self) -> str | None:
        """Why torch's own products are preferred."""
        if self.gain >= _LEAST_GAIN:
            return None
        return f"{self.gain:.1f} times as fast as torch's, and {_LEAST_GAIN} would be clear"


@cache
def _probe() -> Probe:
    return Probe.of(OneDnnGemm())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread, whose processor time other programs hardly change."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def onednn_obstacle(like: Tensor, *_: int) -> str | None:
    """Return why oneDNN can't multiply tensors such as `like` in fp32, or None."""
    if like.device.type != "cpu":
        return f"it is for the CPU, and the model on {like.device}"
    if like.dtype != torch.float32:
        return f"it multiplies fp32, and the model is {like.dtype}"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch lacks it"
    # A tensor without data, by which memory is counted, can't be measured.
    return _probe().obstacle if type(like) is Tensor else None


def onednn_drawback(like: Tensor, ranks: int = 1) -> str | None:
    """Return why `auto` passes over oneDNN for a model on some ranks, or None."""
    if ranks > 1:
        return "ranks that measure apart may choose differently, so it has to be named"
    if type(like) is not Tensor:
        return "tensors without data can't be measured"
    return _probe().drawback


def _values(rows: int, width: int, out: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return an input, a weight and an output's gradient with bits that bf16 and TF32 lose."""
    random = torch.Generator("cpu").manual_seed(1)
    sizes = ((rows, width), (out, width), (rows, out))
    x, weight, grad = (
        torch.randn(size, generator=random, device="cpu", dtype=torch.float32) for size in sizes
    )
    return x * 2**-12 + 1, weight, grad


def _products(gemm: Gemm, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return gemm.forward(x, weight), gemm.dgrad(grad, weight), gemm.wgrad(grad, x)


def _error(gemm: Gemm, *tensors: Tensor) -> float:
    exact = _products(TorchGemm(), *(x.double() for x in tensors))
    found = _products(gemm, *tensors)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def _seconds(gemm: Gemm, *tensors: Tensor) -> float:
    start = time.thread_time()
    _products(gemm, *tensors)
    return time.thread_time() - start
