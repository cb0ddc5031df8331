"""Activation recomputation: outputs are computed again in backward instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch
from mt_parallel_state import Group, gather_from_group, group_rank, group_size
from torch import Tensor

Output = TypeVar("Output", Tensor, tuple[Tensor, ...])


class _Surroundings:
    """The state of autocast and of the device's default generator at some point."""

    def __init__(self, device: torch.device) -> None:
        self._gpus = [device] if device.type == "cuda" else []
        self._state = torch.cuda.get_rng_state(device) if self._gpus else torch.get_rng_state()
        self._autocast = torch.autocast(
            device.type,
            dtype=torch.get_autocast_dtype(device.type),
            enabled=torch.is_autocast_enabled(device.type),
        )

    def run_again(self, function: Callable[..., Output], *inputs: Tensor) -> Output:
        """Run the function in the recorded state, with gradients, and restore the present state."""
        with torch.random.fork_rng(self._gpus), torch.enable_grad(), self._autocast:
            if self._gpus:
                torch.cuda.set_rng_state(self._state, *self._gpus)
            else:
                torch.set_rng_state(self._state)
            return function(*inputs)


def _share(x: Tensor, group: Group) -> Tensor:
    """Return this rank's part of a tensor that all ranks of a group hold."""
    ranks = group_size(group)
    if x.numel() % ranks:
        raise ValueError(
            f"an input of shape {tuple(x.shape)} cannot be shared by {ranks} ranks; pass "
            "group=None, or pad it"
        )
    return x if ranks == 1 else x.reshape(-1).chunk(ranks)[group_rank(group)].clone()


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor | tuple[Tensor, ...]],
        group: Group,
        _: Tensor,
        *inputs: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.function = function
        ctx.surroundings = _Surroundings(inputs[0].device)
        ctx.shape, ctx.group = inputs[0].shape, group
        ctx.save_for_backward(_share(inputs[0], group), *inputs[1:])
        output = function(*inputs)
        _as_tensors(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        share, *others = ctx.saved_tensors
        tensors = [gather_from_group(share, ctx.group, dim=0).view(ctx.shape), *others]
        inputs = [
            x.detach().requires_grad_(needed)
            for x, needed in zip(tensors, ctx.needs_input_grad[3:], strict=True)
        ]
        outputs = _as_tensors(ctx.surroundings.run_again(ctx.function, *inputs))
        pairs = zip(outputs, grads, strict=True)
        roots = [(y, grad) for y, grad in pairs if y.requires_grad and grad is not None]
        if roots:
            torch.autograd.backward([y for y, _ in roots], [grad for _, grad in roots])
        return (None, None, None, *(x.grad for x in inputs))


def recompute(function: Callable[..., Output], *inputs: Tensor, group: Group = None) -> Output:
    """Compute `function(*inputs)`, keep only the inputs, and run the function again in backward.

    The second run draws the same random numbers: the state of the device's default generator is
    set back for it and restored after it, and so is autocast's. Parameters used inside get their
    gradients as usual (Chen et al. 2016), also with frozen inputs.

    Args:
        function: A function of tensors that returns a tensor or a tuple of tensors. It depends
            only on its arguments and on random numbers.
        inputs: Arguments of the function; at least one.
        group: Ranks on which the first input is equal: each keeps its share, and backward
            all-gathers it. `None` keeps the whole input.

    Raises:
        ValueError: There is no input, or the group does not divide the first one.
        TypeError: The function does not return a tensor or a tuple of tensors.
    """
    if not callable(function) or not all(isinstance(x, Tensor) for x in inputs):
        got = ", ".join(type(x).__name__ for x in (function, *inputs))
        raise TypeError(f"recompute() takes a function and tensors, got {got}")
    if not inputs:
        raise ValueError("recompute() needs at least one input tensor after the function")
    return cast(Output, _Recompute.apply(function, group, _reach_backward(), *inputs))


def _as_tensors(output: object) -> tuple[Tensor, ...]:
    outputs = output if isinstance(output, tuple) else (output,)
    if not outputs or not all(isinstance(y, Tensor) for y in outputs):
        got = ", ".join(type(y).__name__ for y in outputs) or "an empty tuple"
        raise TypeError(
            f"the function returned {got}, and only a tensor or a tuple of tensors can be computed "
            "again"
        )
    return cast("tuple[Tensor, ...]", outputs)


def _reach_backward() -> Tensor:
    """Return an input that needs a gradient, without which autograd would run no backward.

    The first layer after a frozen embedding has no other such input, but it has parameters.
    """
    return torch.empty(0, requires_grad=True)


class DiscardedOutput:
    """A cheap function whose output is freed after use and computed again in backward.

    Keeping both the input and the output of a norm or an activation is wasteful: the output is kept
    only because the next layer's backward reads it. Run the function through this object, use the
    output, then call `discard` with all results computed from it. The first backward of these runs
    the function again, into the same memory.

    Example:
        >>> x = torch.ones(2, 4, requires_grad=True)
        >>> linear = torch.nn.Linear(4, 3)
        >>> activation = DiscardedOutput()
        >>> y = linear(activation.run(torch.nn.functional.gelu, x))
        >>> activation.discard(y)
        >>> y.sum().backward()
    """

    def __init__(self) -> None:
        self._output: Tensor | None = None
        self._again: Callable[[], tuple[list[Tensor], Tensor]] | None = None

    def run(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run `function(*inputs)`; once for each object."""
        if self._again is not None:
            raise RuntimeError("this DiscardedOutput has run already; make one for each call")
        surroundings = _Surroundings(inputs[0].device)

        @cache  # the run that restores the output is also the one whose graph backward uses
        def again() -> tuple[list[Tensor], Tensor]:
            leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
            return leaves, surroundings.run_again(function, *leaves)

        self._again = again
        output = cast(Tensor, _Discarded.apply(again, function, _reach_backward(), *inputs))
        self._output = output
        return output

    def discard(self, *results: Tensor) -> None:
        """Free the output; the backward of the results computes it again.

        Args:
            results: All tensors computed from the output. In backward, the gradient of one of them
                arrives before the output is read.

        Raises:
            RuntimeError: `run` was not called.
            ValueError: No result needs a gradient, so nothing would bring the output back.
        """
        if self._output is None or self._again is None:
            raise RuntimeError("discard() before run(): there is no output to free")
        if not any(result.requires_grad for result in results):
            raise ValueError(
                "result needs no gradient, so backward could not bring the output back"
            )
        output, again = self._output.detach(), self._again
        size = output.untyped_storage().size()
        output.untyped_storage().resize_(0)

        def restore(_: Tensor) -> None:
            storage = output.untyped_storage()
            if storage.size() == size:  # another result's gradient came first
                return
            # Write through an alias: autograd would take a write to the tensor itself for a change.
            storage.resize_(size)
            same = output.new_empty(0).set_(storage, 0, output.shape, output.stride())
            same.copy_(again()[1].detach())

        for result in results:
            if result.requires_grad:
                result.register_hook(restore)
        self._output = None


class _Discarded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, again: Any, function: Callable[..., Tensor], _: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.again = again
        output = function(*inputs)
        if not isinstance(output, Tensor):
            raise TypeError(f"the function returned {type(output).__name__}, not one tensor")
        return output.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        leaves, output = ctx.again()
        ctx.again.cache_clear()
        if output.requires_grad:
            torch.autograd.backward(output, grads[0])
        return (None, None, None, *(x.grad for x in leaves))
