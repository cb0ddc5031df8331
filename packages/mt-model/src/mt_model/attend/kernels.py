"""The ways to compute attention on one rank, of which the first that serves is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from mt_context_parallel import AttentionMask, context_parallel_attention
from mt_kernels import AUTO, Candidate, Choice, Registry, Selector
from mt_parallel_state import outside_graph
from torch import Tensor

from mt_model.attend.flex import flex_attention
from mt_model.attend.invariant import invariant_attention, invariant_obstacle
from mt_model.attend.reference import reference_attention
from mt_model.attend.scores import Scores

BIAS_MAX_LENGTH = 1024  # of sequences whose biased scores are made at once; longer ones by tiles


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    selector: Selector[Any] | None = None,
) -> Tensor:
    """Return softmax attention by the kernel of a selector, or by the first one that serves.

    Args:
        query: Queries, normed and rotated.
        key: Keys of the same tokens, or of those that `scores.allowed` says.
        value: Values of the keys' tokens; they may have another width.
        scores: Scale, mask, bias, cap and sinks.
        selector: The choice of the layer that attends, from `ATTENTION`.

    Shape:
        query: [B, S, N, D]; key: [B, T, G, D]; value: [B, T, G, V]. Returns [B, S, N, V].

    Raises:
        KernelError: The named kernel can't compute this; the message says why.
    """
    work = query, key, value, scores
    if selector is None:
        return ATTENTION.find(AUTO, *work).function(*work)
    length, keys = query.shape[1], key.shape[1]
    facts = scores.form, length == keys, length > BIAS_MAX_LENGTH
    return selector.find(*work, key=facts).function(*work)


def attention_selectors(kernel: str) -> Mapping[str, Selector[Any]]:
    """Return a layer's selectors: one of its kernel, and `auto` for keys of a cache.

    `matmul` is another registry's (`PROJECTED_ATTENTION`), and what it does not serve is `auto`'s.
    """
    automatic = Selector(ATTENTION)
    named = automatic if kernel in (AUTO, "matmul") else Selector(ATTENTION, kernel)
    return {AUTO: automatic, kernel: named}


def attention_choice(kernel: str) -> Choice[Any]:
    """Return what attends; whether that serves a pass depends on its masks and lengths."""
    if kernel in (AUTO, "matmul"):
        reason = "the first that serves, in each pass" if kernel == AUTO else "asked for"
        return Choice("attention", Candidate(kernel, attention), reason)
    return Choice("attention", ATTENTION.get(kernel), "asked for")


def steady_kernels(query: Tensor) -> AbstractContextManager[Any]:
    """Leave out the kernels of torch's attention that cost more for a size they have not seen.

    cuDNN makes a plan for every size, which takes tens of milliseconds, and prompts and caches
    have many.
    """
    if query.device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def _no_scores_between(scores: Scores) -> str | None:
    """Why a kernel that makes nothing of the scores but their softmax can't serve."""
    if scores.softcap is not None:
        return f"a soft cap of {scores.softcap}"
    if scores.sinks is not None:
        return "sinks"
    return "dropout by global index" if scores.drops else None


def _sdpa_obstacle(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> str | None:
    del key, value
    if scores.allowed is None and scores.bias is not None:
        if query.shape[1] > BIAS_MAX_LENGTH:
            return f"a bias of the scores of more than {BIAS_MAX_LENGTH} tokens"
    elif scores.allowed is None and not scores.is_plain:
        return "a window or documents, for which it would need a mask of all pairs"
    return _no_scores_between(scores)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    mask, pairs = scores.allowed, scores.pairs()
    if pairs is not None:
        allowed = scores.mask(query)
        mask = pairs.to(query.dtype)
        mask = mask if allowed is None else mask.masked_fill(~allowed, -torch.inf)
    if query.shape[1] == 1 and query.device.type == "cpu":
        return _one_query(query, key, value, mask, scores.scale)
    with nullcontext() if scores.allowed is None else steady_kernels(query):
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            attn_mask=mask,
            is_causal=mask is None and scores.causal and query.shape[1] > 1,
            scale=scores.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
    return out.transpose(1, 2)


def _one_query(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attend with one query of each row, in the form that torch's CPU kernel computes fastest.

    For one query that kernel reads half precision several times as slowly as fp32, and heads that
    share keys are quicker as queries of one head.

    Shape:
        query: [B, 1, N, D]; key: [B, T, G, D]; value: [B, T, G, V]; mask broadcasts to
        [B, N, 1, T]. Returns [B, 1, N, V].
    """
    heads, groups, dtype = query.shape[2], key.shape[2], query.dtype
    if dtype.itemsize == 2:
        query, key, value = query.float(), key.float(), value.float()
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask.unflatten(-3, (groups, -1)).squeeze(-2)
    out = F.scaled_dot_product_attention(
        query.reshape(len(query), groups, heads // groups, -1),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
    )
    return out.to(dtype).reshape(len(query), 1, heads, -1)


_INSTALLED = frozenset(name for name in ("flash_attn", "transformer_engine") if find_spec(name))


def _cuda_half_obstacle(query: Tensor, value: Tensor, scores: Scores, package: str) -> str | None:
    """Why a package's kernels for CUDA, in half precision and without masks, can't serve."""
    if query.device.type != "cuda":
        return f"device {query.device.type}"
    if package not in _INSTALLED:
        return f"{package} is not installed"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {query.dtype}"
    if query.shape[-1] != value.shape[-1]:
        return f"head_dim {query.shape[-1]} of queries and {value.shape[-1]} of values"
    if scores.documents is not None or scores.allowed is not None:
        return "documents or a mask"
    if scores.sinks is not None or scores.bias is not None:
        return "sinks or a bias of the scores"
    return "dropout by global index" if scores.drops else None


def _from(package: str, name: str) -> Any:
    """Take a name from a package that no extra brings: it is built for the GPU and torch here."""
    return getattr(import_module(package), name)


def _flash_obstacle(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> str | None:
    del key
    return _cuda_half_obstacle(query, value, scores, "flash_attn")


def _sides(scores: Scores) -> tuple[int, int]:
    """Return the number of visible keys before and after a query's own, -1 for all."""
    before = -1 if scores.window is None else scores.window - 1
    return before, 0 if scores.causal else before


def _flash(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    return _from("flash_attn", "flash_attn_func")(
        *(query, key, value),
        softmax_scale=scores.scale,
        causal=scores.causal,
        window_size=_sides(scores),
        softcap=scores.softcap or 0.0,
    )


def _te_obstacle(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> str | None:
    del key
    why = _cuda_half_obstacle(query, value, scores, "transformer_engine")
    return why or (None if scores.softcap is None else f"a soft cap of {scores.softcap}")


def _te(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    sizes = query.shape[2], key.shape[2], query.shape[3]
    module = _te_module(sizes, scores.scale, _sides(scores), causal=scores.causal)
    return module(query, key, value).unflatten(-1, (query.shape[2], -1))


@cache
def _te_module(
    sizes: tuple[int, int, int], scale: float, sides: tuple[int, int], *, causal: bool
) -> Any:
    """Make one of its modules for some heads, key heads and head_dim."""
    return _from("transformer_engine.pytorch", "DotProductAttention")(
        sizes[0],
        sizes[2],
        num_gqa_groups=sizes[1],
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal" if causal else "no_mask",
        window_size=sides,
        softmax_scale=scale,
    )


def _flex_obstacle(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> str | None:
    del key
    if query.device.type != "cuda":
        return f"device {query.device.type}, for which torch does not fuse it"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {query.dtype}"
    if min(query.shape[-1], value.shape[-1]) < 16:
        return f"head_dim {min(query.shape[-1], value.shape[-1])}, below 16"
    if scores.bias is not None:
        return "a bias of the scores"
    return "dropout by global index" if scores.drops else None


def _tiles_obstacle(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> str | None:
    del value
    if scores.allowed is not None or scores.kept is not None:
        return "a mask of all pairs"
    return None if query.shape[1] == key.shape[1] else "other tokens as keys"


def _tiles(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    mask = AttentionMask(causal=scores.causal, window=scores.window, documents=scores.documents)
    return outside_graph(context_parallel_attention)(
        *(query, key, value),
        group=None,
        mask=mask,
        sinks=scores.sinks,
        bias=scores.bias,
        dropout=scores.dropout,
        scale=scores.scale,
        softcap=scores.softcap,
    )


def _reference_obstacle(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> str | None:
    del query, key, value
    return None if scores.dropout is None else "dropout by global index"


ATTENTION: Registry[Callable[..., Tensor]] = Registry(
    "attention",
    (
        Candidate("sdpa", _sdpa, _sdpa_obstacle),
        Candidate("flash", _flash, _flash_obstacle),
        Candidate("te", _te, _te_obstacle),
        Candidate("flex", flex_attention, _flex_obstacle),
        Candidate("tiles", _tiles, _tiles_obstacle),
        Candidate("reference", reference_attention, _reference_obstacle),
        Candidate("invariant", invariant_attention, invariant_obstacle),
    ),
)
"""Functions of `attention`'s arguments but the last, which obstacles get too."""
