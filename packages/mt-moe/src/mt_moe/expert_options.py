"""What an expert computes, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mt_files import AUTO, check_type

from mt_moe.grouped import GROUPED_KERNELS, LOOP
from mt_moe.rules import Activation, check_form


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """What an expert computes: `down(act(up x))`, or with a gate `down(act(gate x) * (up x))`.

    Attributes:
        activation: Its name.
        gated: Whether there is a gate.
        bias: Whether both products have a bias.
        clamp: Before, the gate is cut to at most this, and `up` to between it and its negative.
        up_offset: Added to `up` after the cut. GPT-OSS has `gelu_quick`, 7 and 1.
        multiple: Rows of each expert are filled up to a multiple of it, for low precision.
        kernel: Of the products: "auto", "grouped_mm", "triton" or "loop".

    Raises:
        ValueError: A field is out of range.
    """

    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp: float | None = None
    up_offset: float = 0.0
    multiple: int = 1
    kernel: str = AUTO

    def __post_init__(self) -> None:
        check_type("multiple", self.multiple, int)
        kernels = (AUTO, *(kernel.name for kernel in GROUPED_KERNELS), LOOP)
        form: dict[str, Any] = {
            "gated": self.gated,
            "clamp": self.clamp,
            "up_offset": self.up_offset,
        }
        check_form(self.activation, **form)
        if self.kernel not in kernels:
            raise ValueError(f"kernel must be one of {', '.join(kernels)}, got {self.kernel!r}")
        if self.multiple < 1:
            raise ValueError(f"multiple must be at least 1, got {self.multiple}")
