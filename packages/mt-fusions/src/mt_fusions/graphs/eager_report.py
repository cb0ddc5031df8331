"""Saying, once, why something does not run as a graph."""

from __future__ import annotations

from collections.abc import Callable

from mt_fusions.graphs.tape import GraphError


class EagerReport:
    """Hands on each reason once, or raises it.

    Args:
        name: Name of the callable.
        on_eager: Called with a reason; None raises it.
    """

    def __init__(self, name: str, on_eager: Callable[[str], object] | None) -> None:
        self._name, self._on_eager, self._told = name, on_eager, set[str]()

    def __call__(self, reason: str) -> None:
        """State a reason.

        Raises:
            GraphError: There is nobody to state it to.
        """
        if self._on_eager is None:
            raise GraphError(
                f"{self._name} can't run as a CUDA graph: {reason}; or give on_eager, such as "
                "print, to be told once and run it as it is"
            )
        if reason not in self._told:
            self._told.add(reason)
            self._on_eager(f"{self._name} runs eagerly: {reason}")
