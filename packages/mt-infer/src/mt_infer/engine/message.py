"""Messages between ranks as bytes: JSON text, then the bytes of its tensors, without pickle."""

from __future__ import annotations

import json
import secrets
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

_SIZE = 8  # bytes of a length
_TAG = 16  # letters of the key that marks what is no JSON; drawn, as callers choose other keys


def pack(value: Any) -> bytes:
    """Return a value of JSON as bytes; it may hold tensors, bytes, and dataclasses of `unpack`.

    Raises:
        TypeError: It holds something else.
    """
    tensors, tag = list[bytes](), secrets.token_hex(_TAG // 2)

    def plain(x: Any) -> dict[str, Any]:
        if isinstance(x, Tensor):
            tensors.append(x.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
            dtype = str(x.dtype).removeprefix("torch.")
            return {tag: "Tensor", "dtype": dtype, "shape": list(x.shape)}
        if isinstance(x, bytes):
            return {tag: "bytes", "hex": x.hex()}
        if is_dataclass(x):
            return {tag: type(x).__name__, **{f.name: getattr(x, f.name) for f in fields(x)}}
        raise TypeError(f"{type(x).__name__} can't be sent to other ranks; give numbers and texts")

    text = json.dumps(value, default=plain).encode()
    return b"".join([tag.encode(), len(text).to_bytes(_SIZE, "big"), text, *tensors])


def unpack(message: bytes, *kinds: type[Any]) -> Any:
    """Return the value of `pack`.

    Args:
        message: The bytes.
        kinds: Dataclasses that it may hold; their sequences are tuples then.
    """
    known = {kind.__name__: kind for kind in kinds}
    tag, first = message[:_TAG].decode(), _TAG + _SIZE
    place = first + int.from_bytes(message[_TAG:first], "big")
    text = message[first:place]

    def made(found: dict[str, Any]) -> Any:
        nonlocal place
        kind = found.pop(tag, None)
        if kind is None:
            return found
        if kind == "bytes":
            return bytes.fromhex(found["hex"])
        if kind == "Tensor":
            empty = torch.empty(found["shape"], dtype=getattr(torch, found["dtype"]))
            size = empty.numel() * empty.element_size()
            raw = bytearray(message[place : place + size])
            place += size
            return torch.frombuffer(raw, dtype=empty.dtype).view(empty.shape) if raw else empty
        tuples = {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}
        return known[kind](**tuples)

    return json.loads(text, object_hook=made)
