"""Operands: a layer's tensor, quantised once in the forms that its products need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from mt_fp8.qtensor import QTensor
from mt_fp8.recipe import Role
from mt_fp8.scaling import Scaling

Form: TypeAlias = QTensor | Tensor
"""A matrix as it is multiplied; a tensor where the recipe leaves it as it is."""
Part: TypeAlias = tuple[Tensor, int | None]
"""A tensor, and the dim in which ranks have different tokens; None where they have the same."""


@dataclass(eq=False)
class Operand:
    """What a layer makes of a tensor once, in the forms that its products need.

    Attributes:
        role: Role of the tensor in the layer.
        dtype: Dtype of the tensor and of the products.
        shape: Shape of the tensor.
        rows: Scaled along its last dim, as [tokens, features], or [out, in] of a weight.
        columns: Transposed and scaled along the other, as [features, tokens], or [in, out].
        source: Source of `columns`, which is made at its first use.
        amax: The largest magnitude, where delayed scaling wants to know.
    """

    role: Role
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Form | None = None
    columns: Form | None = None
    source: Tensor | None = field(default=None, repr=False)
    amax: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Tokens, or the output features of a weight."""
        return prod(self.shape[:-1])

    def kept(self) -> tuple[Tensor, ...]:
        """Return its one form as tensors; `from_kept` makes it again.

        The first one has no elements: it is of the dtype, and its shape tells the tensor's.
        """
        form = self.columns if self.rows is None else self.rows
        if not isinstance(form, QTensor):
            return () if form is None else (form,)
        empty = form.data.new_empty((*self.shape, 0), dtype=self.dtype)
        others = () if form.global_scale is None else (form.global_scale,)
        return empty, form.data, form.scales, *others

    @classmethod
    def from_kept(
        cls, tensors: Sequence[Tensor], role: Role, scaling: Scaling | None, *, turned: bool
    ) -> Operand:
        """Make an operand of what `kept` returned.

        Args:
            tensors: What it returned.
            role: As before.
            scaling: Scaling of the form.
            turned: Whether the form is the transpose's.
        """
        like, *others = tensors
        shape = tuple(like.shape if scaling is None else like.shape[:-1])
        made = cls(role=role, dtype=like.dtype, shape=shape)
        form: Form = like
        if scaling is not None:
            sizes = (made.num_rows, shape[-1])
            form = _form(others, scaling, like.dtype, sizes[::-1] if turned else sizes)
        return replace(made, columns=form) if turned else replace(made, rows=form)

    def parts(self) -> list[Part]:
        """Return its tensors as they lie in [B, s, n], with the dim of the tokens, for a gather.

        Raises:
            ValueError: Blocks of tokens, or pairs of them in a byte, reach over two sequences.
        """
        sequences = self.shape[:-1]
        found: list[Part] = []
        if self.rows is not None:
            found += _parts(self.rows, sequences, turned=False)
        if self.columns is not None:
            found += _parts(self.columns, sequences, turned=True)
        return found

    def joined(self, tensors: Sequence[Tensor], *, ranks: int) -> Operand:
        """Join gathered `parts` into the operand of the whole sequence."""
        batch, tokens, size = self.shape
        left = iter(tensors)
        whole = Operand(role=self.role, dtype=self.dtype, shape=(batch, tokens * ranks, size))
        shape = (whole.num_rows, size)
        if self.rows is not None:
            whole.rows = _of_parts(self.rows, left, shape, turned=False)
        if self.columns is not None:
            whole.columns = _of_parts(self.columns, left, shape[::-1], turned=True)
        return whole


def _form(
    tensors: Sequence[Tensor], scaling: Scaling, dtype: torch.dtype, shape: tuple[int, ...]
) -> QTensor:
    data, scales, *others = tensors
    return QTensor(
        data=data,
        scales=scales,
        scaling=scaling,
        dtype=dtype,
        shape=shape,
        global_scale=others[0] if others else None,
    )


def _parts(form: Form, sequences: tuple[int, ...], *, turned: bool) -> list[Part]:
    """Cut a matrix, whose tokens are rows or (`turned`) columns, at its sequences."""
    batch, tokens = sequences
    dim = 2 if turned else 1
    if isinstance(form, Tensor):
        return [(_apart(form, batch, turned=turned), dim)]
    block, packed = form.scaling.block, form.scaling.elements.per_byte if turned else 1
    size = 1 if isinstance(block, str) else block[1 if turned else 0]
    if tokens % size or tokens % packed:
        raise ValueError(
            f"a rank's {tokens} tokens of a sequence are no whole blocks of {max(size, packed)}, "
            "so they can't be gathered; use a longer sequence or fewer tensor-parallel ranks, or "
            "another recipe"
        )
    parts: list[Part] = [(_apart(form.data, batch, turned=turned), dim)]
    if block == "tensor" or (block == "row" and turned):
        parts.append((form.scales, None))  # one for all tokens, which the ranks agreed on
    else:
        parts.append((_apart(form.scales, batch, turned=turned), dim))
    return parts if form.global_scale is None else [*parts, (form.global_scale, None)]


def _apart(x: Tensor, batch: int, *, turned: bool) -> Tensor:
    return x.unflatten(1 if turned else 0, (batch, -1))


def _of_parts(form: Form, left: Iterator[Tensor], shape: tuple[int, ...], *, turned: bool) -> Form:
    """Undo `_parts`, with all tokens."""

    def together(x: Tensor, like: Tensor) -> Tensor:
        return x if x.dim() == like.dim() else x.flatten(1, 2) if turned else x.flatten(0, 1)

    if isinstance(form, Tensor):
        return together(next(left), form)
    tensors = [form.data, form.scales]
    tensors += [] if form.global_scale is None else [form.global_scale]
    whole = [together(next(left), like) for like in tensors]
    return _form(whole, form.scaling, form.dtype, shape)
