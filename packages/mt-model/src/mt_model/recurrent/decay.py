"""Decays between the tokens of a chunk, which the chunked forms of recurrences share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Decays:
    """The products of decays between the tokens and states of each chunk of a sequence.

    Attributes:
        within: Decay from token s to token t; 0 where s comes later or is of another document.
        entering: Decay from the state before the chunk to token t.
        leaving: Decay from token s to the state after the chunk.
        through: Decay from the state before the chunk to the state after it.

    Shape:
        within: [B, C, H, L, L], t before s; entering, leaving: [B, C, H, L]; through: [B, C, H].
    """

    within: Tensor
    entering: Tensor
    leaving: Tensor
    through: Tensor


def chunk_decays(log_decay: Tensor, segments: Tensor | None) -> Decays:
    """Multiply up the decays of the steps inside each chunk.

    The logarithms are summed in fp64, as the difference of two large sums loses what fp32 has.

    Args:
        log_decay: of the step to each token, 0 or less.
        segments: number of each token's document in its sequence; None where there is one. What
            is before the first chunk belongs to the first token's document.

    Shape:
        log_decay: [B, C, H, L]; segments: [B, C, L].
    """
    total = log_decay.double().cumsum(-1)
    within = total[..., :, None] - total[..., None, :]
    hidden = torch.ones(within.shape[-2:], dtype=torch.bool, device=total.device).triu(1)
    entering, leaving, through = total, total[..., -1:] - total, total[..., -1]
    if segments is not None:
        own, last = segments[:, :, None], segments[:, :, None, -1:]
        before = torch.cat((own[:, :1, :, :1], last[:, :-1]), 1)
        hidden = hidden | (own[..., :, None] != own[..., None, :])
        entering = entering.masked_fill(own != before, -torch.inf)
        leaving = leaving.masked_fill(own != last, -torch.inf)
        through = through.masked_fill((last != before)[..., 0], -torch.inf)
    within = within.to(log_decay.dtype).masked_fill_(hidden, -torch.inf).exp_()
    entering, leaving, through = (
        part.to(log_decay.dtype).exp() for part in (entering, leaving, through)
    )
    return Decays(within=within, entering=entering, leaving=leaving, through=through)


def cut(x: Tensor, size: int) -> Tensor:
    """Cut sequences into chunks, the last of which ends with zeros.

    Shape:
        x: [B, S, ...]. Returns [B, ceil(S / size), size, ...].
    """
    missing = -x.shape[1] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.unflatten(1, (-1, size))


def cut_segments(segments: Tensor | None, size: int) -> Tensor | None:
    """Cut the numbers of documents into chunks; what fills the last one is of the last document.

    Shape:
        segments: [B, S]. Returns [B, ceil(S / size), size].
    """
    if segments is None:
        return None
    missing = -segments.shape[1] % size
    filled = torch.cat((segments, segments[:, -1:].expand(-1, missing)), 1)
    return filled.unflatten(1, (-1, size))


def segments_of(documents: Tensor | None) -> Tensor | None:
    """Number the documents of each sequence in their order, from 0; None for None.

    Where the id changes a new document begins: a recurrence has no way back to an earlier one.

    Shape:
        documents: ids, [B, S]. Returns [B, S].
    """
    if documents is None:
        return None
    changes = documents[:, 1:] != documents[:, :-1]
    return F.pad(changes.cumsum(1), (1, 0))
