"""Serialisation of functions for ranks, and of their results."""

from __future__ import annotations

import importlib.machinery
import io
import os
import sys
import sysconfig
import threading
from types import FunctionType, ModuleType
from typing import IO, Any

import cloudpickle

_INSTALLED = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_REGISTRY_LOCK = threading.Lock()  # cloudpickle's registry of by-value modules is process-wide


def dump_call(fn: Any, args: tuple[Any, ...]) -> bytes:
    """Serialise a call, so that a process without the test module can run it.

    Functions and classes from outside importable packages are sent by value, with the globals that
    they use.

    Raises:
        TypeError: `fn` or an argument cannot be serialised.
    """
    buffer = io.BytesIO()
    with _REGISTRY_LOCK:
        pickler = _CallPickler(buffer)
        try:
            pickler.dump((fn, args))
        except Exception as error:
            name = getattr(fn, "__qualname__", repr(fn))
            raise TypeError(
                f"cannot send {name} to the ranks: {error}. It, its arguments and its closure "
                "must be picklable; create process groups, locks and generators inside it"
            ) from error
        finally:
            for module in pickler.registered:
                cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


def dump_result(value: object) -> bytes:
    """Serialise a result; tensors on an accelerator are sent as CPU tensors."""
    buffer = io.BytesIO()
    _ResultPickler(buffer).dump(value)
    return buffer.getvalue()


class _CallPickler(cloudpickle.Pickler):
    """A pickler that sends by value the functions and classes that a rank could not import."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.registered: list[ModuleType] = []
        self._seen = set(cloudpickle.list_registry_pickle_by_value())

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType):
            self._consider(obj, by_value=not _is_found(obj))
        elif isinstance(obj, (FunctionType, type)):
            module = sys.modules.get(obj.__module__ or "")
            if module is not None:
                self._consider(module, by_value=not _is_found(module, in_package=True))
        return super().reducer_override(obj)

    def _consider(self, module: ModuleType, *, by_value: bool) -> None:
        name = module.__name__
        if by_value and name not in self._seen and sys.modules.get(name) is module:
            self._seen.add(name)
            cloudpickle.register_pickle_by_value(module)
            self.registered.append(module)


class _ResultPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules["torch"]
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(2)
        return super().reducer_override(obj)


def _is_found(module: ModuleType, *, in_package: bool = False) -> bool:
    """Return whether a rank's import would find the same module.

    Args:
        module: The module.
        in_package: Whether to require a package. A single file, such as a test module under
            pytest's prepend mode, then does not count: importing it would run the test file again
            in every rank.
    """
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    path = getattr(top, "__file__", None)
    if path is None:  # built in, or a namespace package: pytest's importlib mode makes such names
        return top.__name__ in sys.builtin_module_names
    if os.path.abspath(path).startswith(_INSTALLED):
        return True
    if in_package and not hasattr(top, "__path__"):
        return False
    spec = importlib.machinery.PathFinder.find_spec(top.__name__)
    return spec is not None and spec.origin == path
