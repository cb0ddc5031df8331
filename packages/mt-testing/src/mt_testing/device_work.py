"""Counts of a program's device operations, and of the bytes that they move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that only inspect or allocate a tensor start no kernel.
_FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_FREE |= {"detach", "lift_fresh", "_unsafe_view", "set_"}


class DeviceWork(TorchDispatchMode):
    """Count the operations that a block gives a device, and the bytes that they read and write.

    An operation is a call of torch's dispatcher: at least one kernel, and mostly exactly one; a
    custom operator is one operation. Views and allocations do not count. Bytes are the sizes of all
    tensors that an operation reads or writes, each once, as if the cache were perfect. Tensors may
    be on `meta`, so that a test can bound a layer's work without a device.

    Args:
        device: The type of the device; None counts the operations of all devices.

    Attributes:
        ops: Number of calls of each operation, by name, such as `aten::mm`.
        bytes: Total number of bytes read and written.

    Example:
        >>> x = torch.ones(4, device="meta")
        >>> with DeviceWork() as work:
        ...     _ = (x.view(2, 2) + 1).sum()
        >>> dict(work.ops), work.bytes
        ({'aten::add': 1, 'aten::sum': 1}, 52)
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self._device = device
        self.ops: Counter[str] = Counter()
        self.bytes = 0

    @property
    def count(self) -> int:
        """Total number of operations."""
        return self.ops.total()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count it."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not func.is_view and name.partition("::")[2] not in _FREE:
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            if any(self._device in (None, x.device.type) for x in (*read, *written)):
                self.ops[name] += 1
                self.bytes += sum(_moved(func._schema, args, kwargs or {}, read, written))
        return result


def _moved(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: list[Any], written: list[Any]
) -> list[int]:
    """Return the sizes in bytes of the tensors read and written."""
    found = [_size(x) for x in {id(x): x for x in read}.values()]
    fresh = [x for x in written if all(x is not other for other in read)]
    found += [_size(x) for x in fresh]
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        sizes = [_size(x) for x in tree_leaves(given) if isinstance(x, Tensor)]
        # An `out=` tensor is only written; a tensor changed in place is also read.
        found += [] if argument.kwarg_only else sizes
    return found


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()
