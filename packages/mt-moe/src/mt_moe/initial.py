"""Initial values, equal for every layout."""

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

    Values are a function of their global index and of one number from torch's CPU generator, so a
    `torch.manual_seed` gives the same parameter for every layout. A rank draws only its own part.

    Args:
        shape: Shape of the whole parameter.
        std: Standard deviation.
        local: Shape of the box; None is the whole.
        offsets: First index of the box in each dim.
        dtype: Dtype of the parameter; None is torch's default.
        device: Device of the parameter; None is torch's default.
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
