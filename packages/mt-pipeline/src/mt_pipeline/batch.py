"""Cuts a batch of plain tensors into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def cut_batch(given: Any, number: int) -> Sequence[Any]:
    """Return the micro-batches of a run.

    Args:
        given: A sequence of micro-batches, which is returned unchanged; or a whole batch (a tensor
            or a mapping of tensors), which is cut along dim 0 as `torch.tensor_split` does.
        number: Number of micro-batches to cut a whole batch into.

    Raises:
        TypeError: `given` is none of these.
        ValueError: The tensors differ in their number of rows, or have fewer rows than `number`.
    """
    if isinstance(given, Tensor):
        return [part["batch"] for part in cut_batch({"batch": given}, number)]
    if isinstance(given, Mapping):
        _check_rows(given, number)
        parts = {name: tensor.tensor_split(number) for name, tensor in given.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(number)]
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise TypeError(
            "expected a sequence of micro-batches, or a tensor or a dict of tensors to be cut into "
            f"them; got {given!r:.60} ({type(given).__name__})"
        )
    return given


def _check_rows(tensors: Mapping[Any, Any], number: int) -> None:
    """Raise unless all tensors have the same number of rows, and enough of them."""
    rows: dict[Any, int] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.ndim:
            raise TypeError(
                f"{name!r:.60} of the batch is {tensor!r:.60}: only tensors with rows can be cut; "
                "pass a list of micro-batches for anything else"
            )
        rows[name] = len(tensor)
    if not rows:
        raise ValueError("the batch is an empty dict: give it tensors")
    if len(set(rows.values())) != 1:
        raise ValueError(f"the tensors of the batch have different numbers of rows: {rows}")
    if min(rows.values()) < number:
        raise ValueError(
            f"the batch has {min(rows.values())} rows for {number} micro-batches: each micro-batch "
            "needs at least one row"
        )
