"""The options of an expert."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import check_type
from mt_kernels import AUTO

from mt_moe.experts.form import Activation, check_form
from mt_moe.experts.kernels import GROUPED_KERNELS


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """What an expert computes: `down(act(up x))`, or with a gate `down(act(gate x) * (up x))`.

    Attributes:
        activation: Name of the activation.
        gated: Multiply the activation by a second projection.
        bias: Give both projections a bias.
        clamp: Largest value of the gate, and largest magnitude of `up`; None does not clamp.
        up_offset: Added to `up` after clamping. GPT-OSS has `gelu_quick`, 7 and 1.
        multiple: Pad each expert's rows with zeros to a multiple of this, for low precision.
        kernel: Kernel of the products: "auto", "grouped_mm", "triton", "loop" or the name of
            another package's (entry point `mt.kernels`, `grouped_linear.<name>`).
        invariant: Whether a row's activation has the same bits beside any other rows.

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
    invariant: bool = False

    def __post_init__(self) -> None:
        check_type("multiple", self.multiple, int)
        form = {"clamp": self.clamp, "up_offset": self.up_offset}
        check_form(self.activation, gated=self.gated, **form)
        if self.kernel != AUTO:
            GROUPED_KERNELS.get(self.kernel)  # raises for an unknown name
        if self.multiple < 1:
            raise ValueError(f"multiple must be at least 1, got {self.multiple}")
