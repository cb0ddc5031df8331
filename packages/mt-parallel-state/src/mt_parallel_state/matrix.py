"""The matrices in a parameter of any number of dims."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MatrixSpec:
    """Row (output) and column (input) dims of a weight, and its fused parts.

    Methods that work on whole matrices read it: Muon, Shampoo-like optimizers, low-rank methods.

    Attributes:
        in_dims: Number of trailing column dims; the dims before are rows.
        part_dim: The dim along which a fused weight has several matrices. No axis may split it.
        parts: Size of each matrix along that dim; their sum is the size of the dim.
        names: Name of each matrix; by default its number.

    Example:
        >>> spec = MatrixSpec(part_dim=1, parts=(4, 1, 1))  # [kv_groups, 4 + 2, head_dim, hidden]
        >>> [tuple(part.shape) for part in spec.views(torch.empty(2, 6, 8, 32))]
        [(2, 4, 8, 32), (2, 1, 8, 32), (2, 1, 8, 32)]
        >>> [spec.shape(part.shape) for part in spec.views(torch.empty(2, 6, 8, 32))]
        [(64, 32), (16, 32), (16, 32)]

    Raises:
        ValueError: A field is out of range, or there are parts without a dim.
    """

    in_dims: int = 1
    part_dim: int | None = None
    parts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.in_dims < 1:
            raise ValueError(f"in_dims must be 1 or more, got {self.in_dims}")
        if (self.part_dim is None) != (not self.parts) or any(part < 1 for part in self.parts):
            raise ValueError(
                f"part_dim={self.part_dim!r} and parts={self.parts!r} come together, and each part "
                "has 1 or more"
            )
        if self.names and len(self.names) != len(self.parts):
            raise ValueError(f"names={self.names!r} must name each of parts={self.parts!r}")

    @property
    def part_names(self) -> tuple[str, ...]:
        """Name of each matrix of a fused weight."""
        return self.names or tuple(str(part) for part in range(len(self.parts)))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return rows and columns of a part of this shape."""
        return prod(shape[: -self.in_dims]), prod(shape[-self.in_dims :])

    def views(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a tensor of the weight's shape, as views of it.

        Raises:
            ValueError: The parts do not fit the tensor.
        """
        if self.part_dim is None:
            return (x,)
        if x.dim() <= self.part_dim or x.shape[self.part_dim] != sum(self.parts):
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} has no parts of {self.parts} along dim "
                f"{self.part_dim}"
            )
        return x.split(self.parts, self.part_dim)
