"""Newton-Schulz iterations that make a matrix orthogonal, whole or split over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from mt_files import check_type
from torch import Tensor

from mt_optim.checks import check_number, check_size

Triple = tuple[float, float, float]

# One triple for all steps (Keller Jordan), or one for each of five steps (You Jiacheng).
COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
SCALES = ("spectral", "unit_rms_norm", "shape_scaling", "none")
TP_MODES = ("duplicated", "distributed", "blockwise")
_TINY = 1e-7


@dataclass(frozen=True, kw_only=True)
class Orthogonalization:
    """How Muon makes the momentum of a matrix orthogonal.

    Attributes:
        coefficients: `simple`, `quintic`, or triples (a, b, c) that take turns in the steps.
        steps: Number of steps.
        scale: What the result is multiplied with for `o` outputs and `i` inputs: `spectral`
            sqrt(max(o, i)), `unit_rms_norm` sqrt(o / i), `shape_scaling` sqrt(max(1, o / i)), or
            `none`.
        extra_scale: Another factor. 0.2 with `spectral` gives updates as large as AdamW's.
        tp: Treatment of a matrix split over ranks: `duplicated` (every rank gathers the
            whole and gets the bits of one rank), `distributed` (the iteration runs on the shards
            and sums Gram matrices; equal to one rank up to rounding) or `blockwise` (each shard is
            a matrix of its own, without communication; other numbers).
        dtype: Dtype of the iterations; bf16 is enough, as they only approximate the result.

    Raises:
        ValueError: A field is out of range.
        TypeError: A field is of another type.
    """

    coefficients: str | Sequence[Triple] = "simple"
    steps: int = 5
    scale: str = "spectral"
    extra_scale: float = 1.0
    tp: str = "duplicated"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for what, allowed in (("scale", SCALES), ("tp", TP_MODES)):
            if getattr(self, what) not in allowed:
                raise ValueError(
                    f"{what} must be one of {', '.join(allowed)}; got {getattr(self, what)!r:.60}"
                )
        if isinstance(self.coefficients, str) and self.coefficients not in COEFFICIENTS:
            raise ValueError(
                f"coefficients must be {' or '.join(COEFFICIENTS)}, or triples of numbers; got "
                f"{self.coefficients[:60]!r}"
            )
        if not self.triples or any(len(triple) != 3 for triple in self.triples):
            raise ValueError(f"coefficients must be triples of numbers, got {self.coefficients!r}")
        for triple in self.triples:
            for number in triple:
                check_number("coefficients", number)
        check_type("steps", self.steps, int)
        if not 1 <= self.steps < 100:
            raise ValueError(f"steps must be 1 to 99, got {self.steps}")
        check_size("extra_scale", self.extra_scale)
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point dtype of torch, got {self.dtype!r}")

    @property
    def triples(self) -> tuple[Triple, ...]:
        """The coefficients as triples."""
        if isinstance(self.coefficients, str):
            return COEFFICIENTS[self.coefficients]
        return tuple(self.coefficients)

    def factor(self, rows: int, columns: int) -> float:
        """Return what an orthogonal matrix of this shape is multiplied with."""
        scale = {
            "spectral": math.sqrt(max(rows, columns)),
            "unit_rms_norm": math.sqrt(rows / columns),
            "shape_scaling": math.sqrt(max(1.0, rows / columns)),
            "none": 1.0,
        }[self.scale]
        return scale * self.extra_scale

    def apply(
        self, x: Tensor, *, group: dist.ProcessGroup | None = None, split: str = "rows"
    ) -> Tensor:
        """Return the nearest orthogonal matrix, roughly: all singular values go towards 1.

        With A = X X^T a step is X <- a X + (b A + c A^2) X, from X / |X|. The side of A is the
        shorter side of the matrix, or, if it is split over ranks, the side that is whole.

        Args:
            x: The matrix, or this rank's rows or columns of it.
            group: The ranks with the other rows or columns; Gram matrices are summed over it.
            split: Form of this rank's part, "rows" or "columns".

        Shape:
            x: [rows, columns]. The result has the same.
        """
        y = x.to(dtype=self.dtype, copy=True)
        is_tall = y.size(0) > y.size(1) if group is None else split == "rows"
        if is_tall:
            y = y.T
        y.div_(_norm(y, group).clamp(min=_TINY))
        for step in range(self.steps):
            a, b, c = self.triples[step % len(self.triples)]
            gram = _summed(y @ y.T, group)
            poly = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            y = torch.addmm(y, poly, y, beta=a)
        # In the order of the weight: adding what has other strides takes several times longer.
        return y.T.contiguous() if is_tall else y


def _norm(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x.norm()
    wide = torch.promote_types(x.dtype, torch.float32)
    return _summed(x.to(wide).square().sum(), group).sqrt().to(x.dtype)


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dist.all_reduce(wide, group=group)
        x = wide.to(x.dtype)
    return x
