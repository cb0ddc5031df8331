"""Scalings: the quantisation of one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mt_files import Checks

from mt_fp8.format import FORMATS, Format

Block = Literal["tensor", "row", "head", "token"] | tuple[int, int]
HADAMARD = 16  # elements that are rotated together


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How one tensor is quantised: the format of its elements, and what shares a scale.

    Attributes:
        format: Format of the elements: e4m3 (to 448), e5m2 (to 57344) or e2m1 (to 6).
        block: What shares a scale: the `tensor`; each `row`, which is the last dim; in
            `[..., heads, head_dim]` each `head` of all tokens, or all heads of each `token`; or a
            block of (rows, columns) of the last two dims, where those at the edge may be smaller.
        scale: Kind: `fp32`; `pow2`, an fp32 power of two; `e8m0`, a power of two in a byte;
            or `nvfp4`, an e4m3 for each block and an fp32 for the tensor.
        exponent: How e8m0 rounds it: `up`, so that nothing is clipped, or `floor`, as the OCP
            standard has it, where the largest elements may be.
        stochastic: Whether elements are rounded up or down at random, right in the mean.
        hadamard: Whether each 16 neighbours of a row are rotated first, which spreads outliers. It
            cancels in a product of two rotated tensors.
        margin: Scales leave room for values 2^margin times as large.
        eps: The smallest amax that scales are made for.

    Raises:
        FieldError: A field is out of range, or two don't go together. It is a ValueError.

    Example:
        >>> Scaling(block=(1, 32), scale="e8m0").format
        'e4m3'
    """

    format: Literal["e4m3", "e5m2", "e2m1"] = "e4m3"
    block: Block = "tensor"
    scale: Literal["fp32", "pow2", "e8m0", "nvfp4"] = "fp32"
    exponent: Literal["up", "floor"] = "up"
    stochastic: bool = False
    hadamard: bool = False
    margin: int = 0
    eps: float = 0.0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(0, "margin", "eps")
        checks.at_most(64, "margin")
        if "block" not in checks.errors and isinstance(self.block, tuple) and min(self.block) < 1:
            checks.add("block", f"{self.block} has a side below 1")
        if self.exponent == "floor" and self.scale != "e8m0":
            checks.add("exponent", f"floor is a rounding of e8m0, and scale is {self.scale!r}")
        self._check_nvfp4(checks)
        is_line = self.block == "row" or (isinstance(self.block, tuple) and self.block[0] == 1)
        if self.hadamard and not is_line:
            checks.add(
                "hadamard", f"rows are rotated: block must be 'row' or (1, n), not {self.block}"
            )
        checks.done()

    def _check_nvfp4(self, checks: Checks) -> None:
        if self.scale != "nvfp4":
            return
        if self.format != "e2m1":
            checks.add("scale", f"nvfp4 is for e2m1, and format is {self.format!r}")
        if isinstance(self.block, str):
            checks.add("block", f"nvfp4 has blocks, such as (1, 16); got {self.block!r}")
        if self.margin:
            checks.add("margin", "nvfp4 has none; use 0")

    @property
    def elements(self) -> Format:
        """The format of the elements."""
        return FORMATS[self.format]

    @property
    def is_square(self) -> bool:
        """Whether transposing codes and scales quantises the transpose."""
        square = isinstance(self.block, tuple) and self.block[0] == self.block[1]
        return (self.block == "tensor" or square) and not self.hadamard

    @property
    def is_whole(self) -> bool:
        """Whether the whole tensor is looked at before one of its elements can be quantised."""
        return isinstance(self.block, str) or self.scale == "nvfp4"

    @property
    def spans_rows(self) -> bool:
        """Whether rows share a scale however many they are, or for nvfp4 a level of it."""
        return self.block in ("tensor", "head") or self.scale == "nvfp4"
