"""Tensors that a graph finds where they were when it was captured."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

from torch import Tensor, nn

from mt_fusions.graphs.tape import Tape, address

State: TypeAlias = nn.Module | Mapping[str, Tensor] | None
"""A module, whose parameters, gradients and buffers a callable uses; or tensors by name."""

_Form: TypeAlias = tuple[object, ...]


def tensors_of(state: State) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state by name, as they are now."""
    if isinstance(state, nn.Module):
        yield from state.named_parameters()
        yield from state.named_buffers()
    elif state is not None:
        yield from state.items()


class Held:
    """The addresses of a state and of its gradients, noted at capture and looked at before replays.

    Args:
        state: The held tensors.
        gradients: Whether gradients are held too; else autograd keeps them, outside of the graph.
    """

    def __init__(self, state: State, *, gradients: bool) -> None:
        self._state, self._has_gradients = state, gradients
        self._forms: dict[str, _Form] = {}
        self._before: dict[str, _Form | None] = {}
        self._after: dict[str, Tensor] = {}

    def names(self) -> dict[int, str]:
        """Names by address; gradients too."""
        found: dict[int, str] = {}
        for name, x in tensors_of(self._state):
            found.setdefault(x.data_ptr(), name)
            if x.grad is not None:
                found.setdefault(x.grad.data_ptr(), f"the gradient of {name}")
        return found

    def note(self) -> None:
        """Note where everything is, before the capture."""
        self._forms = {name: _form(x) for name, x in tensors_of(self._state)}
        self._before = {
            name: None if x.grad is None else _form(x.grad) for name, x in tensors_of(self._state)
        }

    def note_gradients(self) -> None:
        """Note what gradients there are after the capture: replays write them."""
        self._after = {n: x.grad for n, x in tensors_of(self._state) if x.grad is not None}

    def moved(self, used: Collection[int]) -> str | None:
        """Name what is not where it was; None if all is.

        Args:
            used: Addresses that the capture read or wrote.
        """
        now = dict(tensors_of(self._state))
        for name, then in self._forms.items():
            if then[0] in used and (name not in now or _form(now[name]) != then):
                return f"{name} is not where it was at capture; write into it in place (copy_)"
        for name, x in now.items() if self._has_gradients else ():
            then = self._before.get(name)
            if name in self._before and then is None and x.grad is not None:
                return (
                    f"the gradient of {name} was None at capture, and a replay would overwrite "
                    "what it is now; set it to None again, or capture with gradients that are there"
                )
            if then is not None and then[0] in used and (x.grad is None or _form(x.grad) != then):
                what = "None" if x.grad is None else "elsewhere"
                return (
                    f"the gradient of {name} is {what}, and a graph adds to where it was; use "
                    "zero_grad(set_to_none=False)"
                )
        return None

    def restore_gradients(self, tape: Tape | None = None) -> None:
        """Have the gradients be those that the capture left, as after a replay.

        Args:
            tape: Tape of the stand-in run; its new gradients are copied into the held ones.
        """
        for name, x in tensors_of(self._state):
            held = self._after.get(name)
            if held is None or x.grad is held:
                continue
            if tape is not None and x.grad is not None and tape.has_made(x.grad):
                held.copy_(x.grad)
            x.grad = held


def _form(x: Tensor) -> _Form:
    return address(x), x.storage_offset(), tuple(x.shape), x.stride(), x.dtype
