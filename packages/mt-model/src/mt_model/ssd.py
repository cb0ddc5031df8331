"""The state-space recurrence of Mamba-2, step by step and by chunks (Dao & Gu, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from mt_model.decay import chunk_decays, cut, cut_segments, step_by_step


def ssd_step(
    x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Take one step: `state = exp(dt rate) state + dt x b^T`, and `y = state c`.

    Args:
        x: input of each head.
        dt: step size of each head.
        rate: of the decay of each head, negative.
        b: direction in which a group of heads writes.
        c: direction in which a group of heads reads.
        state: of the tokens before.

    Returns:
        Output and state, in the state's dtype.

    Shape:
        x: [B, H, P]; dt: [B, H]; rate: [H]; b, c: [B, G, N]; state: [B, H, P, N].
    """
    x, dt, b, c = (part.to(state.dtype) for part in (x, dt, b, c))
    shares = x.shape[1] // b.shape[1]
    b, c = (part.repeat_interleave(shares, 1) for part in (b, c))
    added = (x * dt[..., None])[..., None] * b[:, :, None]
    state = state * (dt * rate).exp()[..., None, None] + added
    return torch.einsum("bhpn,bhn->bhp", state, c), state


def ssd_reference(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    state: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take the steps one by one. The plain form of `ssd`, which has the arguments."""

    def step(
        x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        return ssd_step(x, dt, rate, b, c, state)

    return step_by_step(step, (x, dt, b, c), _zeros(x, b) if state is None else state, segments)


def ssd(  # noqa: PLR0913 - what the recurrence is made of, and how it is computed
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
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
        x: input of each head.
        dt: step size of each head; with 0 a token neither writes nor lets the state decay.
        rate: of the decay of each head, negative.
        b: direction in which a group of consecutive heads writes.
        c: direction in which a group of consecutive heads reads.
        chunk_size: tokens whose products with each other are there at a time.
        state: of the tokens before; zero if None.
        segments: as of `segments_of`; a new one starts from a zero state.

    Returns:
        Outputs, and the state after the last token.

    Shape:
        x: [B, S, H, P]; dt: [B, S, H]; rate: [H]; b, c: [B, S, G, N]; state: [B, H, P, N];
        segments: [B, S]. Returns [B, S, H, P] and [B, H, P, N].
    """
    length, groups = x.shape[1], b.shape[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dt, b, c = (part.to(wide) for part in (x, dt, b, c))
    state = _zeros(x, b) if state is None else state.to(wide)
    size = min(chunk_size, length)
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


def _zeros(x: Tensor, b: Tensor) -> Tensor:
    """An empty state, for sequences x with directions b."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1], dtype=wide)
