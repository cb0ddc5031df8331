"""Rotary position embedding: tables of cosines and sines, and the rotation by them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mt_model.rope.config import Rotary


class RotaryTable(NamedTuple):
    """Cosines and sines for the first channels of a head; the others stay as they are.

    Attributes:
        values: Cosines for both channels of each pair, then sines, negated for the first channel.
        interleaved: A pair is two neighbours; else one channel of each half.

    Shape:
        values: [2, S, W], or [2, B, S, W] where rows differ.
    """

    values: Tensor
    interleaved: bool = False

    def to(self, dtype: torch.dtype) -> RotaryTable:
        """Return the table in another dtype."""
        return self._replace(values=self.values.to(dtype))


class AngleStore:
    """The latest angles of each rotary embedding, on its device.

    They are copied to a device once, since a CUDA graph can't copy Python's values.
    """

    def __init__(self) -> None:
        self._held: dict[Rotary, tuple[tuple[float, ...], Tensor]] = {}

    def __call__(self, rotary: Rotary, length: int | Tensor, device: torch.device) -> Tensor:
        """Return the angles for sequences of a length, or of one for each token, in fp64.

        Shape:
            length: [T]. Returns [pairs], or [T, pairs] where tokens differ.
        """
        if isinstance(length, Tensor):
            scaling = rotary.rope.scaling
            lengths = length.tolist() if scaling is not None and scaling.by_length else [1]
            by_length = {each: rotary.angles(each) for each in set(lengths)}
            if len(set(by_length.values())) > 1:
                rows = [by_length[each] for each in lengths]
                return torch.tensor(rows, dtype=torch.float64, device=device)
            length = lengths[0]
        values = tuple(rotary.angles(length))
        held = self._held.get(rotary)
        if held is None or held[0] != values or held[1].device != device:
            with torch.inference_mode(mode=False):
                made = torch.tensor(values, dtype=torch.float64)
                # Waiting for the copy would wait for all work before it on an accelerator.
                held = self._held[rotary] = values, made.to(device, non_blocking=True)
        return held[1]


def rotary_table(
    positions: Tensor,
    rotary: Rotary,
    *,
    length: int | Tensor,
    dtype: torch.dtype,
    angles: AngleStore | None = None,
) -> RotaryTable:
    """Return cosine and sine of `position * angle`, computed in fp64 and rounded once.

    Args:
        positions: Positions of the tokens.
        rotary: Rotary embedding and head size.
        length: Length of the whole sequence, for scalings that depend on it; or the length of each
            token's sequence.
        dtype: Dtype of the table.
        angles: Store of the angles, which stay the same from pass to pass.

    Shape:
        positions: [S], [B, S] where rows differ, or [3, B, S] for a rope with sections; length:
            [S].

    Raises:
        ValueError: There are three positions for each token, and the rope has no sections.
    """
    axes = rotary.rope.axes(rotary.head_dim)
    if positions.dim() < 3:
        by_pair = positions.double()[..., None]
    elif axes is None:
        raise ValueError(
            f"positions are {tuple(positions.shape)}, three for each token, but a layer's rope has "
            "no sections to say which pairs turn with which; give [B, S], or set rope.sections"
        )
    else:
        by_pair = torch.stack([positions[axis] for axis in axes], dim=-1).double()
    angle = by_pair * (angles or AngleStore())(rotary, length, positions.device)
    cos, sin = angle.cos() * rotary.magnitude, angle.sin() * rotary.magnitude
    pairs = (cos, cos), (-sin, sin)
    if rotary.rope.interleaved:
        halves = [torch.stack(pair, -1).flatten(-2) for pair in pairs]
    else:
        halves = [torch.cat(pair, -1) for pair in pairs]
    return RotaryTable(torch.stack(halves).to(dtype), rotary.rope.interleaved)
