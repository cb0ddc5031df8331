"""Candidates for the addition of a branch to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch
from mt_kernels import Candidate, Registry
from torch import Tensor

from mt_fusions.kernels import fused
from mt_fusions.residual.bias_dropout_add import BIAS_DROPOUT_ADD_KERNELS, bias_dropout_add


class Sum(NamedTuple):
    """A residual stream and the output of a branch, not added yet.

    Shape:
        stream, branch: [B, S, hidden].
    """

    stream: Tensor
    branch: Tensor


Stream: TypeAlias = Tensor | Sum


class Dropout(Protocol):
    """Dropout whose mask is `random_bits` of a key and of the global index of each element."""

    @property
    def probability(self) -> float:
        """Probability that an element is dropped."""
        ...

    @property
    def key(self) -> int:
        """The key of the mask."""
        ...

    def __call__(self, x: Tensor, index: Tensor | None) -> Tensor:
        """Drop elements of `x`; the identity when the probability or the index is absent."""
        ...


def _fused(
    x: Tensor, y: Tensor, dropout: Dropout, index: Tensor | None, *, opens: bool, kernel: str
) -> Stream:
    if index is None or not dropout.probability:
        return Sum(x, y) if opens else x + y
    if torch.compiler.is_compiling():  # the kernel's key is a number, of one site alone
        return x + dropout(y, index)
    dtype = torch.promote_types(x.dtype, y.dtype)
    return bias_dropout_add(
        y.to(dtype),
        None,
        x.to(dtype),
        dropout.probability,
        key=dropout.key,
        first=index[..., 0],  # those of a token are neighbours
        kernel=kernel,
    )


def _reference(
    x: Tensor, y: Tensor, dropout: Dropout, index: Tensor | None, *, opens: bool
) -> Stream:
    del opens
    return x + dropout(y, index)


RESIDUAL: Registry[Callable[..., Stream]] = Registry(
    "residual", (fused(_fused, BIAS_DROPOUT_ADD_KERNELS), Candidate("reference", _reference))
)
"""Adds a branch, of `(x, branch, dropout, index, *, opens)`; obstacles get `x`.

`index` has the global index of each element, or is None where nothing is dropped. With `opens` the
result may be a `Sum`, for the norm behind it to add.
"""
