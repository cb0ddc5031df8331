"""Which options of an expert exclude each other, checked without importing torch."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Gate: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "gelu_quick"]
Activation: TypeAlias = Literal[Gate, "relu", "relu2"]


def check_form(activation: str, *, gated: bool, clamp: float | None, up_offset: float) -> None:
    """Check an expert's activation against its other options.

    Raises:
        ValueError: The activation does not exist, or a gate's option is set without a gate.
    """
    known = get_args(Gate if gated else Activation)
    if activation not in known:
        raise ValueError(
            f"activation must be one of {', '.join(known)} with gated={gated}, got {activation!r}"
        )
    if not gated and (clamp is not None or up_offset):
        raise ValueError("clamp and up_offset are options of a gate; use gated=True")
