"""A registry: the candidates of one operation in order of preference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from mt_files import UserError

from mt_kernels.candidate import Candidate, Choice

F = TypeVar("F")

AUTO = "auto"
GROUP = "mt.kernels"


class KernelError(UserError, ValueError):
    """The requested candidate does not exist or cannot serve, or no candidate can."""


@dataclass(frozen=True)
class Registry(Generic[F]):
    """The candidates of one operation, in order of preference.

    `auto` selects the first candidate without an obstacle or a drawback. A name selects that
    candidate or raises; there is no silent fallback. Installed packages add candidates through the
    entry-point group `mt.kernels`, under the key `<operation>.<name>`. They are selected by name
    only, so installing a package never changes what `auto` selects.

    Attributes:
        operation: Name of the operation, in messages and in entry points.
        candidates: Best first; the last one is a plain implementation that always serves.

    Example:
        >>> fast = Candidate("fast", abs, lambda n: "odd" if n % 2 else None)
        >>> registry = Registry("size", (fast, Candidate("plain", abs)))
        >>> [registry.find("auto", n).name for n in (2, 3)]
        ['fast', 'plain']
        >>> print(registry.choose("auto", 3))
        size: plain (the first that serves; not fast: odd)
    """

    operation: str
    candidates: tuple[Candidate[F], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The valid names: `auto`, the candidates here, and the candidates of other packages."""
        own = [candidate.name for candidate in self.candidates]
        return AUTO, *dict.fromkeys((*own, *_entry_points(self.operation)))

    def with_candidate(self, candidate: Candidate[F]) -> Registry[F]:
        """Return a registry that prefers `candidate` to all others, and to one of its name."""
        others = (other for other in self.candidates if other.name != candidate.name)
        return replace(self, candidates=(candidate, *others))

    def get(self, name: str) -> Candidate[F]:
        """Return the candidate with a name, from the registry or from an entry point.

        Raises:
            KernelError: There is no such candidate; the message lists the known names.
        """
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        try:
            return _loaded(self.operation, name)
        except KeyError:
            names = ", ".join(self.names)
            raise KernelError(
                f"kernel of {self.operation} must be one of {names}, got {name!r}"
            ) from None

    def find(self, name: str, *args: Any) -> Candidate[F]:
        """Return the candidate of a name, or for `auto` the first without obstacle and drawback.

        Args:
            name: `auto`, or the name of a candidate.
            args: What obstacles and drawbacks depend on.

        Raises:
            KernelError: The named candidate does not exist or does not serve, or none serves; the
                message has the reasons.
        """
        if name == AUTO:
            for candidate in self.candidates:
                if candidate.obstacle(*args) is None and candidate.drawback(*args) is None:
                    return candidate
            reasons = "; ".join(f"{name}: {why}" for name, why in self._passed_over(*args))
            raise KernelError(f"no kernel of {self.operation} serves ({reasons})")
        candidate = self.get(name)
        why = candidate.obstacle(*args)
        if why is None:
            return candidate
        serving = [c.name for c in self.candidates if c.obstacle(*args) is None]
        way_out = f"use {', '.join((AUTO, *serving))}" if serving else "none of the others does"
        raise KernelError(f"kernel {name!r} of {self.operation} does not serve: {why}; {way_out}")

    def choose(self, name: str, *args: Any) -> Choice[F]:
        """Return the candidate that `find` selects, with the reasons."""
        candidate = self.find(name, *args)
        if name != AUTO:
            return Choice(self.operation, candidate, "asked for")
        others = tuple(x for x in self._passed_over(*args) if x[0] != candidate.name)
        return Choice(self.operation, candidate, "the first that serves", others)

    def obstacles(self, *args: Any) -> dict[str, str | None]:
        """Return the obstacle of each candidate for some arguments, None where it serves."""
        return {candidate.name: candidate.obstacle(*args) for candidate in self.candidates}

    def _passed_over(self, *args: Any) -> list[tuple[str, str]]:
        found = ((c.name, c.obstacle(*args) or c.drawback(*args)) for c in self.candidates)
        return [(name, why) for name, why in found if why is not None]


def _entry_points(operation: str) -> dict[str, EntryPoint]:
    prefix = f"{operation}."
    found = entry_points(group=GROUP)
    return {x.name.removeprefix(prefix): x for x in found if x.name.startswith(prefix)}


@cache  # of what is found: reading all installed packages takes milliseconds
def _loaded(operation: str, name: str) -> Candidate[Any]:
    entry = _entry_points(operation)[name]
    candidate = entry.load()
    if not isinstance(candidate, Candidate) or candidate.name != name:
        raise KernelError(
            f"entry point {entry.name} of group {GROUP} must be a Candidate named {name!r}, "
            f"got {candidate!r} from {entry.value}"
        )
    return candidate
