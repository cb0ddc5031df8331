"""The dtype in which a model computes."""

from __future__ import annotations

import torch
from mt_model import DTYPES
from mt_parallel_state import ParallelState


def dtype_of(state: ParallelState, given: str | torch.dtype | None) -> torch.dtype:
    """Return a model's dtype: the given one, or the usual one of its device.

    Raises:
        ValueError: No model computes in this dtype.
    """
    given = given or ("bf16" if state.device.type == "cuda" else "fp32")
    found = DTYPES.get(given) if isinstance(given, str) else given
    if found is None or found not in DTYPES.values():
        raise ValueError(f"dtype {given!r} is not known; use {', '.join(DTYPES)}")
    return found
