"""Activations of a layer that are computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar, cast

import torch
from mt_parallel_state import Group
from mt_tensor_parallel import DiscardedOutput, recompute
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mt_model.attend.context import ForwardContext

Output = TypeVar("Output", bound=Tensor | tuple[Tensor, Mapping[str, Tensor]])


def discard_between(
    first: Callable[..., Tensor], second: Callable[[Tensor], Output], *inputs: Tensor
) -> Output:
    """`second(first(*inputs))` that frees the output of `first` and makes it again in backward.

    Args:
        first: cheap, such as a norm or an activation.
        second: keeps its input for backward, as a linear layer does; may return losses too.
        inputs: of `first`.
    """
    return discard_between_all(first, (second,), *inputs)[0]


def discard_between_all(
    first: Callable[..., Tensor], readers: Sequence[Callable[[Tensor], Output]], *inputs: Tensor
) -> list[Output]:
    """`discard_between` with several functions that read the output of `first`."""
    if not torch.is_grad_enabled():
        between = first(*inputs)
        return [reader(between) for reader in readers]
    discarded = DiscardedOutput()
    between = discarded.run(first, *inputs)
    outputs = [reader(between) for reader in readers]
    discarded.discard(*(y for y in tree_leaves(outputs) if isinstance(y, Tensor)))
    return outputs


def recomputed(
    function: Callable[..., Output],
    *inputs: Tensor,
    shared: ForwardContext | None = None,
    group: Group = None,
    when: bool = True,
) -> Output:
    """`function(*inputs, shared=shared)` that keeps its inputs only, and is run again in backward.

    Args:
        function: returns a tensor, or that and losses by name.
        inputs: all that needs a gradient, but parameters and what is in `shared`.
        shared: what the layers of the pass share; left out where there is none.
        group: ranks on which the first input is equal, and which share the keeping of it.
        when: False runs it as it is.
    """

    def run(*given: Tensor) -> Output:
        if shared is None:
            return function(*given)
        own, tensors = given[: len(inputs)], given[len(inputs) :]
        return function(*own, shared=shared.with_tensors(tensors))

    others = [] if shared is None else shared.tensors()
    if not when or not torch.is_grad_enabled():
        return function(*inputs) if shared is None else function(*inputs, shared=shared)
    names: list[str] | None = None

    def as_tensors(*given: Tensor) -> tuple[Tensor, ...]:
        nonlocal names
        output = run(*given)
        if isinstance(output, Tensor):
            return (output,)
        names = list(output[1])
        return output[0], *output[1].values()

    y, *losses = recompute(as_tensors, *inputs, *others, group=group)
    if names is None:
        return cast("Output", y)
    return cast("Output", (y, dict(zip(names, losses, strict=True))))


class _MadeAgain:
    """The forward of a module that is run again in backward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *inputs: Tensor, **others: Any) -> Any:
        forward = partial(type(self._module).forward, self._module)
        tensors = {name: x for name, x in others.items() if isinstance(x, Tensor)}
        fixed = {name: x for name, x in others.items() if name not in (*tensors, "shared")}

        def run(*given: Tensor, **shared: ForwardContext) -> Any:
            named = dict(zip(tensors, given[len(inputs) :], strict=True))
            return forward(*given[: len(inputs)], **named, **fixed, **shared)

        return recomputed(run, *inputs, *tensors.values(), shared=others.get("shared"))


def is_recomputed(module: nn.Module) -> bool:
    """Whether backward runs a module again for itself."""
    return isinstance(module.forward, _MadeAgain)


def recompute_modules(layer: nn.Module, patterns: Iterable[str]) -> set[str]:
    """Have those modules in a layer keep their inputs only that a pattern names.

    Returns:
        The patterns that name one.
    """
    outer: list[str] = []
    used: set[str] = set()
    patterns = set(patterns)
    for name, module in layer.named_modules():
        found = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
        if not name or not found:
            continue
        used |= found
        if not any(name.startswith(f"{other}.") for other in outer):  # runs again with the other
            outer.append(name)
            module.forward = _MadeAgain(module)
    return used
