"""Rotary position embedding of queries and keys (Su et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mt_files import check_type
from mt_kernels import AUTO
from torch import Tensor

from mt_fusions.arguments import check_floating
from mt_fusions.blocks import row_blocks, wide_dtype
from mt_fusions.kernels import Functions, implementations
from mt_fusions.operator import operator

Pair = tuple[Tensor, Tensor]


def apply_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    heads_dim: int = 1,
    kernel: str = AUTO,
) -> Pair:
    """Turn pairs of channels (a, b) of every head: `(a cos - b sin, b cos + a sin)`.

    Computed in fp32 (fp64 for fp64) and rounded once. Backward turns the gradients back, and keeps
    the tables alone. Where tables are narrower than a head, its last channels stay as they are.

    Args:
        q: Any strides; what comes back has tokens before heads in memory, as a projection has.
        k: The same with its own number of heads.
        cos: A number for each channel that turns, so each pair's twice, as transformers has it.
            For packed documents index the tables with each token's place in its own, `cos[places]`.
            There is no gradient for them.
        sin: Likewise.
        interleaved: A pair is two neighbours (GPT-J); else one channel of each half (Llama).
        heads_dim: 1 for [B, heads, S, D], as torch's attention takes, and for packed tokens
            [T, heads, D]; 2 for [B, S, heads, D].
        kernel: "auto", or one of "cpu", "triton" and "reference" by name.

    Shape:
        q, k: see `heads_dim`; cos, sin: [S, W] or [B, S, W]. S is T for packed tokens. Returns the
        shapes of q and k.

    Raises:
        TypeError: Something is no floating tensor, or dtypes of q and k differ.
        ValueError: Shapes or devices do not fit, or the kernel does not serve.
    """
    _check(q, k, cos, sin, heads_dim)
    turns = heads_dim == 1 and q.dim() == 4
    own = [x.unsqueeze(0) if x.dim() == 3 else x for x in (q, k)]
    own = [x.transpose(1, 2) if turns else x for x in own]
    tables = [x.unsqueeze(0) if x.dim() == 2 else x for x in (cos, sin)]
    _check_tables(own[0], tables[0])
    back = False
    turned = _turn(*own, *tables, interleaved, back, kernel)
    if turns:
        return turned[0].transpose(1, 2), turned[1].transpose(1, 2)
    return turned[0].view(q.shape), turned[1].view(k.shape)


def turn_reference(x: Tensor, cos: Tensor, sin: Tensor, how: Sequence[bool]) -> Tensor:
    """Rotate the first channels of each head, or rotate a gradient back.

    Args:
        x: Tokens before heads.
        cos: For every token.
        sin: For every token.
        how: `interleaved`, and whether to turn back.

    Shape:
        x: [..., heads, D]; cos, sin: [..., W]. Returns the shape of x.
    """
    interleaved, back = how
    wide, width = wide_dtype(x.dtype), cos.shape[-1]
    out = x.to(wide, copy=True, memory_format=torch.contiguous_format)
    tables = [y.to(wide).unsqueeze(-2) for y in (cos, sin)]
    a, b = _pairs(x[..., :width].to(wide), interleaved=interleaved)
    (cos_a, cos_b), (sin_a, sin_b) = (_pairs(y, interleaved=interleaved) for y in tables)
    out_a, out_b = _pairs(out[..., :width], interleaved=interleaved)
    torch.mul(a, cos_a, out=out_a)
    torch.mul(b, cos_b, out=out_b)
    out_a.addcmul_(b, sin_b if back else sin_a, value=1 if back else -1)
    out_b.addcmul_(a, sin_a if back else sin_b, value=-1 if back else 1)
    return out.to(x.dtype)


def _pairs(x: Tensor, *, interleaved: bool) -> Pair:
    """Return views of the first and the second channel of all pairs."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _cpu(x: Tensor, cos: Tensor, sin: Tensor, how: Sequence[bool]) -> Tensor:
    """Compute the reference in blocks of tokens."""
    heads, size = x.shape[-2:]
    tokens = x.shape[0] * x.shape[1]
    out = x.new_empty(x.shape)
    tables = [y.expand(*x.shape[:2], -1).reshape(tokens, y.shape[-1]) for y in (cos, sin)]
    rows = [y.reshape(tokens, heads, size) for y in (out, x)]
    for into, part, *block in row_blocks(*rows, *tables):
        into.copy_(turn_reference(part, block[0], block[1], how))
    return out


def _reference(x: Tensor, cos: Tensor, sin: Tensor, how: Sequence[bool]) -> Tensor:
    return turn_reference(x, cos, sin, how).contiguous()


def _triton() -> Functions:
    from mt_fusions.attention.triton_rope import turn

    return Functions(turn, turn)


ROPE_KERNELS = implementations(
    "rope", cpu=Functions(_cpu, _cpu), triton=_triton, reference=Functions(_reference, _reference)
)


def _run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *how: Any) -> Pair:
    *form, name = how
    kernel = ROPE_KERNELS.find(name, q).function
    return kernel.forward(q, cos, sin, form), kernel.forward(k, cos, sin, form)


def _fake(q: Tensor, k: Tensor, *_: Any) -> Pair:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.back, ctx.kernel = inputs
    ctx.save_for_backward(cos, sin)


def _gradient(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    turned = _turn(*grads, *ctx.saved_tensors, ctx.interleaved, not ctx.back, ctx.kernel)
    return (*turned, None, None, None, None, None)


_turn = operator(
    "rope",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool back, str kernel) "
    "-> (Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    gradient=_gradient,
)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int) -> None:
    for name, x in {"q": q, "k": k, "cos": cos, "sin": sin}.items():
        check_floating(name, x)
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q on {q.device}; use one device")
    check_type("heads_dim", heads_dim, int)
    if q.dtype != k.dtype:
        raise TypeError(f"q is {q.dtype} and k {k.dtype}; convert one of them")
    if q.dim() not in (3, 4) or heads_dim not in range(1, q.dim() - 1):
        raise ValueError(
            f"q {tuple(q.shape)} must be [B, heads, S, D] or [T, heads, D] with heads_dim=1, or "
            f"[B, S, heads, D] with heads_dim=2; heads_dim is {heads_dim}"
        )
    others = [tuple(n for i, n in enumerate(x.shape) if i != heads_dim) for x in (q, k)]
    if q.dim() != k.dim() or others[0] != others[1]:
        raise ValueError(
            f"k {tuple(k.shape)} and q {tuple(q.shape)} must differ in the heads (dim {heads_dim}) "
            "alone"
        )
    if cos.shape != sin.shape or cos.requires_grad or sin.requires_grad:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must have one shape, and need no "
            "gradient"
        )


def _check_tables(q: Tensor, cos: Tensor) -> None:
    batch, tokens, _, size = q.shape
    width = cos.shape[-1]
    if cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != tokens:
        raise ValueError(
            f"the tables have the shape {tuple(cos.shape)} for {batch} x {tokens} tokens; give "
            "[S, W] or [B, S, W], such as cos[places]"
        )
    if width % 2 or not width <= size:
        raise ValueError(
            f"the tables turn {width} channels, which must be even and at most {size}, a head's"
        )
