"""What a program asks of a device: how many operations, and how many bytes they move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They look at a tensor or make room for one, and start nothing.
_FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_FREE |= {"detach", "lift_fresh", "_unsafe_view", "set_"}


class DeviceWork(TorchDispatchMode):
    """Counts the operations that reach a device inside, and the bytes that they read and write.

    An operation is one that torch's dispatcher gives the device: at least one kernel, and for most
    exactly one; a custom operator is one. Views and new memory count nothing. Bytes are what its
    tensors hold that it reads or writes, each once: what a perfect cache would still move. Tensors
    may be on `meta`, so that a layer's work is known without a device, and as a number that a test
    can hold.

    Args:
        device: The type of the device; None counts what any tensor is asked of.

    Attributes:
        ops: How often each operation was called, by its name such as `aten::mm`.
        bytes: Read and written in all.

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
        """How many operations there were."""
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
    """Return the bytes of each tensor that is read, and of each that is written."""
    found = [_size(x) for x in {id(x): x for x in read}.values()]
    fresh = [x for x in written if all(x is not other for other in read)]
    found += [_size(x) for x in fresh]
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        sizes = [_size(x) for x in tree_leaves(given) if isinstance(x, Tensor)]
        # `out=` is written alone; what is changed in place is read too.
        found += [] if argument.kwarg_only else sizes
    return found


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()
