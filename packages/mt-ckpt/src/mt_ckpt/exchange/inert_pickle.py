"""Pickles that describe tensors, read without importing or running anything that they name.

A pickle is a program: it names classes and functions, and calls them. This reader gives it
stand-ins that only keep their arguments, and refuses every name that is not needed to rebuild
tensors.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from mt_files import shorten

from mt_ckpt.error import CheckpointError

_MAX_NAMES = 1 << 10  # classes and functions; each becomes a class here
# Objects of these modules and classes become a `Record`, whatever they are.
_INERT = re.compile(
    r"(torch\.distributed\.(checkpoint|_shard)\.|megatron\.).*"
    r"|argparse\.Namespace|pathlib\.(Pure)?(Posix)?Path|datetime\.timedelta"
)
_STORAGE = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_MALFORMED = (
    *(pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, EOFError),
    *(OverflowError, MemoryError, RecursionError, NotImplementedError, ImportError, struct.error),
)


class Record:
    """An object of a pickle, without any of its code.

    Attributes:
        kind: Name of its class.
        args: Arguments of its constructor.
        state: Its fields by name, or its state in another form.
    """

    kind = ""

    def __new__(cls, *args: Any) -> Record:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    args: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, kind: type) -> Any:
        """Return a field.

        Raises:
            TypeError: The field is missing, or has another type.
        """
        value = self.state.get(name) if isinstance(self.state, dict) else None
        if not isinstance(value, kind):
            what = self.kind.rpartition(".")[2]
            raise TypeError(f"{shorten(what)} has no {name} of {kind.__name__}")
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredView:
    """A tensor as a view of a storage.

    Attributes:
        dtype: Dtype of the elements.
        key: Name of the storage.
        start: Index of the first element in it.
        shape: Shape of the tensor.
        strides: Distance of neighbours in each dim, in elements.
    """

    dtype: torch.dtype
    key: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __setstate__(self, state: object) -> None:
        raise ValueError("it changes a tensor")


class _Call:
    """A stand-in for a function, which a pickle can't change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: object) -> None:
        raise ValueError("it changes a function")


_KEYS = (str, bytes, int, float, type(None), torch.dtype, Record)
_KEY_PLACES = {  # places of the keys on the stack, for operations on mappings and sets
    pickle.SETITEM: slice(-2, -1),
    pickle.SETITEMS: slice(None, None, 2),
    pickle.DICT: slice(None, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}


def _with_keys(load: Callable[[Any], None], place: slice) -> Callable[[Any], None]:
    """Return an operation of an unpickler with a check of its keys before it."""

    def checked(reader: Any) -> None:
        for key in reader.stack[place]:
            parts = key if isinstance(key, tuple) else (key,)
            if not all(isinstance(part, _KEYS) for part in parts):
                raise ValueError("a key is no plain value")
        load(reader)

    return checked


class _Reader(pickle._Unpickler):
    """An unpickler without imports.

    It extends the unpickler in Python, since the one in C allocates as much as a forged memo index
    asks for. A key is one value or a tuple of values, since the hash of nested tuples can take
    forever.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    for _code, _place in _KEY_PLACES.items():
        dispatch[_code[0]] = _with_keys(dispatch[_code[0]], _place)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._kinds: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a class or function that a pickle names."""
        full = f"{module}.{name}"
        if full not in self._kinds:
            if len(self._kinds) == _MAX_NAMES:
                raise ValueError(f"it names more than {_MAX_NAMES} classes")
            self._kinds[full] = _stand_in(full)
        return self._kinds[full]

    def persistent_load(self, pid: Any) -> tuple[torch.dtype | None, str]:
        """Return dtype and key of a storage."""
        match pid:
            case ("storage", dtype, str(key), str(), int()):
                return dtype, key
        raise ValueError("a reference is no storage")


def read_pickle(content: bytes, *, name: str) -> Any:
    """Return the content of a pickle: plain values, `Record`s, and `StoredView`s for tensors.

    Args:
        content: The pickle.
        name: Its name in messages.

    Raises:
        CheckpointError: The pickle names something else, or is damaged. Nothing of it was run.
    """
    try:
        return _Reader(io.BytesIO(content)).load()
    except _RefusedError as error:
        raise CheckpointError(
            f"{name}: its pickle names {error}, which is not needed for tensors, so the file is "
            "refused, and nothing of it was run. If you trust it, load it where it was made, and "
            "save its tensors as safetensors",
            file=name,
        ) from None
    except _MALFORMED as error:
        raise CheckpointError(
            f"{name}: is no pickle that describes tensors: {error}; restore it from a copy",
            file=name,
        ) from error


class _RefusedError(Exception):
    """A pickle names something else."""


def _stand_in(full: str) -> Any:
    module, _, name = full.rpartition(".")
    if full in _CALLS:
        return _Call(_CALLS[full])
    if module == "torch" and name in _STORAGE:
        return _STORAGE[name]
    if full == "torch.storage.UntypedStorage":
        return None
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    if _INERT.fullmatch(full):
        return type("Record", (Record,), {"kind": full})
    raise _RefusedError(shorten(full, 200))


def _tensor(storage: Any, start: int, shape: Any, strides: Any, *_: Any) -> StoredView:
    dtype, key = storage
    return _view(dtype, key, start, shape, strides)


def _tensor_of_dtype(storage: Any, start: int, shape: Any, strides: Any, *rest: Any) -> StoredView:
    return _view(rest[2], storage[1], start, shape, strides)


def _view(dtype: Any, key: Any, start: Any, shape: Any, strides: Any) -> StoredView:
    sizes = (start, *shape, *strides)
    if not isinstance(dtype, torch.dtype) or not all(
        type(size) is int and 0 <= size < 1 << 62 for size in sizes
    ):
        raise ValueError("a tensor has no sizes")
    if len(shape) != len(strides):
        raise ValueError("a tensor has other strides than dims")
    return StoredView(dtype=dtype, key=key, start=start, shape=tuple(shape), strides=tuple(strides))


def _plain_dict(*items: Any) -> dict[Any, Any]:
    if items not in ((), ([],)):
        raise ValueError("an ordered dict has arguments")
    return {}


_CALLS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _plain_dict,
    "torch.Size": lambda sizes: tuple(sizes),
    "torch.serialization._get_layout": lambda name: str(shorten(name)),
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
}
