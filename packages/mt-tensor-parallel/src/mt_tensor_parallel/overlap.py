"""Communication that runs while a sequence-parallel linear layer multiplies.

The layer's input is gathered, or its output scattered, in pieces of the sequence: while one piece
travels, another is multiplied. Results are those of the plain path, up to the rounding of matrix
products over other numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mt_tensor_parallel.collectives import Group, start_all_gather, start_reduce_scatter

__all__ = ["Overlap", "gather_and", "pick_overlap", "scatter_after"]

SEQUENCE_DIM = 1


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How a layer's communication is hidden.

    Args:
        kind: ``"plain"``: not at all in forward; ``"chunked"``: in pieces.
        chunks: Pieces of each rank's share of the sequence; fewer where it is shorter.
        reason: Why this one was picked.
    """

    kind: Literal["plain", "chunked"] = "plain"
    chunks: int = 1
    reason: str = "asked for"

    def __post_init__(self) -> None:
        if self.kind not in ("plain", "chunked"):
            raise ValueError(f"kind must be 'plain' or 'chunked', got {self.kind!r}")
        fewest = 2 if self.kind == "chunked" else 1
        if self.chunks < fewest:
            raise ValueError(f"chunks={self.chunks} must be {fewest} or more for {self.kind!r}")

    def sizes(self, length: int) -> list[int]:
        """The pieces of a share of ``length`` tokens."""
        chunks = min(self.chunks, max(length, 1))
        each, more = divmod(length, chunks)
        return [each + (i < more) for i in range(chunks)]


def pick_overlap(
    group: Group, *, sequence_parallel: bool, device: torch.device, chunks: int = 4
) -> Overlap:
    """The best way for a layer here, with the reason.

    Args:
        group: The layer's ranks.
        sequence_parallel: Whether the layer gathers and scatters at all.
        device: Of its activations.
        chunks: Pieces, where it is done in pieces.
    """
    if group is None or group.size() == 1:
        return Overlap(reason="one rank sends nothing")
    if not sequence_parallel:
        return Overlap(reason="without sequence parallelism only the output's sum travels")
    if device.type == "cpu":
        # gloo's threads want the cores that multiply, and each message costs more than it hides.
        return Overlap(reason="on a CPU communication and products share the cores")
    return Overlap(kind="chunked", chunks=chunks, reason=f"{device.type} copies while it computes")


def gather_and(
    product: Callable[[Tensor], Tensor], x: Tensor, group: dist.ProcessGroup, overlap: Overlap
) -> tuple[Tensor, Tensor]:
    """All-gathers ``x`` along the sequence and applies ``product`` to it, piece by piece.

    Returns:
        The product of the whole, and the whole.

    Shape:
        x: [B, s, in]. Returns [B, ranks * s, out] and [B, ranks * s, in].
    """
    if overlap.kind == "plain":
        whole = start_all_gather(x, group, SEQUENCE_DIM).wait()
        return product(whole), whole
    pieces = x.split(overlap.sizes(x.shape[SEQUENCE_DIM]), SEQUENCE_DIM)
    pending = start_all_gather(pieces[0], group, SEQUENCE_DIM)
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    for following in (*pieces[1:], None):
        arrived = pending.wait()
        if following is not None:
            pending = start_all_gather(following, group, SEQUENCE_DIM)
        inputs.append(arrived)
        outputs.append(product(arrived))
    return _interleaved(outputs, group), _interleaved(inputs, group)


def _interleaved(pieces: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Pieces with a part of every rank's share each, as the ranks' shares one after another."""
    parts = [piece.unflatten(SEQUENCE_DIM, (group.size(), -1)) for piece in pieces]
    return torch.cat(parts, SEQUENCE_DIM + 1).flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)


def scatter_after(
    product: Callable[[Tensor], Tensor], x: Tensor, group: dist.ProcessGroup, overlap: Overlap
) -> Tensor:
    """Applies ``product`` and reduce-scatters the result along the sequence, piece by piece.

    Shape:
        x: [B, ranks * s, in]. Returns [B, s, out].
    """
    if overlap.kind == "plain":
        return start_reduce_scatter(product(x), group, SEQUENCE_DIM).wait()
    shares = x.unflatten(SEQUENCE_DIM, (group.size(), -1))
    sizes = overlap.sizes(shares.shape[SEQUENCE_DIM + 1])
    pending = [
        start_reduce_scatter(
            product(piece.flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)), group, SEQUENCE_DIM
        )
        for piece in shares.split(sizes, SEQUENCE_DIM + 1)
    ]
    return torch.cat([each.wait() for each in pending], SEQUENCE_DIM)
