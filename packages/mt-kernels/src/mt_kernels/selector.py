"""A selector: the choice that one module makes and keeps."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import torch

from mt_kernels.candidate import Candidate, Choice
from mt_kernels.registry import AUTO, Registry

F = TypeVar("F")


class Operand(Protocol):
    """A tensor, or another value with a device and a dtype, such as a quantised tensor."""

    @property
    def device(self) -> torch.device:
        """Device of the data."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        ...


class Selector(Generic[F]):
    """A module's choice, repeated only when the device, dtype, `key` or mode changes.

    Args:
        registry: The candidates.
        name: `auto`, or the name of a candidate.

    Raises:
        KernelError: No candidate has this name.

    Example:
        >>> registry = Registry("double", (Candidate("plain", lambda x: 2 * x),))
        >>> double = Selector(registry)
        >>> double.find(x := torch.ones(2)).function(x)
        tensor([2., 2.])
    """

    def __init__(self, registry: Registry[F], name: str = AUTO) -> None:
        if name != AUTO:  # an entry point is read here, and not while a compiler traces
            named = registry.get(name)
            if named not in registry.candidates:
                registry = registry.with_candidate(named)
        self.registry, self.name = registry, name
        self._key: object = None
        self._found: Candidate[F] | None = None

    def find(self, x: Operand, *args: Any, key: object = None) -> Candidate[F]:
        """Return the candidate for some arguments.

        Args:
            x: A tensor with the device and dtype; also the first argument of obstacles.
            args: The other arguments of obstacles, used only when a search is made.
            key: A value for everything else that obstacles depend on; a new value starts a search.

        Raises:
            KernelError: As of `Registry.find`.
        """
        # A compiled graph holds the candidate, so it is searched for once, while tracing. A value
        # kept on the module would be a side effect there, and a guard that fails at the next call.
        if torch.compiler.is_compiling():
            return self.registry.find(self.name, x, *args)
        now = (x.device, x.dtype, key)
        if self._found is None or now != self._key:
            self._found, self._key = self.registry.find(self.name, x, *args), now
        return self._found

    def choose(self, x: Operand, *args: Any) -> Choice[F]:
        """Return the choice for some arguments with its reasons, to print it."""
        return self.registry.choose(self.name, x, *args)
