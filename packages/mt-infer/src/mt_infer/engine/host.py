"""Host memory for requests that wait: which of its blocks each holds, and the copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mt_model import Pages
from torch import Tensor

from mt_infer.engine.blocks import BlockPool
from mt_infer.engine.request import Request


@dataclass(frozen=True, kw_only=True)
class Move:
    """A copy of a request's blocks and recurrent states to host memory, or back.

    Attributes:
        request: The request.
        is_out: Whether it goes to the host.
        blocks: Blocks of the pages.
        host: Blocks of the host, as many.
        state: Number of its rows of states.
        turn: Which of them; see `Request.turn`.
    """

    request: Request
    is_out: bool
    blocks: tuple[int, ...]
    host: tuple[int, ...]
    state: int
    turn: int


class HostRoom:
    """Blocks of host memory that evicted requests hold until they run again.

    Args:
        blocks: Number of blocks.
        block_size: Number of tokens of a block.

    Attributes:
        restored: Number of tokens that came back instead of being computed again.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.pool, self._block_size = BlockPool(blocks), block_size
        self._moves: list[Move] = []
        self.restored = 0

    def keep(self, request: Request) -> None:
        """Copy a running request's blocks, if there is room for all."""
        count = -(-request.held // self._block_size)
        if 0 < count <= self.pool.free_blocks:
            request.host = self.pool.take(count)
            request.saved = request.held, request.unseen
            self._move(request, 0, is_out=True)

    def restore(self, request: Request) -> None:
        """Give an admitted request its blocks back, behind the ones from the prefix cache."""
        held, unseen = request.saved
        if held > request.held:
            self._move(request, request.held // self._block_size, is_out=False)
            self.restored += held - request.held
            request.held, request.unseen = held, unseen
        self.drop(request)

    def drop(self, request: Request) -> None:
        """Take a request's blocks of the host back."""
        self.pool.release(request.host)
        request.host, request.saved = [], (0, 0)

    def take_moves(self) -> list[Move]:
        """Return the copies to make before the next pass writes to pages."""
        found, self._moves = self._moves, []
        return found

    def _move(self, request: Request, start: int, *, is_out: bool) -> None:
        assert request.state is not None, "only a running request has blocks"  # noqa: S101
        host = tuple(request.host[start:])
        blocks = tuple(request.table[start : start + len(host)])
        what = {"blocks": blocks, "host": host, "state": request.state}
        self._moves.append(Move(request=request, is_out=is_out, turn=request.turn, **what))


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
    """Copy rows as bytes, as torch copies no fp8 by index."""
    into.view(torch.uint8)[rows] = source.view(torch.uint8)[taken].to(into.device)
