"""Named random streams: one generator state per purpose, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["RngStreams"]


class RngStreams:
    """Random streams that do not disturb each other.

    Dropout inside a tensor-parallel region must differ over its ranks, outside it must not. With a
    stream for each (seeded by `mt_parallel_state.stream_key(seed, name, tp=rank)` and
    `stream_key(seed, name)`) the order in which they are used does not matter. An ordinary
    object: a process may hold as many as it likes.

    Args:
        device: Whose default generator the streams stand in for.

    Example:
        >>> streams = RngStreams()
        >>> streams.add("inside", 7)
        >>> with streams.use("inside"):
        ...     first = torch.rand(1)
        >>> with streams.use("inside"):
        ...     torch.equal(first, torch.rand(1))
        False
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._states: dict[str, Tensor] = {}
        self._seeds: dict[int, str] = {}
        self._used: set[str] = set()

    def add(self, name: str, seed: int) -> None:
        """Make a stream.

        Raises:
            ValueError: The name or the seed is taken: two streams would be one.
        """
        if name in self._states:
            raise ValueError(f"there is a stream {name!r} already; choose another name")
        if seed in self._seeds:
            raise ValueError(
                f"seed {seed} is that of stream {self._seeds[seed]!r}: the two would be equal; use "
                "mt_parallel_state.stream_key(seed, name, ...)"
            )
        self._seeds[seed] = name
        generator = torch.Generator(device=self.device).manual_seed(seed)
        self._states[name] = generator.get_state()

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Draw from the stream inside the block; the default generator goes on after it.

        Raises:
            KeyError: There is no such stream.
            RuntimeError: The stream is in use: its numbers would be drawn twice.
        """
        if name in self._used:
            raise RuntimeError(
                f"random stream {name!r} is in use already; take another inside, or draw directly"
            )
        if name not in self._states:
            known = ", ".join(sorted(self._states)) or "none"
            raise KeyError(f"there is no random stream {name!r}; known: {known}")
        before = self.default_state()
        self.set_default_state(self._states[name])
        self._used.add(name)
        try:
            yield
        finally:
            self._used.remove(name)
            self._states[name] = self.default_state()
            self.set_default_state(before)

    def default_state(self) -> Tensor:
        """The state of the device's default generator."""
        if self.device.type == "cuda":
            return torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state()

    def set_default_state(self, state: Tensor) -> None:
        """Put the device's default generator into a state."""
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def state_dict(self) -> dict[str, Tensor]:
        """The state of every stream, as uint8 tensors."""
        return {name: state.clone() for name, state in self._states.items()}

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Put the streams into saved states.

        Raises:
            ValueError: The names are not those of this object's streams.
        """
        if states.keys() != self._states.keys():
            raise ValueError(
                f"the saved streams are {sorted(states)}, this object's {sorted(self._states)}; "
                "add the same streams first"
            )
        self._states = {name: state.clone() for name, state in states.items()}
