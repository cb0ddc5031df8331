"""`mt-ckpt diff`: the arrays in which two checkpoints differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from mt_files import Progress, say
from torch import Tensor

from mt_ckpt.array import ArraySpec
from mt_ckpt.command.place import opened
from mt_ckpt.exchange.arrays import below, bytes_of, dtype_of, stored_name
from mt_ckpt.load import ArrayReader
from mt_ckpt.shard import TensorShard

_BLOCK = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Compare two checkpoints bit by bit; the exit status is 0 if all arrays are equal, else 1.

    Arrays that differ are listed with the number of differing values, the largest difference, and
    the norm of the difference relative to the norm of the first. Steps and metadata may differ.

    Attributes:
        a: A run folder, a folder of checkpoints (meaning the latest), or a step directory.
        b: The other one.
        prefix: Compare only the arrays of this group, such as model.
    """

    a: Path
    b: Path
    prefix: str = ""

    def run(self) -> int:
        """Run the command."""
        with opened(self.a) as a, opened(self.b) as b:
            lines = list(self._lines(a, b))
            for line in lines:
                say(line)
            count = len(below(a, self.prefix))
            if not lines:
                say(f"{count} arrays are equal, bit by bit")
            return 1 if lines else 0

    def _lines(self, a: ArrayReader, b: ArrayReader) -> Iterator[str]:
        ours, others = below(a, self.prefix), below(b, self.prefix)
        total, done = sum(map(bytes_of, ours.values())), 0
        progress = Progress()
        try:
            for name in sorted({*ours, *others}):
                full = stored_name(self.prefix, name)
                if name not in others or name not in ours:
                    yield f"{full}: only in {a.path if name in ours else b.path}"
                    continue
                progress.update("comparing", done, total)
                done += bytes_of(ours[name])
                if found := _compared(a, b, full, ours[name], others[name]):
                    yield f"{full}: {found}"
        finally:
            progress.clear()


@dataclass
class _Sums:
    """Differences of two arrays, summed over the blocks so far.

    Attributes:
        differing: Number of values that differ in their bits.
        largest: The largest difference; infinity if only one of two values is finite.
        squares: Sum of the squares of the differences.
        of_first: Sum of the squares of the first array's values.
    """

    differing: int = 0
    largest: float = 0.0
    squares: float = 0.0
    of_first: float = 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Compare two blocks of the same shape."""
        same = _bits(a) == _bits(b) if a.dtype == b.dtype else a == b
        wide_a, wide_b = a.double(), b.double()
        self.of_first += float(wide_a.nan_to_num().square().sum())
        if same.all():
            return
        self.differing += int(same.numel() - same.sum())
        apart = (wide_a - wide_b).abs_()
        # Equal values, two NaNs, and two equal infinities have no difference.
        apart[same | (wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())] = 0.0
        apart = apart.nan_to_num(nan=math.inf, posinf=math.inf)
        self.largest = max(self.largest, float(apart.max()))
        self.squares += float(apart.square().sum())


def _compared(a: ArrayReader, b: ArrayReader, name: str, ours: ArraySpec, other: ArraySpec) -> str:
    """Return a description of the differences of an array; empty if there are none."""
    if ours.shape != other.shape:
        return f"shape {list(ours.shape)} and {list(other.shape)}"
    sums = _Sums()
    for offsets, shape in _blocks(ours):
        blocks = []
        for arrays, spec in ((a, ours), (b, other)):
            values = torch.empty(shape, dtype=dtype_of(spec))
            arrays.fill(TensorShard(name, values, global_shape=spec.shape, offsets=offsets))
            blocks.append(values)
        sums.add(*blocks)
    parts = [] if ours.dtype == other.dtype else [f"{ours.dtype} and {other.dtype}"]
    if sums.differing:
        relative = math.sqrt(sums.squares / sums.of_first) if sums.of_first else math.inf
        parts.append(
            f"{sums.differing} of {math.prod(ours.shape)} values differ, by at most "
            f"{sums.largest:.6g}; relative norm {relative:.3g}"
        )
    return "; ".join(parts)


def _blocks(spec: ArraySpec) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and shapes of blocks of whole rows, so that memory stays bounded."""
    if not spec.shape or bytes_of(spec) <= _BLOCK:
        yield (0,) * len(spec.shape), spec.shape
        return
    rows = max(1, _BLOCK * spec.shape[0] // bytes_of(spec))
    for start in range(0, spec.shape[0], rows):
        shape = (min(rows, spec.shape[0] - start), *spec.shape[1:])
        yield (start, *(0 for _ in spec.shape[1:])), shape


def _bits(values: Tensor) -> Tensor:
    """Return the bits of each value as an integer."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(kinds[values.dtype.itemsize])
