"""A record for kernels, a way to choose among them, and code that several packages share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

from mt_kernels.candidate import Candidate, Choice, serves
from mt_kernels.counter import GOLDEN, MIX_1, MIX_2, key_words, random_bits
from mt_kernels.device import (
    cpu_obstacle,
    eager_obstacle,
    triton_is_interpreted,
    triton_obstacle,
)
from mt_kernels.registry import AUTO, KernelError, Registry
from mt_kernels.selector import Selector

if TYPE_CHECKING:
    from mt_kernels.flex import flex_attention

__all__ = [
    "AUTO",
    "GOLDEN",
    "MIX_1",
    "MIX_2",
    "Candidate",
    "Choice",
    "KernelError",
    "Registry",
    "Selector",
    "cpu_obstacle",
    "eager_obstacle",
    "flex_attention",
    "key_words",
    "random_bits",
    "serves",
    "triton_is_interpreted",
    "triton_obstacle",
]

# Resolved at first use, so that an import stays light.
__getattr__ = resolve_later(__name__)
