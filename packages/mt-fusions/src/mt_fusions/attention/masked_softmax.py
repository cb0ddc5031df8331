"""Softmax of attention scores: scaled, masked, causal, and with sinks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from mt_files import check_type
from mt_kernels import AUTO, triton_obstacle
from torch import Tensor

from mt_fusions.arguments import check_floating
from mt_fusions.blocks import row_blocks, wide_dtype
from mt_fusions.kernels import Functions, implementations, width_obstacle
from mt_fusions.operator import operator

Pair = tuple[Tensor, Tensor]  # probabilities and the sinks' own, or their gradients


def masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    sinks: Tensor | None = None,
    kernel: str = AUTO,
) -> Tensor:
    """Softmax over keys of `scale * scores`, with probability 0 where a query may not look.

    With sinks a row has one more score, its head's sink, which takes a part of the probability and
    is not returned (GPT-OSS; softmax off by one is a sink of 0). A query that may look nowhere has
    probabilities 0 and no gradient. Computed in fp32 (fp64 for fp64) and rounded once, also
    under autocast. Backward keeps the probabilities, and with sinks a number per row.

    Args:
        scores: Any strides; the result is contiguous.
        mask: Boolean mask, True where a query sees a key, as in torch's attention.
        scale: Multiplies the scores, not the sinks.
        causal: A query looks no further than its own place, where the last query's place is that
            of the last key.
        sinks: A score for each head.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        scores: [B, heads, queries, keys]; mask: what broadcasts to it; sinks: [heads]. Returns the
        shape of scores.

    Raises:
        TypeError: Something is no tensor of the right kind, or no number.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    _check(scores, mask, scale, sinks)
    wide = None if mask is None else mask.expand(scores.shape)
    return _forward(scores, wide, sinks, scale, causal, kernel)[0]


class Form(NamedTuple):
    """Attributes: `scale` of the scores, and whether they are `causal`."""

    scale: float
    causal: bool


def _visible(scores: Tensor, mask: Tensor | None, form: Form) -> Tensor | None:
    """Where queries look, [queries, keys] or more; None means everywhere."""
    if not form.causal:
        return mask
    queries, keys = scores.shape[-2:]
    places = torch.arange(queries, device=scores.device).unsqueeze(1) + (keys - queries)
    seen = torch.arange(keys, device=scores.device) <= places
    return seen if mask is None else seen & mask


def _reference(scores: Tensor, mask: Tensor | None, sinks: Tensor | None, form: Form) -> Pair:
    keys = scores.shape[-1]
    x = scores.to(wide_dtype(scores.dtype)) * form.scale
    visible = _visible(scores, mask, form)
    if visible is not None:
        x = x.masked_fill(~visible, -math.inf)
    if sinks is not None:
        own = sinks.to(x.dtype).view(1, -1, 1, 1).expand(*x.shape[:-1], 1)
        x = torch.cat((x, own), -1)
    probs = torch.softmax(x, -1)
    rest = x.new_empty(0) if sinks is None else probs[..., keys].contiguous()
    probs = probs[..., :keys]
    if visible is not None:
        probs = probs.masked_fill(~visible, 0)
    return probs.to(scores.dtype).contiguous(), rest


def _reference_backward(grad: Tensor, probs: Tensor, rest: Tensor, scale: float) -> Pair:
    wide = wide_dtype(grad.dtype)
    g, p = grad.to(wide), probs.to(wide)
    mean = (g * p).sum(-1, keepdim=True)
    found = p * (g - mean) * scale
    of_sinks = -rest * mean.squeeze(-1) if rest.numel() else rest
    return found.to(grad.dtype).contiguous(), of_sinks


def _cpu_forward(scores: Tensor, mask: Tensor | None, sinks: Tensor | None, form: Form) -> Pair:
    """Head by head, in blocks of queries.

    A sink takes `sigmoid(sink - lse)` of each row, with the log-sum-exp from the largest
    probability.
    """
    out = scores.new_empty(scores.shape)
    wide = wide_dtype(scores.dtype)
    rest = out.new_empty(0 if sinks is None else scores.shape[:-1], dtype=wide)
    causal = _visible(scores, None, form)
    hidden = [~x for x in (causal, mask) if x is not None]
    # Without a mask every query sees a key, unless there are more queries than keys.
    may_see_none = mask is not None or scores.shape[-2] > scores.shape[-1]
    for number in range(scores.shape[0] * scores.shape[1]):
        batch, head = divmod(number, scores.shape[1])
        own = [x if x.dim() == 2 else x[batch, head] for x in hidden]
        rests = [] if sinks is None else [rest[batch, head]]
        tensors = scores[batch, head], out[batch, head], *rests, *own
        for part, into, *more in row_blocks(*tensors):
            x = torch.mul(part.to(wide), form.scale, out=into if into.dtype == wide else None)
            for h in more[len(rests) :]:
                x.masked_fill_(h, -math.inf)
            if sinks is None:
                torch.softmax(x, -1, out=x)
            else:
                _with_sink(x, sinks[head].to(wide), more[0])
            for h in more[len(rests) :] if may_see_none else []:
                x.masked_fill_(h, 0)
            if x is not into:
                into.copy_(x)
    return out, rest


def _with_sink(x: Tensor, sink: Tensor, rest: Tensor) -> None:
    """Softmax in place, of which the sink takes `rest`."""
    high = x.amax(-1)
    torch.softmax(x, -1, out=x)
    lse = (high - x.amax(-1).log_()).masked_fill_(high == -math.inf, -math.inf)
    torch.sigmoid(sink - lse, out=rest)
    x *= torch.sigmoid_(lse - sink).unsqueeze(1)


def _cpu_backward(grad: Tensor, probs: Tensor, rest: Tensor, scale: float) -> Pair:
    """By torch's fused backward of softmax, which needs no sum of probabilities."""
    out, wide = grad.new_empty(grad.shape), wide_dtype(grad.dtype)
    of_sinks = torch.empty_like(rest)
    keys = grad.shape[-1]
    rows = [x.reshape(-1, keys) for x in (grad, probs, out)]
    more = [rest.view(-1), of_sinks.view(-1)] if rest.numel() else []
    for g, p, into, *sink in row_blocks(*rows, *more):
        g_wide, p_wide = g.to(wide), p.to(wide)
        if sink:
            torch.mul(sink[0], (g_wide * p_wide).sum(-1).neg_(), out=sink[1])
        found = torch.ops.aten._softmax_backward_data(g_wide, p_wide, -1, wide)
        torch.mul(found, scale, out=into) if into.dtype == wide else into.copy_(found.mul_(scale))
    return out, of_sinks


def _triton_forward(scores: Tensor, mask: Tensor | None, sinks: Tensor | None, form: Form) -> Pair:
    from mt_fusions.attention.triton_masked_softmax import forward

    return forward(scores, mask, sinks, form)


def _triton_backward(grad: Tensor, probs: Tensor, rest: Tensor, scale: float) -> Pair:
    from mt_fusions.attention.triton_masked_softmax import backward

    return backward(grad, probs, rest, scale)


def _triton_obstacle(scores: Tensor, *_: Any) -> str | None:
    return triton_obstacle(scores) or width_obstacle(scores.shape[-1])


MASKED_SOFTMAX_KERNELS = implementations(
    "masked_softmax",
    cpu=Functions(_cpu_forward, _cpu_backward),
    triton=Functions(_triton_forward, _triton_backward),
    reference=Functions(_reference, _reference_backward),
    obstacle=_triton_obstacle,
)


def _run(scores: Tensor, mask: Tensor | None, sinks: Tensor | None, *how: Any) -> Pair:
    kernel = MASKED_SOFTMAX_KERNELS.find(how[-1], scores).function
    if not scores.numel():
        return _fake(scores, mask, sinks)
    return kernel.forward(scores, mask, sinks, Form(*how[:-1]))


def _fake(scores: Tensor, mask: Tensor | None, sinks: Tensor | None, *_: Any) -> Pair:
    rest = 0 if sinks is None else scores.shape[:-1]
    return scores.new_empty(scores.shape), scores.new_empty(rest, dtype=wide_dtype(scores.dtype))


def _run_backward(grad: Tensor, probs: Tensor, rest: Tensor, scale: float, kernel: str) -> Pair:
    way = MASKED_SOFTMAX_KERNELS.find(kernel, probs).function
    if not probs.numel():
        return _fake_backward(grad, probs, rest)
    return way.backward(grad, probs, rest, scale)


def _fake_backward(grad: Tensor, probs: Tensor, rest: Tensor, *_: Any) -> Pair:
    return probs.new_empty(probs.shape), rest.new_empty(rest.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    _, _, sinks, ctx.scale, _, ctx.kernel = inputs
    ctx.sinks_dtype = None if sinks is None else sinks.dtype
    ctx.save_for_backward(*output)


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    found, of_sinks = _backward(grad, *ctx.saved_tensors, ctx.scale, ctx.kernel)
    total = None
    if ctx.sinks_dtype is not None:
        total = of_sinks.sum((0, 2)).to(ctx.sinks_dtype)
    return found, None, total, None, None, None


_backward = operator(
    "masked_softmax_backward",
    "(Tensor grad, Tensor probs, Tensor rest, float scale, str kernel) -> (Tensor, Tensor)",
    _run_backward,
    fake=_fake_backward,
)
_forward = operator(
    "masked_softmax",
    "(Tensor scores, Tensor? mask, Tensor? sinks, float scale, bool causal, str kernel) "
    "-> (Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
)


def _check(scores: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None) -> None:
    check_floating("scores", scores)
    check_type("scale", scale, float, int)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if scores.dim() != 4:
        raise ValueError(f"scores {tuple(scores.shape)} must be [B, heads, queries, keys]")
    if mask is not None:
        check_type("mask", mask, Tensor)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be of bool, True where a query looks, got {mask.dtype}")
        shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(shape, scores.shape, strict=True)):
            raise ValueError(
                f"mask {tuple(mask.shape)} must broadcast to the scores {tuple(scores.shape)}"
            )
    if sinks is not None:
        check_floating("sinks", sinks)
        if sinks.shape != scores.shape[1:2]:
            raise ValueError(
                f"sinks {tuple(sinks.shape)} must have one number for each of the "
                f"{scores.shape[1]} heads"
            )
    for name, x in {"mask": mask, "sinks": sinks}.items():
        if x is not None and x.device != scores.device:
            raise ValueError(f"{name} is on {x.device}, but scores on {scores.device}")
