"""Tokens sorted by their experts, and back: what surrounds a grouped product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mt_files import check_type
from mt_kernels import AUTO
from torch import Tensor

from mt_fusions.arguments import check_floating, check_range
from mt_fusions.blocks import as_rows, row_blocks, wide_dtype
from mt_fusions.kernels import Functions, implementations
from mt_fusions.operator import operator

Pair = tuple[Tensor, Tensor]  # gradients of rows and weights


class Permuted(NamedTuple):
    """Tokens sorted by experts.

    Attributes:
        rows: One row per token and choice, sorted by expert, and by token within an expert.
        places: The row index of each choice of each token, for `unpermute`.
        counts: Number of rows of each expert.

    Shape:
        rows: [T * k, H]; places: [T, k]; counts: [num_experts], both int64.
    """

    rows: Tensor
    places: Tensor
    counts: Tensor


def permute(x: Tensor, experts: Tensor, num_experts: int, *, kernel: str = AUTO) -> Permuted:
    """Copy each token once for each expert that it chose, sorted by these.

    Backward sums the gradients of a token's rows in fp32 (fp64 for fp64), and rounds once. Shapes
    don't depend on the choices, and no number is read back from a device.

    Args:
        x: Tokens.
        experts: The k experts of each token, from 0 to below `num_experts`; one may be there twice.
        num_experts: Number of experts.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        x: [T, H]; experts: [T, k].

    Raises:
        TypeError: Something is no tensor of the right kind.
        ValueError: Shapes or devices do not fit, an expert is out of range, or the kernel does not
            serve.
    """
    check_floating("x", x)
    check_type("num_experts", num_experts, int)
    _check_pairs("experts", experts, x)
    if x.dim() != 2 or x.shape[0] != experts.shape[0]:
        raise ValueError(
            f"x {tuple(x.shape)} must be [T, H] with the tokens of experts {tuple(experts.shape)}"
        )
    flat = experts.reshape(-1).long()
    check_range(flat, num_experts, "expert", "the list")
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=x.device))
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    places = places.view(experts.shape)
    return Permuted(_permute(x, places, kernel), places, counts)


def unpermute(
    rows: Tensor, places: Tensor, weights: Tensor | None = None, *, kernel: str = AUTO
) -> Tensor:
    """Sum the rows of each token, each times its weight: `sum_j w[t, j] rows[places[t, j]]`.

    Summed in fp32 (fp64 for fp64) and rounded once. Without weights it is the adjoint of `permute`,
    so `unpermute(permute(x).rows, places)` is `k x`. Backward keeps places and weights, and the
    rows where weights have a gradient.

    Args:
        rows: What became of the rows of `permute`.
        places: The places that `permute` returned; each row occurs once.
        weights: The router's share of each choice, of any floating dtype; None for 1.
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        rows: [T * k, H]; places, weights: [T, k]. Returns [T, H].

    Raises:
        TypeError: Something is no tensor of the right kind.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    check_floating("rows", rows)
    _check_pairs("places", places, rows)
    if rows.dim() != 2 or rows.shape[0] != places.numel():
        raise ValueError(
            f"rows {tuple(rows.shape)} must be [T * k, H] with one for each of the places "
            f"{tuple(places.shape)}"
        )
    if weights is not None:
        check_floating("weights", weights)
        if weights.shape != places.shape or weights.device != rows.device:
            raise ValueError(
                f"weights {tuple(weights.shape)} on {weights.device} must have the shape of places "
                f"{tuple(places.shape)} on {rows.device}"
            )
    return _unpermute(rows, places, weights, kernel)


def _spread(x: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Each token's row, times the weight, at all of its places."""
    wide, slots = wide_dtype(x.dtype), places.reshape(-1)
    each = x.unsqueeze(1).expand(-1, places.shape[1], -1)
    if weights is not None:
        each = each.to(wide) * weights.to(wide).unsqueeze(2)
    out = x.new_empty(len(slots), x.shape[1])
    out[slots] = each.reshape(out.shape).to(x.dtype)
    return out


def _combine(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """The weighted sum over a token's places."""
    each = rows[places].to(wide_dtype(rows.dtype))
    if weights is not None:
        each = each * weights.to(each.dtype).unsqueeze(2)
    return each.sum(1).to(rows.dtype)


def _combine_backward(
    grad: Tensor, rows: Tensor | None, places: Tensor, weights: Tensor | None
) -> Pair:
    wide = wide_dtype(grad.dtype)
    if rows is None:
        return _spread(grad, places, weights), grad.new_empty(0, dtype=wide)
    dots = (rows[places].to(wide) * grad.to(wide).unsqueeze(1)).sum(2)
    return _spread(grad, places, weights), dots


def _tokens_of(places: Tensor) -> Tensor:
    """The slot, `token * k + choice`, of each row."""
    slots = places.reshape(-1)
    return torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots)))


def _cpu_spread(x: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Row by row in their order, as writing in order is faster than reading so."""
    slots = _tokens_of(places)
    tokens = slots.div(max(1, places.shape[1]), rounding_mode="floor")
    if weights is None:
        return x.index_select(0, tokens)
    out, wide = x.new_empty(len(slots), x.shape[1]), wide_dtype(x.dtype)
    own = weights.reshape(-1).to(wide).index_select(0, slots).unsqueeze(1)
    for into, token, weight in row_blocks(out, tokens, own):
        _scale(x.index_select(0, token).to(wide), weight, into)
    return out


def _scale(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Set `out` to the product, computed in the dtype of x."""
    if out.dtype == x.dtype:
        torch.mul(x, weight, out=out)
    else:
        out.copy_(x.mul_(weight))


def _cpu_combine(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """In one pass where rows are as wide as what sums; else in blocks."""
    if rows.dtype == wide_dtype(rows.dtype) and rows.numel():
        shares = None if weights is None else weights.to(rows.dtype)
        return F.embedding_bag(places.long(), rows, mode="sum", per_sample_weights=shares)
    out = rows.new_empty(places.shape[0], rows.shape[1])
    more = [] if weights is None else [weights]
    for into, place, *weight in row_blocks(out, places, *more):
        into.copy_(_combine(rows, place, weight[0] if weight else None))
    return out


def _cpu_combine_backward(
    grad: Tensor, rows: Tensor | None, places: Tensor, weights: Tensor | None
) -> Pair:
    wide, x = wide_dtype(grad.dtype), as_rows(grad)
    if rows is None or weights is None:
        return _cpu_spread(x, places, weights), grad.new_empty(0, dtype=wide)
    slots = _tokens_of(places)
    tokens = slots.div(places.shape[1], rounding_mode="floor")
    own = weights.reshape(-1).to(wide).index_select(0, slots).unsqueeze(1)
    out, dots = torch.empty_like(rows), own.new_empty(len(slots), 1, 1)
    for into, row, token, weight, dot in row_blocks(out, rows, tokens, own, dots):
        part = x.index_select(0, token).to(wide)
        torch.bmm(row.to(wide).unsqueeze(1), part.unsqueeze(2), out=dot)
        _scale(part, weight, into)
    return out, torch.empty_like(dots).index_copy_(0, slots, dots).view(places.shape)


def _triton_permute() -> Functions:
    from mt_fusions.gpu.permute import combine, spread

    return Functions(spread, combine)


def _triton_unpermute() -> Functions:
    from mt_fusions.gpu.permute import combine, combine_backward

    return Functions(combine, combine_backward)


PERMUTE_KERNELS = implementations(
    "permute",
    cpu=Functions(_cpu_spread, _cpu_combine),
    triton=_triton_permute,
    reference=Functions(_spread, _combine),
)
UNPERMUTE_KERNELS = implementations(
    "unpermute",
    cpu=Functions(_cpu_combine, _cpu_combine_backward),
    triton=_triton_unpermute,
    reference=Functions(_combine, _combine_backward),
)


def _run(x: Tensor, places: Tensor, kernel: str) -> Tensor:
    return PERMUTE_KERNELS.find(kernel, x).function.forward(x, places, None)


def _fake(x: Tensor, places: Tensor, kernel: str) -> Tensor:
    return x.new_empty(places.numel(), x.shape[1])


def _run_backward(grad: Tensor, places: Tensor, kernel: str) -> Tensor:
    return PERMUTE_KERNELS.find(kernel, grad).function.backward(grad, places, None)


def _fake_backward(grad: Tensor, places: Tensor, kernel: str) -> Tensor:
    return grad.new_empty(places.shape[0], grad.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, places, ctx.kernel = inputs
    ctx.save_for_backward(places)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _permute_backward(grad, *ctx.saved_tensors, ctx.kernel), None, None


_permute_backward = operator(
    "permute_backward",
    "(Tensor grad, Tensor places, str kernel) -> Tensor",
    _run_backward,
    fake=_fake_backward,
)
_permute = operator(
    "permute",
    "(Tensor x, Tensor places, str kernel) -> Tensor",
    _run,
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
)


def _run_sum(rows: Tensor, places: Tensor, weights: Tensor | None, kernel: str) -> Tensor:
    return UNPERMUTE_KERNELS.find(kernel, rows).function.forward(rows, places, weights)


def _fake_sum(rows: Tensor, places: Tensor, weights: Tensor | None, kernel: str) -> Tensor:
    return rows.new_empty(places.shape[0], rows.shape[1])


def _run_sum_backward(
    grad: Tensor, rows: Tensor | None, places: Tensor, weights: Tensor | None, kernel: str
) -> Pair:
    found = UNPERMUTE_KERNELS.find(kernel, grad).function.backward(grad, rows, places, weights)
    return found[0], found[1] if weights is None else found[1].to(weights.dtype)


def _fake_sum_backward(
    grad: Tensor, rows: Tensor | None, places: Tensor, weights: Tensor | None, kernel: str
) -> Pair:
    dots = grad.new_empty(0, dtype=wide_dtype(grad.dtype))
    if weights is not None:
        dots = weights.new_empty(0 if rows is None else weights.shape)
    return grad.new_empty(places.numel(), grad.shape[1]), dots


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, places, weights, ctx.kernel = inputs
    # The gradient of weights alone needs rows.
    ctx.save_for_backward(rows if ctx.needs_input_grad[2] else None, places, weights)


def _gradient_sum(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, places, weights = ctx.saved_tensors
    found = _unpermute_backward(grad, rows, places, weights, ctx.kernel)
    return found[0], None, None if rows is None else found[1], None


_unpermute_backward = operator(
    "unpermute_backward",
    "(Tensor grad, Tensor? rows, Tensor places, Tensor? weights, str kernel) -> (Tensor, Tensor)",
    _run_sum_backward,
    fake=_fake_sum_backward,
)
_unpermute = operator(
    "unpermute",
    "(Tensor rows, Tensor places, Tensor? weights, str kernel) -> Tensor",
    _run_sum,
    fake=_fake_sum,
    setup=_setup_sum,
    gradient=_gradient_sum,
)


def _check_pairs(name: str, x: Tensor, other: Tensor) -> None:
    check_type(name, x, Tensor)
    if x.is_floating_point() or x.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of integers, such as int64, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"{name} {tuple(x.shape)} must be [T, k]: k numbers for each token")
    if x.device != other.device:
        raise ValueError(f"{name} is on {x.device}, but the tokens on {other.device}")
