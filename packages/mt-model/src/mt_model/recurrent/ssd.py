"""The state-space recurrence of Mamba-2, step by step and by chunks (Dao & Gu, 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from mt_kernels import AUTO, Candidate, Registry, eager_obstacle
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_model.recurrent.decay import chunk_decays, cut, cut_segments


class SsdSteps(NamedTuple):
    """What the steps of a sequence are made of; without S, of one token.

    Attributes:
        x: input of each head.
        dt: step size of each head; with 0 a token neither writes nor lets the state decay.
        rate: of the decay of each head, negative.
        b: direction in which a group of consecutive heads writes.
        c: direction in which a group of consecutive heads reads.

    Shape:
        x: [B, S, H, P]; dt: [B, S, H]; rate: [H]; b, c: [B, S, G, N].
    """

    x: Tensor
    dt: Tensor
    rate: Tensor
    b: Tensor
    c: Tensor


def ssd_step(steps: SsdSteps, state: Tensor, *, invariant: bool = False) -> tuple[Tensor, Tensor]:
    """Take one step: `state = exp(dt rate) state + dt x b^T`, and `y = state c`.

    Args:
        steps: of one token.
        state: of the tokens before.
        invariant: Whether a sequence has the same bits beside any number of others.

    Returns:
        Output and state, in the state's dtype.

    Shape:
        state: [B, H, P, N]. Returns [B, H, P] and the state's.
    """
    x, dt, rate, b, c = (part.to(state.dtype) for part in steps)
    shares = x.shape[1] // b.shape[1]
    b, c = (part.repeat_interleave(shares, 1) for part in (b, c))
    added = (x * dt[..., None])[..., None] * b[:, :, None]
    state = state * (dt * rate).exp()[..., None, None] + added
    if invariant:  # a batched product has other orders of additions for another batch
        return (state * c[:, :, None]).sum(-1), state
    return torch.einsum("bhpn,bhn->bhp", state, c), state


def ssd(
    steps: SsdSteps,
    *,
    chunk_size: int,
    state: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take the steps of a sequence chunk by chunk, in matrix products.

    In a chunk the output is attention without a softmax, `(c_t b_s) decay(s to t) dt_s`; from
    chunk to chunk goes the state. Computed in fp32 (fp64 for fp64). The size of the chunks changes
    nothing but rounding.

    Args:
        steps: of all tokens.
        chunk_size: tokens whose products with each other are there at a time.
        state: of the tokens before; zero if None.
        segments: as of `segments_of`; a new one starts from a zero state.

    Returns:
        Outputs, and the state after the last token.

    Shape:
        state: [B, H, P, N]; segments: [B, S]. Returns [B, S, H, P] and [B, H, P, N].
    """
    x, _, _, b, _ = steps
    wide = torch.promote_types(x.dtype, torch.float32)
    state = empty_state(x, b) if state is None else state
    parts = tuple(part.to(wide) for part in (*steps, state))
    return SSD.find(AUTO).function(parts, segments, min(chunk_size, x.shape[1]))


def ssd_plain(
    parts: tuple[Tensor, ...], segments: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Compute `ssd` in plain operations, of its x, dt, rate, b, c and state in one dtype."""
    x, dt, rate, b, c, state = parts
    length, groups = x.shape[1], b.shape[2]
    log_decay = cut(dt * rate, size).transpose(2, 3)
    decays = chunk_decays(log_decay, cut_segments(segments, size))
    # b batch, c chunk, l and s places in it, g group, r head in the group, p and n as above.
    x = cut(x * dt[..., None], size).unflatten(3, (groups, -1))
    b, c = cut(b, size), cut(c, size)
    scores = torch.einsum("bclgn,bcsgn->bcgls", c, b)
    mixed = decays.within.unflatten(2, (groups, -1)) * scores[:, :, :, None]
    y = torch.einsum("bcgrls,bcsgrp->bclgrp", mixed, x)
    leaving, entering = (
        part.transpose(2, 3).unflatten(3, (groups, -1))[..., None]
        for part in (decays.leaving, decays.entering)
    )
    added = torch.einsum("bclgn,bclgrp->bcgrpn", b, x * leaving).flatten(2, 3)
    starts = []
    for chunk in range(added.shape[1]):
        starts.append(state)
        state = state * decays.through[:, chunk, :, None, None] + added[:, chunk]
    before = torch.stack(starts, 1).unflatten(2, (groups, -1))
    y = y + torch.einsum("bclgn,bcgrpn->bclgrp", c, before) * entering
    return y.flatten(3, 4).flatten(1, 2)[:, :length], state


class _Ssd(torch.autograd.Function):
    """The same products, with a backward of its own.

    With `y_t = sum over s <= t of c_t . b_s exp(total_t - total_s) x_s dt_s` the gradient of
    `total_t` is `grad_t . y_t` less `x_t dt_t` times its own gradient, and so needs no pass over
    pairs of tokens. Letters as in `ssd_plain`; chunks, groups and sequences are one dim, "batch".
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        x, dt, rate, b, c, state, segments, size = given
        length, (heads, width), groups = x.shape[1], x.shape[2:], b.shape[2]
        dt_cut = cut(dt, size)
        decays = chunk_decays((dt_cut * rate).transpose(2, 3), cut_segments(segments, size))
        entering, leaving = (
            part.transpose(2, 3)[..., None] for part in (decays.entering, decays.leaving)
        )
        x_cut = cut(x, size)
        moved = x_cut * dt_cut[..., None]  # [B, C, L, H, P]
        b_cut, c_cut = (_by_group(cut(part, size)) for part in (b, c))  # [batch, L, N]
        scores = torch.bmm(c_cut, b_cut.mT)
        within = decays.within.view(len(scores), -1, size, size)
        mixed = (within * scores[:, None]).flatten(0, 1)  # [batch * R, L, L]
        by_head = moved.transpose(2, 3).reshape(len(mixed), size, width)
        near = torch.bmm(mixed, by_head).view(*moved.shape[:2], heads, size, width)
        left = _by_group((moved * leaving).unflatten(3, (groups, -1)).flatten(4))
        added = torch.bmm(left.mT, b_cut).view(*moved.shape[:2], heads, width, -1)
        before = torch.empty_like(added)
        for chunk in range(added.shape[1]):
            before[:, chunk] = state
            through = decays.through[:, chunk, :, None, None]
            state = torch.addcmul(added[:, chunk], state, through)
        read = torch.bmm(c_cut, before.view(len(c_cut), -1, before.shape[-1]).mT)
        y = _by_token(read, moved.shape, groups) * entering
        y += near.transpose(2, 3)
        ctx.save_for_backward(
            *(x_cut, dt_cut, rate, b_cut, c_cut, entering, leaving, decays.through),
            *(within, mixed, by_head, left, before, y),
        )
        ctx.length, ctx.groups = length, groups
        return y.flatten(1, 2)[:, :length], state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, dt, rate, b, c, entering, leaving, through = ctx.saved_tensors[:8]
        within, mixed, by_head, left, before, y = ctx.saved_tensors[8:]
        size, shape = x.shape[2], x.shape
        grad = cut(grads[0], size)
        grad_by_head = grad.transpose(2, 3).reshape(by_head.shape)
        entered = _by_group((grad * entering).unflatten(3, (ctx.groups, -1)).flatten(4))
        states = before.view(len(c), -1, before.shape[-1])
        grad_before = torch.bmm(entered.mT, c).view_as(before)
        grad_c = torch.bmm(entered, states)
        carried, grad_added = grads[1], torch.empty_like(before)
        grad_last = torch.empty_like(through)  # of the logarithm of what goes through
        for chunk in reversed(range(shape[1])):
            grad_added[:, chunk] = carried
            decay = through[:, chunk, :, None, None]
            grad_last[:, chunk] = (carried * decay * before[:, chunk]).sum((-2, -1))
            carried = torch.addcmul(grad_before[:, chunk], carried, decay)
        writes = grad_added.view_as(states)
        grad_b = torch.bmm(left, writes)
        grad_left = _by_token(torch.bmm(b, writes.mT), shape, ctx.groups) * leaving
        grad_mixed = torch.bmm(grad_by_head, by_head.mT)
        near = torch.bmm(mixed.mT, grad_by_head).view(*shape[:2], shape[3], size, shape[4])
        grad_scores = grad_mixed.view_as(within).mul_(within).sum(1)
        grad_c.baddbmm_(grad_scores, b)
        grad_b.baddbmm_(grad_scores.mT, c)
        left_dot = (grad_left * x).sum(-1) * dt
        grad_moved = grad_left.add_(near.transpose(2, 3))
        moved_dot = (grad_moved * x).sum(-1)
        grad_total = (grad * y).sum(-1) - dt * moved_dot  # [B, C, L, H]
        grad_total[:, :, -1] += left_dot.sum(2) + grad_last
        grad_log = grad_total.double().flip(2).cumsum(2).flip(2).to(dt.dtype)
        grad_b, grad_c = (
            _by_token(part, (*shape[:3], ctx.groups, -1), ctx.groups) for part in (grad_b, grad_c)
        )
        whole = grad_moved.mul_(dt[..., None]), moved_dot + grad_log * rate, grad_b, grad_c
        grad_x, grad_dt, grad_b, grad_c = (p.flatten(1, 2)[:, : ctx.length] for p in whole)
        grad_rate = (grad_log * dt).sum((0, 1, 2))
        return grad_x, grad_dt, grad_rate, grad_b, grad_c, carried, None, None


def _by_group(x: Tensor) -> Tensor:
    """Put sequences, chunks and groups into one dim, for batched products.

    Shape:
        x: [B, C, L, G, n]. Returns [B * C * G, L, n].
    """
    return x.transpose(2, 3).reshape(-1, x.shape[2], x.shape[4])


def _by_token(x: Tensor, shape: Sequence[int], groups: int) -> Tensor:
    """Undo `_by_group`.

    Shape:
        x: [B * C * G, L, n]. Returns `shape`, [B, C, L, ...].
    """
    return x.view(*shape[:2], groups, *x.shape[1:]).transpose(2, 3).reshape(shape)


def _ssd(parts: tuple[Tensor, ...], segments: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    return _Ssd.apply(*parts, segments, size)  # pyright: ignore[reportReturnType]


SSD: Registry[Callable[..., tuple[Tensor, Tensor]]] = Registry(
    "ssd", (Candidate("eager", _ssd, eager_obstacle), Candidate("plain", ssd_plain))
)


def empty_state(x: Tensor, b: Tensor) -> Tensor:
    """Return an empty state, for sequences x with directions b."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1], dtype=wide)
