"""Messages between ranks and engines: values with tensors as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_infer import message


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A tensor in a message.

    Attributes:
        dtype: Name of its dtype.
        shape: Its shape.
        content: Its values, row by row.
    """

    dtype: str
    shape: tuple[int, ...]
    content: bytes


def pack(value: Any) -> bytes:
    """Return a value as bytes; it may hold tensors, and all that `mt_infer.message.pack` takes.

    Raises:
        TypeError: The value holds something else.
    """
    return message.pack(value, _sent)


def unpack(content: bytes, *kinds: type[Any]) -> Any:
    """Return the value of `pack`; see `mt_infer.message.unpack`."""
    return message.unpack(content, *kinds, _Sent=_tensor)


def _sent(x: Any) -> _Sent:
    if not isinstance(x, Tensor):
        raise TypeError(f"{type(x).__name__} can't be sent to other ranks; give numbers and texts")
    content = x.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
    return _Sent(dtype=str(x.dtype).removeprefix("torch."), shape=tuple(x.shape), content=content)


def _tensor(dtype: str, shape: list[int], content: bytes) -> Tensor:
    kind = getattr(torch, dtype)
    if not content:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=kind).view(shape)
