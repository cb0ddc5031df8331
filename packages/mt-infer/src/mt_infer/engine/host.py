"""Host memory for waiting requests: the blocks that each holds, and the copies to make."""

from __future__ import annotations

from dataclasses import dataclass

from mt_infer.engine.blocks import BlockPool
from mt_infer.engine.request import Request


@dataclass(frozen=True, kw_only=True)
class Move:
    """A copy of a request's blocks and recurrent states to host memory, or back.

    Attributes:
        request: The request.
        is_out: Whether the copy goes to the host.
        blocks: Blocks of the pages.
        host: Blocks of the host, the same number.
        state: Number of the request's rows of states.
        turn: Place of the states among these rows; see `Request.turn`.
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
        restored: Number of tokens that were copied back instead of being computed again.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.pool, self._block_size = BlockPool(blocks), block_size
        self._moves: list[Move] = []
        self.restored = 0

    def keep(self, request: Request) -> None:
        """Copy a running request's blocks, if there is room for all of them."""
        count = -(-request.held // self._block_size)
        if 0 < count <= self.pool.free_blocks:
            request.host = self.pool.take(count)
            request.saved = request.held, request.unseen
            self._move(request, 0, is_out=True)

    def restore(self, request: Request) -> None:
        """Give an admitted request its blocks back, after the ones from the prefix cache."""
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
