"""Detection of the host's waits for a device, without a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mt_testing.place import caller

_STAND_IN = 1  # value of an unknown number; positive, so that a norm clips
_NUMBERS = ("aten::_local_scalar_dense", "aten::item")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from")


@dataclass(frozen=True, kw_only=True)
class HostSync:
    """One wait of the host for a device.

    Attributes:
        op: The operation of torch, such as `aten::_local_scalar_dense`.
        file: The innermost file outside torch that called it; in the backward of an operation of
            torch, the file that called backward.
        line: The line in that file.
    """

    op: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.op}"


class HostSyncs(TorchDispatchMode):
    """Collect the operations that make the host wait for a device, using tensors without data.

    The host waits when Python needs a number or a truth value (`item()`, `tolist()`, `if tensor:`),
    when the shape of a result depends on values (`nonzero()`, indexing with a mask), and when a
    copy between device and host is not `non_blocking`. Unknown numbers are 1, so that the program
    continues. Use tensors on `meta`, for forward and backward, or fake tensors on `cuda`
    (`torch._subclasses.FakeTensorMode`, entered first), whose backward torch refuses without a
    device. Iterating returns the waits in order.

    Waits inside a kernel are not seen. `tolist()` is one wait on `meta`, as on a device, but one
    for each element of a fake tensor. A result of unknown shape raises torch's error, after its
    wait is recorded. Pinning returns the tensor unchanged.

    Args:
        device: The type of the device.

    Example:
        >>> x = torch.ones(3, device="meta")
        >>> with HostSyncs("meta") as syncs:
        ...     _ = x.sum() * 2
        ...     value = x.sum().item()
        >>> [sync.op for sync in syncs]
        ['aten::_local_scalar_dense']
    """

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self._device, self._found = device, list[HostSync]()

    def __iter__(self) -> Iterator[HostSync]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __str__(self) -> str:
        return "\n".join(str(sync) for sync in self._found) or "no wait for the device"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record a wait, and run the operation."""
        kwargs, name = dict(kwargs or {}), func._schema.name
        if self._waits(func, name, args, kwargs):
            file, line = caller(__file__)
            self._found.append(HostSync(op=name, file=file, line=line))
        if torch.Tag.data_dependent_output in func.tags and self._lacks_data(args[0]):
            return _number(args[0].dtype) if name in _NUMBERS else True
        if name == "aten::_pin_memory":  # fake tensors have no rule for it
            return args[0]
        if name == "aten::_to_copy" and args[0].is_meta:
            target = torch.device(kwargs.get("device") or "meta")
            if target.type != "meta":  # torch has no values to copy
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.full(args[0].shape, _STAND_IN, dtype=dtype, device=target)
        return func(*args, **kwargs)

    @staticmethod
    def _lacks_data(x: Any) -> bool:
        from torch._subclasses.fake_tensor import FakeTensor

        return isinstance(x, FakeTensor) or (isinstance(x, Tensor) and x.is_meta)

    def _waits(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = [x.device.type == self._device for x in tensors]
        if name in _COPIES:
            target = kwargs.get("device")
            if name == "aten::_to_copy":
                here.append(
                    here[0] if target is None else torch.device(target).type == self._device
                )
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            return blocking and any(here) and not all(here)
        if not any(here):
            return False
        if name in _INDEXED:
            masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
            # A single value is written by masked_fill, which does not wait.
            return bool(masks) and (name == "aten::index" or args[2].numel() != 1)
        if name == "aten::repeat_interleave":
            return kwargs.get("output_size") is None
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        return any(tag in func.tags for tag in tags)


def _number(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return bool(_STAND_IN)
    return float(_STAND_IN) if dtype.is_floating_point else _STAND_IN
