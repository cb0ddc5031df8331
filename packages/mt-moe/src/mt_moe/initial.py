"""Initial values that no layout changes: a function of one drawn number and the global index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mt_parallel_state import fill_normal_, hash_key
from torch import nn


def filled(
    shape: Sequence[int],
    *,
    std: float,
    local: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """Draw this rank's box of a parameter, normal with mean 0; on `"meta"` draw nothing.

    One number comes from torch's generator of the CPU, so one `torch.manual_seed` gives one logical
    parameter for every layout, and no rank makes more than its own part.

    Args:
        shape: Of the whole.
        std: Standard deviation.
        local: Of the box; None is the whole.
        offsets: Where the box begins.
        dtype: None is torch's default.
        device: None is torch's default.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    own = shape if local is None else local
    param = nn.Parameter(torch.empty(tuple(own), dtype=dtype, device=device))
    if param.is_meta:
        return param
    key = hash_key("moe", int(torch.randint(1 << 62, (), device="cpu")))
    start = (0,) * len(own) if offsets is None else tuple(offsets)
    fill_normal_(param, key=key, std=std, global_shape=tuple(shape), offsets=start)
    return param
