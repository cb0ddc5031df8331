"""Recomputation of a layer's activations in backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
    """Return `second(first(*inputs))`; free the output of `first` and recompute it in backward.

    Args:
        first: Cheap function, such as a norm or an activation.
        second: Function that keeps its input for backward, such as a linear layer; it may return
            losses too.
        inputs: Inputs of `first`.
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
    """Run `function(*inputs, shared=shared)`; keep only its inputs, and run it again in backward.

    Args:
        function: Function that returns a tensor, or a tensor and losses by name.
        inputs: Tensors that need a gradient, except parameters and tensors of `shared`.
        shared: Context of the pass; left out where there is none.
        group: Ranks on which the first input is equal; each keeps a share of it.
        when: False runs the function without recomputation.
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
    """The recomputed forward of a module."""

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
    """Whether backward recomputes a module by itself."""
    return isinstance(module.forward, _MadeAgain)


def recompute_modules(layer: nn.Module, patterns: Collection[str]) -> None:
    """Make the modules of a layer that a pattern names keep only their inputs."""
    outer: list[str] = []
    for name, module in layer.named_modules():
        if not name or not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        if not any(name.startswith(f"{other}.") for other in outer):  # runs again with the other
            outer.append(name)
            module.forward = _MadeAgain(module)
