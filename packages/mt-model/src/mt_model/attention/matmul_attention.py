"""Attention as batched matrix products, with norms, rotation and packing in one function.

On a CPU torch's flash attention takes two to three times as long as plain products at training
lengths, nearly all of it in backward. This one keeps the probabilities (S x S per head, less those
that no query of a block sees), so it is for short sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from mt_kernels import Candidate, Registry
from torch import Tensor

from mt_model.attend.matmul_operator import Form, attend_by_products
from mt_model.attend.pairs import Pairs
from mt_model.kernels.config import Kernels
from mt_model.rope.rotary import RotaryTable

if TYPE_CHECKING:
    from mt_model.attention.config import AttentionConfig

MATMUL_MAX_LENGTH = 512


class HeadNorm(NamedTuple):
    """RMSNorm of queries and of keys, before the rotation.

    Shape:
        query, key: weights, [D].
    """

    query: Tensor
    key: Tensor
    eps: float


def matmul_attention(
    qkv: Tensor,
    table: RotaryTable | None,
    norm: HeadNorm | None,
    *,
    scale: float | None = None,
    pairs: Pairs | None = None,
    bias: Tensor | None = None,
    onednn: bool = False,
) -> Tensor:
    """Norm and rotate queries and keys, then attend; an operator, one node for `torch.compile`.

    Scores are rounded to the dtype of `qkv`; norms and the softmax are taken in fp32 for bf16.

    Args:
        qkv: Fused projections; a group has its queries first, then key, then value.
        table: Rotary table of these positions, or None.
        norm: Norms of queries and keys, or None.
        scale: Scale of the scores; 1 / sqrt(D) where None.
        pairs: Keys that a query sees; causal where None.
        bias: Bias of the scores by distance (`attend.distance.bias_by_distance`), or None.
        onednn: Whether fp32 products go to oneDNN.

    Shape:
        qkv: [B, S, G, Q + 2, D]; bias: [G * Q, 2 * S - 1]. Returns [B, S, G * Q * D].
    """
    query, key, eps = norm or (None, None, 0.0)
    # Under autocast tables and weights are wider than the projection.
    query, key, bias = (None if x is None else x.to(qkv.dtype) for x in (query, key, bias))
    factor = qkv.shape[-1] ** -0.5 if scale is None else scale
    values, interleaved = (None, False) if table is None else table.to(qkv.dtype)
    if values is not None and values.dim() == 4:
        values = values[:, :, None, None]  # one for each row, over groups and parts
    causal, window, documents = pairs or Pairs()
    form = Form(eps, factor, interleaved, causal, window, onednn)
    with torch.autocast(qkv.device.type, enabled=False):
        return attend_by_products(qkv, values, query, key, bias, documents, *form)[0]


def matmul_refusal(config: AttentionConfig, kernels: Kernels) -> str | None:
    """Return why `matmul_attention` never computes a layer, or None."""
    if kernels.attention not in ("auto", "matmul"):
        return f"kernels.attention is {kernels.attention}"
    if config.rope is not None and kernels.rope != "auto":
        return f"kernels.rope is {kernels.rope}, and it turns by itself"
    if config.qk_norm == "head" and kernels.norm != "auto":
        return f"kernels.norm is {kernels.norm}, and it norms by itself"
    if config.sinks != "none" or config.softcap is not None:
        return "sinks or a soft cap of the scores"
    if config.qk_norm == "l2" or config.temperature is not None:
        return "norms after the rotation, or a temperature"
    return None


def _obstacle(qkv: Tensor, refusal: str | None, *facts: bool) -> str | None:
    is_whole, drops, rounds = facts
    if qkv.device.type != "cpu":
        return f"on {qkv.device.type} the fused attention of torch is faster"
    if qkv.shape[1] > MATMUL_MAX_LENGTH:
        return f"{qkv.shape[1]} tokens: the scores of more than {MATMUL_MAX_LENGTH} are too large"
    if not is_whole:
        return "the keys are not those of the same tokens"
    if drops:
        return "dropout of attention weights"
    return "keys and values are rounded" if rounds else refusal


PROJECTED_ATTENTION: Registry[Any] = Registry(
    "attention", (Candidate("matmul", matmul_attention, _obstacle), Candidate("heads", None))
)
"""Attention from a fused projection on; `heads` splits it for a candidate of `ATTENTION`.

Obstacles get the projection, what `matmul_refusal` returned, and whether keys are those of the same
tokens, weights are dropped, and keys and values are rounded.
"""
