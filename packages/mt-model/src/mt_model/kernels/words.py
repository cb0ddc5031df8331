"""What a setting may be, where it is one of a few words."""

from __future__ import annotations

from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"]
Norms: TypeAlias = Literal["pre", "output", "sandwich", "post"]
Positions: TypeAlias = Literal["rope", "learned", "none"]
QKNorm: TypeAlias = Literal["none", "head", "whole", "l2"]
KernelSet: TypeAlias = Literal["auto", "fused", "reference"]
Recompute: TypeAlias = Literal["none", "selective", "full"]
Sinks: TypeAlias = Literal["none", "zero", "learned"]
