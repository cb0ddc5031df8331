"""What a callable does to tensors, operation by operation, for who replays it without Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mt_files import UserError
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TORCH = str(Path(torch.__file__).parent)
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_copy_from")
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)

Sources = Mapping[int, str]
"""Names of memory that was there before, by address."""


class GraphError(UserError, RuntimeError):
    """A captured graph would not compute the same as the callable."""


@dataclass(frozen=True)
class Operation:
    """One operation, without its results.

    Attributes:
        name: torch's, such as `aten::mul`.
        arguments: What it was called with; tensors by where they come from, and their form.
        place: File and line that called it.
    """

    name: str
    arguments: tuple[Any, ...]
    place: str


@dataclass(kw_only=True)
class Script:
    """What a callable did when it was recorded.

    Attributes:
        operations: In their order.
        outside: Addresses of the memory they read or write that they did not make.
        obstacle: Why they can't be captured; None if they can.
    """

    operations: list[Operation] = field(default_factory=list)
    outside: set[int] = field(default_factory=set)
    obstacle: str | None = None


def address(x: Tensor) -> int:
    """Return where the memory of a tensor begins, whatever part of it this is."""
    return x.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):
    """A recording of operations, and the check of a later run against it.

    A later run of the callable must call the same operations, with the same numbers, on the same
    memory: its inputs, memory from before the run, and results of earlier operations. A CUDA graph
    would not notice any other difference, so it raises `GraphError`.

    Args:
        script: The recording to write, or to compare with.
        name: Name of the callable.
        sources: Names of memory that existed before the run.
        device: Type of the device that the host must not wait for.
        checks: Whether the script is complete.
    """

    def __init__(
        self, script: Script, *, name: str, sources: Sources, device: str, checks: bool = False
    ) -> None:
        super().__init__()
        self._name = name
        self._script, self._sources, self._device, self._checks = script, sources, device, checks
        self._made: dict[int, tuple[str, StorageWeakRef]] = {}
        self._number = 0
        self._communicates = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the block, and check that it covers the whole script.

        Raises:
            GraphError: The run differs from the recording.
        """
        with _Reads(self._stop), self:
            yield
        left = self._script.operations[self._number :]
        if self._checks and left:
            raise GraphError(
                f"{self._name} ended after {self._number} operations, and "
                f"{left[0].name} ({left[0].place}) came next at capture: Python chose another "
                "way, which a CUDA graph can't; make the choice on tensors (torch.where), or a "
                "graph for each way"
            )

    def has_made(self, x: Tensor) -> bool:
        """Return whether the memory of a tensor was allocated by the operations."""
        return self._maker(address(x)) is not None

    def follow(self, before: Tape) -> None:
        """Know the memory that a forward's operations allocated, as long as it is there."""
        self._made = {start: (f"forward's {name}", s) for start, (name, s) in before._made.items()}

    def _maker(self, start: int) -> str | None:
        """Return the source of the memory at an address, or None if it was freed."""
        name, storage = self._made.get(start, ("", None))
        return None if storage is None or storage.expired() else name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operation, and run it."""
        kwargs, name = dict(kwargs or {}), func._schema.name
        leaves = tree_leaves((args, kwargs))
        self._communicates |= func.namespace == "c10d"
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        why = _obstacle(func, args, kwargs, tensors, self._device)
        if why is not None:
            self._stop(f"{name} ({_place()}) {why}")
        used = {address(x) for x in tensors}
        made = tuple(self._described(x) for x in leaves)
        operation = Operation(name, made, "" if self._checks else _place())
        if self._checks:
            self._compare(operation)
        else:
            self._script.operations.append(operation)
            self._script.outside |= {start for start in used if self._maker(start) is None}
        result = func(*args, **kwargs)
        for index, x in enumerate(tree_leaves(result)):
            if isinstance(x, Tensor) and address(x) not in used:
                name = f"result {index} of operation {self._number}"
                self._made[address(x)] = name, StorageWeakRef(x.untyped_storage())
        self._number += 1
        return result

    def _stop(self, why: str) -> None:
        if self._checks:
            raise GraphError(f"{self._name}: {why}, and did not at capture")
        self._script.obstacle = self._script.obstacle or why

    def _described(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            start = address(x)
            where = self._maker(start)
            if where is None and start:
                name = self._sources.get(x.data_ptr()) or self._sources.get(start)
                # gloo has buffers of its own, which the host copies from when it waits.
                unknown = f"memory at {start:#x}, that is not named in state"
                buffer = self._communicates and self._device == "cpu"
                where = name or ("memory of a collective" if buffer else unknown)
            return where, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x.device
        return repr(x) if isinstance(x, _PLAIN) else type(x).__name__

    def _compare(self, now: Operation) -> None:
        number, operations = self._number, self._script.operations
        if number == len(operations):
            raise GraphError(
                f"{self._name} goes on with {now.name} ({_place()}) after the {number} operations "
                "that were captured: Python chose another way, which a CUDA graph can't"
            )
        then = operations[number]
        if now.name != then.name or len(now.arguments) != len(then.arguments):
            raise GraphError(
                f"{self._name}: operation {number} is {now.name} ({_place()}), and was {then.name} "
                f"({then.place}) at capture: Python chose another way, which a CUDA graph can't; "
                "make the choice on tensors (torch.where), or a graph for each way"
            )
        for index, (own, old) in enumerate(zip(now.arguments, then.arguments, strict=True)):
            if own != old:
                raise GraphError(
                    f"{self._name}: argument {index} of operation {number}, {now.name} "
                    f"({_place()}), {_told(own, old)}"
                )


class _Reads(TorchFunctionMode):
    """Notices who reads a tensor's values past torch's operations, as a CPU allows."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        super().__init__()
        self._stop = stop

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._stop(f"{func.__name__}() ({_place()}) has the host read a tensor")
        return func(*args, **(kwargs or {}))


def _told(own: Any, old: Any) -> str:
    if not isinstance(own, tuple) or not isinstance(old, tuple):
        return (
            f"is {own}, and was {old} at capture: a value of Python is baked into a CUDA graph; "
            "give what changes as a tensor"
        )
    if own[0] != old[0]:
        return (
            f"is {own[0]}, and was {old[0]} at capture: a CUDA graph goes on with the old memory; "
            "write into it in place (copy_), or give the tensor as an input"
        )
    return f"has shape {list(own[2])} and strides {own[3]}, and had {list(old[2])} and {old[3]}"


def _obstacle(
    func: Any, args: Any, kwargs: Mapping[str, Any], tensors: Sequence[Tensor], device: str
) -> str | None:
    """Return why an operation has no place in a graph; None if it has."""
    name, tags = func._schema.name, func.tags
    here = [x.device.type == device for x in tensors]
    if name == "aten::lift_fresh":
        return "makes a tensor of Python's values, which are baked in; make it outside"
    if torch.Tag.nondeterministic_seeded in tags and _draws(func, args, kwargs):
        return (
            "draws from a generator; use counters that are given as a tensor "
            "(mt_parallel_state.random_uniform)"
        )
    if name in _COPIES:
        target = kwargs.get("device")
        if name == "aten::_to_copy":
            here.append(here[0] if target is None else torch.device(target).type == device)
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        return "has the host wait for a copy" if blocking and any(here) != all(here) else None
    if name in _INDEXED:
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        one = name != "aten::index" and args[2].numel() == 1  # masked_fill writes it
        return "has the host read a mask" if masks and not one else None
    if name == "aten::repeat_interleave":
        return None if kwargs.get("output_size") is not None else "has the host read a size"
    read = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    if any(here) and any(tag in tags for tag in read):
        return "has the host read a tensor"
    return _uncaptured(func, args) if device == "cuda" and func.namespace == "c10d" else None


def _draws(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers: attention does so where it drops something."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    defaults = {a.name: a.default_value for a in func._schema.arguments}
    return bool(given.get("dropout_p", defaults.get("dropout_p", 1)))


def _uncaptured(func: Any, args: Any) -> str | None:
    """Return why a collective can't be captured: only NCCL's are kernels."""
    for x in tree_leaves(args):
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            group = torch.distributed.ProcessGroup.unbox(x)
            backend = group._get_backend(torch.device("cuda")).name()
            if "nccl" not in backend:
                return f"communicates through {backend}, on the host; use NCCL"
    return None


def _place() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH)
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
