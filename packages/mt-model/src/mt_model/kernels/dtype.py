"""The arithmetic types of a model, by the names used in configurations."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
