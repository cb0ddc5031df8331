"""Moves functions to ranks and their results back."""

from __future__ import annotations

import importlib.machinery
import io
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cloudpickle

__all__ = ["dump_call", "dump_result"]

_REGISTRY_LOCK = threading.Lock()  # cloudpickle's registry of by-value modules is process-wide


def dump_call(fn: Any, args: tuple[Any, ...]) -> bytes:
    """Serialise a call so that a process that never saw the test module can run it.

    The module that defines `fn`, and its neighbours in the same folder, travel by value unless a
    rank can import them itself.

    Raises:
        TypeError: `fn` or an argument cannot be serialised.
    """
    with _by_value(_modules_beside(fn)):
        try:
            return cloudpickle.dumps((fn, args))
        except Exception as error:
            name = getattr(fn, "__qualname__", repr(fn))
            raise TypeError(
                f"cannot send {name} to the ranks: {error}. It, its arguments and what it closes "
                "over must be picklable; create process groups, locks and open files inside it"
            ) from error


def dump_result(value: object) -> bytes:
    """Serialise a result; tensors on an accelerator are sent as CPU tensors."""
    import torch

    class _Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
                return obj.detach().cpu().__reduce_ex__(2)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    with _REGISTRY_LOCK:
        registered = cloudpickle.list_registry_pickle_by_value()
        mine = [module for module in modules if module.__name__ not in registered]
        for module in mine:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in mine:
                cloudpickle.unregister_pickle_by_value(module)


def _modules_beside(fn: Any) -> list[ModuleType]:
    while hasattr(fn, "func"):  # functools.partial
        fn = fn.func
    home = sys.modules.get(getattr(fn, "__module__", None) or "")
    path = getattr(home, "__file__", None)
    if home is None or path is None or _is_importable(home):
        return []
    folder = os.path.dirname(os.path.abspath(path))
    return [
        module
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        and os.path.dirname(getattr(module, "__file__", None) or "") == folder
        and sys.modules.get(module.__name__) is module
        and module.__name__ != "__main__"
    ]


def _is_importable(module: ModuleType) -> bool:
    """Whether a rank finds this very module on `sys.path`, as part of a regular package."""
    top = sys.modules.get(module.__name__.partition(".")[0])
    path = getattr(top, "__file__", None)
    if top is None or path is None:
        return False
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    if os.path.abspath(path).startswith(installed):
        return True
    if not hasattr(top, "__path__"):  # a single file, such as a test module in prepend mode
        return False
    spec = importlib.machinery.PathFinder.find_spec(top.__name__)
    return spec is not None and spec.origin == path
