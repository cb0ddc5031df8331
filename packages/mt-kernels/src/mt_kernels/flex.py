"""torch's flex attention with its log-sum-exp, compiled once for each size."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

_NO_LIMIT = 2**31 - 1


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    scale: float,
    softcap: float | None = None,
    *,
    backend: Any = "inductor",
) -> tuple[Tensor, Tensor]:
    """Return attention by `torch.nn.attention.flex_attention`, and its log-sum-exp.

    Each size is compiled once in a process, without torch's limit on the number of compilations:
    past that limit torch would run the unfused form, with all scores in memory.

    Args:
        q: Queries.
        k: Keys; several queries may share a key head.
        v: Values of the keys.
        mask: A `BlockMask`; None allows all pairs.
        scale: Factor of the scores.
        softcap: Scores become `softcap * tanh(score / softcap)`; None leaves them.
        backend: Backend of `torch.compile`. None computes all scores unfused, on any device (torch
            has no backward for it on a CPU). Inside a compiled graph this function is traced.

    Shape:
        q: [B, N, S, D]; k: [B, G, T, D]; v: [B, G, T, V]. Returns [B, N, S, V] and [B, N, S].
    """
    if backend is None or torch.compiler.is_compiling():
        return _flex(q, k, v, mask, scale, softcap)
    from torch._dynamo import config

    # With fullgraph torch raises at the limit, and without it runs what is not compiled.
    with config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
        return _compiled(backend)(q, k, v, mask, scale, softcap)


@cache
def _compiled(backend: Any) -> Any:
    return torch.compile(_flex, dynamic=False, fullgraph=True, backend=backend)


# A function of its own: torch counts compilations by code, and flex_attention's is everyone's.
def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention import flex_attention as flex

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    out, aux = cast("Any", flex.flex_attention)(
        *(q, k, v),
        score_mod=None if softcap is None else capped,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=flex.AuxRequest(lse=True),
    )
    return out, aux.lse
