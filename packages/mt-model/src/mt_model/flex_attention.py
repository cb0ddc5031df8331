"""torch's flex attention: any mask, soft caps and sinks, fused on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

Sees: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of indices of sample, head, query and key: whether the query sees the key."""

_NO_LIMIT = 2**31 - 1


def flex_attention(  # noqa: PLR0913 - the options of one operation, by keyword
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sees: Sees | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    fused: bool,
) -> Tensor:
    """Softmax attention by `torch.nn.attention.flex_attention`.

    A sink changes each query's weights by one factor, `sigmoid(log_sum_exp - sink)`.

    Args:
        query: Normed and rotated.
        key: The same; fewer heads than queries share.
        value: Of the keys.
        sees: Which pairs count; all where None. Blocks without any are not computed.
        scale: Of the scores.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        sinks: A logit per query head without a value.
        fused: Compile it; each size is compiled once. False makes all scores, on any device; torch
            has no backward of that on a CPU.

    Shape:
        query: [B, S, N, D]; key: [B, T, G, D]; value: [B, T, G, V]; sinks: [N]. Returns
        [B, S, N, V].
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = None
    if sees is not None:
        from torch.nn.attention.flex_attention import create_block_mask

        mask = create_block_mask(
            sees, q.shape[0], None, q.shape[2], k.shape[2], device=str(q.device)
        )
    if not fused or torch.compiler.is_compiling():
        out, lse = _flex(q, k, v, mask, scale, softcap)
    else:
        from torch._dynamo import config

        # With fullgraph torch raises at the limit, and without it runs what is not compiled.
        with config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
            out, lse = _compiled()(q, k, v, mask, scale, softcap)
    if sinks is not None:
        share = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])
        out = (out * share[..., None]).to(query.dtype)
    return out.transpose(1, 2)


@cache
def _compiled() -> Any:
    return torch.compile(_flex, dynamic=False, fullgraph=True)


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
