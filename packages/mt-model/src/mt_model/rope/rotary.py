"""Rotary position embedding: tables of cosines and sines, and the rotation by them."""

from __future__ import annotations

from typing import Any, NamedTuple

import mt_fusions
import torch
from mt_files import AUTO
from torch import Tensor
from torch.autograd.function import once_differentiable

from mt_model.kernels.choice import (
    Kernel,
    KernelChoice,
    choice_of,
    chosen_kernel,
    eager_obstacle,
    fused_drawback,
    fused_obstacle,
    serves,
)
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
        """Return it in another dtype."""
        return self._replace(values=self.values.to(dtype))

    def plain(self) -> list[Tensor]:
        """Return cosines and sines for both channels of each pair, with no sign of their own.

        Shape:
            Each [S, W] or [B, S, W].
        """
        cos, sin = self.values.unbind(0)
        if self.interleaved:
            return [cos, sin[..., 1::2].repeat_interleave(2, dim=-1)]
        return [cos, sin.chunk(2, dim=-1)[1].repeat(*(1,) * (sin.dim() - 1), 2)]


class AngleStore:
    """The angles of each rotary embedding on its device, the last ones that were asked for.

    Their copy to a device is made once: in a CUDA graph none can be, as it is of Python's values.
    """

    def __init__(self) -> None:
        self._held: dict[Rotary, tuple[tuple[float, ...], Tensor]] = {}

    def __call__(self, rotary: Rotary, length: int, device: torch.device) -> Tensor:
        """Return the angles for sequences of a length, in fp64."""
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
    length: int,
    dtype: torch.dtype,
    angles: AngleStore | None = None,
) -> RotaryTable:
    """Cosine and sine of `position * angle`, computed in fp64 and rounded once.

    Args:
        positions: Of the tokens.
        rotary: What is turned, and how.
        length: Of the whole sequence, for scalings that depend on it.
        dtype: Of the table.
        angles: Keeps what does not change from pass to pass.

    Shape:
        positions: [S], [B, S] where rows differ, or [3, B, S] for a rope with sections.

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


def swap_pairs(x: Tensor, *, interleaved: bool) -> Tensor:
    """The channels of each pair of the last dim, exchanged."""
    if interleaved:
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((b, a), dim=-1)


def rotate_reference(x: Tensor, table: RotaryTable) -> Tensor:
    """`(a cos - b sin, b cos + a sin)` for the pairs a, b of the first channels.

    Shape:
        x: [B, S, ..., D] with D at least the table's width. Returns the shape of x.
    """
    cos, sin = _broadcast(table.values, x.dim())
    turned, rest = x.tensor_split((cos.shape[-1],), dim=-1)
    turned = turned * cos + swap_pairs(turned, interleaved=table.interleaved) * sin
    return turned if not rest.shape[-1] else torch.cat((turned, rest), dim=-1)


def rotate(
    query: Tensor, key: Tensor, table: RotaryTable, *, kernel: str = AUTO
) -> tuple[Tensor, Tensor]:
    """`rotate_reference` of both, with a backward that keeps no activation.

    Args:
        query: What is turned.
        key: The same with another number of heads.
        table: By what.
        kernel: Of `ROTATE_KERNELS`, by name.

    Shape:
        query, key: [B, S, ..., D] with D at least the table's width. Returns their shapes.

    Raises:
        ValueError: The named kernel does not serve; the message says why.
    """
    chosen = chosen_kernel("rope", ROTATE_KERNELS, kernel, query, key, table)
    return chosen.run(query, key, table)


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, back: bool = False) -> Tensor:
    """Rotate the first channels of `x`, or the gradient `back`, in as few passes as may be.

    Shape:
        cos, sin: broadcast with x, but for the last dim, which may be narrower.
    """
    width = cos.shape[-1]
    turned = x if width == x.shape[-1] else x[..., :width]
    swapped = swap_pairs(turned, interleaved=interleaved)
    turned = (turned * cos).addcmul_(swapped, sin, value=-1 if back else 1)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def _broadcast(values: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    between = (1,) * (dims - 3)
    cos, sin = values.view(*values.shape[:-1], *between, values.shape[-1]).unbind(0)
    return cos, sin


def rope_choice(kernel: str, like: Tensor) -> KernelChoice:
    """Say what `rotate` takes for tensors of the device and dtype of `like`."""
    x = like.new_empty(0, 1, 1, 2)
    return choice_of("rope", ROTATE_KERNELS, kernel, x, x, None)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *table: Any) -> Tensor:
        values, interleaved = table
        ctx.save_for_backward(values)
        ctx.interleaved = interleaved
        return turn(x, *_broadcast(values, x.dim()), interleaved=interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos_sin = _broadcast(ctx.saved_tensors[0], grads[0].dim())
        return turn(grads[0], *cos_sin, interleaved=ctx.interleaved, back=True), None, None


def _by_torch(query: Tensor, key: Tensor, table: RotaryTable) -> tuple[Tensor, Tensor]:
    return _Rotate.apply(query, *table), _Rotate.apply(key, *table)  # pyright: ignore[reportReturnType]


def _plain(query: Tensor, key: Tensor, table: RotaryTable) -> tuple[Tensor, Tensor]:
    return rotate_reference(query, table), rotate_reference(key, table)


def _fused(query: Tensor, key: Tensor, table: RotaryTable) -> tuple[Tensor, Tensor]:
    tables = table.plain()
    if query.dim() == 5:  # heads in groups, as in the projection: read there, a group for a token
        rows = [x.expand(*query.shape[:2], -1).flatten(0, 1).unsqueeze(1) for x in tables]
        tables = [x.expand(-1, query.shape[2], -1) for x in rows]
    own = [x.flatten(0, 1) if x.dim() == 5 else x for x in (query, key)]
    how = {
        "interleaved": table.interleaved,
        "heads_dim": 2,
        "kernel": mt_fusions.fused_kernel(query),
    }
    turned = mt_fusions.apply_rope(*own, *tables, **how)
    return turned[0].view(query.shape), turned[1].view(key.shape)


def _fused_obstacle(query: Tensor, *_: Any) -> str | None:
    return fused_obstacle("apply_rope", query)


ROTATE_KERNELS: tuple[Kernel[tuple[Tensor, Tensor]], ...] = (
    Kernel("fused", _fused, _fused_obstacle, fused_drawback),
    Kernel("torch", _by_torch, eager_obstacle),
    Kernel("reference", _plain, serves),
)
