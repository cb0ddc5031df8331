"""Candidates for one piece of work, of which the first that can serve is taken, or a named one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

AUTO = "auto"


class Candidate(Protocol):
    """One way to do a piece of work."""

    @property
    def name(self) -> str:
        """In messages, and to ask for it."""
        ...

    def obstacle(self, *args: Any, **kwargs: Any) -> str | None:
        """Return why it can't serve these arguments; None where it serves."""
        ...


C = TypeVar("C", bound=Candidate)


def kernel_for(kernels: Sequence[C], name: str, *args: Any) -> C:
    """Return the kernel of a name, or for "auto" the first that serves some arguments.

    Raises:
        ValueError: There is none of this name; or it does not serve, and the message says why and
            which do; or none serves, and the message has each one's reason.

    Example:
        >>> from types import SimpleNamespace
        >>> fast = SimpleNamespace(name="fast", obstacle=lambda n: "odd" if n % 2 else None)
        >>> plain = SimpleNamespace(name="plain", obstacle=lambda n: None)
        >>> [kernel_for((fast, plain), "auto", n).name for n in (2, 3)]
        ['fast', 'plain']
    """
    if name != AUTO:
        return _named(kernels, name, *args)
    reasons: list[str] = []
    for kernel in kernels:
        why = kernel.obstacle(*args)
        if why is None:
            return kernel
        reasons.append(f"{kernel.name}: {why}")
    raise ValueError(f"no kernel serves this ({'; '.join(reasons)}); add a plain one")


def _named(kernels: Sequence[C], name: str, *args: Any) -> C:
    named = {kernel.name: kernel for kernel in kernels}
    if name not in named:
        raise ValueError(f"kernel must be one of {', '.join((AUTO, *named))}, got {name!r}")
    why = named[name].obstacle(*args)
    if why is None:
        return named[name]
    others = [kernel.name for kernel in kernels if kernel.obstacle(*args) is None]
    way_out = f"use {', '.join((AUTO, *others))}" if others else "none of the others does"
    raise ValueError(f"kernel {name!r} does not serve: {why}; {way_out}")
