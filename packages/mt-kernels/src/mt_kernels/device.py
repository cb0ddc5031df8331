"""Obstacles that a device or a compiler gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cpu_obstacle(x: Tensor, *_: Any) -> str | None:
    """Refuse other devices than the CPU."""
    return None if x.device.type == "cpu" else f"it is for the CPU, and the tensor on {x.device}"


def eager_obstacle(*_: Any) -> str | None:
    """Refuse `torch.compile`, which fuses a plain implementation itself."""
    return "torch.compile fuses the plain form" if torch.compiler.is_compiling() else None
