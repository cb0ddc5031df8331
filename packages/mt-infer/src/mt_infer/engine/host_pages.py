"""Host memory for the blocks of waiting requests."""

from __future__ import annotations

import torch
from mt_model import Pages
from torch import Tensor

from mt_infer.engine.host import Move


class HostPages:
    """Host memory in the shape of the pages.

    Args:
        pages: The pages that blocks are copied from and to.
        blocks: Number of blocks.
    """

    def __init__(self, pages: Pages, blocks: int) -> None:
        self._blocks = [
            torch.empty((blocks, *x.shape[1:]), dtype=x.dtype, pin_memory=x.is_cuda)
            for x in pages.tensors(states=False)
        ]

    def make(self, move: Move, pages: Pages, row: int) -> None:
        """Make a copy in all layers.

        Args:
            move: The copy.
            pages: The pages.
            row: Row of the request's states.
        """
        rows = list(move.host), list(move.blocks)
        for kept, x in zip(self._blocks, pages.tensors(states=False), strict=True):
            _copy(kept, x, *rows) if move.is_out else _copy(x, kept, *reversed(rows))
        states = [x[row] for x in pages.tensors(states=True)]
        if not states:
            return
        if move.is_out:
            move.request.kept = [x.to("cpu", copy=True) for x in states]
            return
        for x, kept in zip(states, move.request.kept, strict=True):
            x.copy_(kept)
        move.request.kept = ()


def _copy(into: Tensor, source: Tensor, rows: list[int], taken: list[int]) -> None:
    """Copy rows as bytes, since torch can't copy fp8 by index."""
    into.view(torch.uint8)[rows] = source.view(torch.uint8)[taken].to(into.device)
