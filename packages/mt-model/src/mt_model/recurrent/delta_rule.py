"""The gated delta rule, step by step and by chunks (Yang, Kautz & Hatamizadeh, 2024)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mt_model.recurrent.decay import chunk_decays, cut, cut_segments


class DeltaSteps(NamedTuple):
    """What the steps of a sequence are made of; without S, of one token.

    Attributes:
        query: one for `H / K` consecutive values, as the key is.
        key: of length 1.
        value: one of each head.
        log_decay: 0 or less.
        beta: how far towards the value, 0 to 1; with 0 a token does not write.

    Shape:
        query, key: [B, S, K, D]; value: [B, S, H, V]; log_decay, beta: [B, S, H].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor


def delta_rule_step(
    steps: DeltaSteps, state: Tensor, *, invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Take one step of a memory that maps keys to values.

    It decays, `S = exp(log_decay) S`; moves what it has for the key towards the value,
    `S = S + beta k (v - S^T k)^T`; and answers the query, `y = S^T q`.

    Args:
        steps: of one token.
        state: of the tokens before.
        invariant: Whether a sequence has the same bits beside any number of others.

    Returns:
        Output and state, in the state's dtype.

    Shape:
        state: [B, H, D, V]. Returns [B, H, V] and the state's.
    """
    query, key, value, log_decay, beta = (part.to(state.dtype) for part in steps)
    shares = value.shape[1] // key.shape[1]
    query, key = (part.repeat_interleave(shares, 1) for part in (query, key))
    state = state * log_decay.exp()[..., None, None]
    missing = value - _read(state, key, invariant=invariant)
    state = state + key[..., None] * (missing * beta[..., None])[:, :, None]
    return _read(state, query, invariant=invariant), state


def _read(state: Tensor, key: Tensor, *, invariant: bool) -> Tensor:
    if invariant:  # a batched product has other orders of additions for another batch
        return (state * key[..., None]).sum(-2)
    return torch.einsum("bhdv,bhd->bhv", state, key)


def delta_rule(
    steps: DeltaSteps,
    *,
    chunk_size: int,
    state: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take the steps of a sequence chunk by chunk, in matrix products.

    A step writes `k_t u_t^T`, where `u_t = beta_t (v_t - S^T k_t)` depends on what the steps before
    it wrote. A chunk is a triangular system of equations for all `u`, linear in the state
    before the chunk: `u = u0 - w S` (the WY form). Computed in fp32 (fp64 for fp64). The size of
    the chunks changes nothing but rounding.

    Args:
        steps: of all tokens.
        chunk_size: tokens whose products with each other are there at a time.
        state: of the tokens before; zero if None.
        segments: as of `segments_of`; a new one starts from a zero state.

    Returns:
        Outputs, and the state after the last token.

    Shape:
        state: [B, H, D, V]; segments: [B, S]. Returns [B, S, H, V] and [B, H, D, V].
    """
    key, value = steps.key, steps.value
    length, keys = key.shape[1:3]
    wide = torch.promote_types(key.dtype, torch.float32)
    memory = empty_memory(key, value) if state is None else state.to(wide)
    memory = memory.unflatten(1, (keys, -1))
    size = min(chunk_size, length)
    # b batch, c chunk, k key head, r value head of it, l and s places in the chunk.
    q, k, v, log_decay, beta = (cut(part.to(wide), size).transpose(2, 3) for part in steps)
    decays = chunk_decays(log_decay, cut_segments(segments, size))
    within, entering, leaving, through = (
        part.unflatten(2, (keys, -1))
        for part in (decays.within, decays.entering, decays.leaving, decays.through)
    )
    v, beta = v.unflatten(2, (keys, -1)), beta.unflatten(2, (keys, -1))[..., None]
    k_own, q_own = k[:, :, :, None], q[:, :, :, None]
    system = within * beta * (k @ k.mT)[:, :, :, None]
    right = torch.cat((v * beta, k_own * (beta * entering[..., None])), -1)
    solved = torch.linalg.solve_triangular(system.tril(-1), right, upper=False, unitriangular=True)
    alone, reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    writes = (k_own * leaving[..., None]).mT
    starts, written = [], []
    for chunk in range(k.shape[1]):
        starts.append(memory)
        written.append(alone[:, chunk] - reads[:, chunk] @ memory)
        memory = memory * through[:, chunk, ..., None, None] + writes[:, chunk] @ written[-1]
    before, u = torch.stack(starts, 1), torch.stack(written, 1)
    y = (within * (q @ k.mT)[:, :, :, None]) @ u + (q_own * entering[..., None]) @ before
    y = y.flatten(2, 3).transpose(2, 3).flatten(1, 2)[:, :length]
    return y, memory.flatten(1, 2)


def empty_memory(key: Tensor, value: Tensor) -> Tensor:
    """Return an empty state, for sequences of keys and values."""
    wide = torch.promote_types(key.dtype, torch.float32)
    return key.new_zeros(key.shape[0], value.shape[2], key.shape[-1], value.shape[-1], dtype=wide)
