"""Hooks that fetch parameters before a forward or backward needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mt_data_parallel.bucket import Bucket
from mt_data_parallel.buffer import GradBuffer

ROOT = "root"


def arrive_in_forwards(
    buffer: GradBuffer, model: nn.Module, parts: Sequence[nn.Module], unit_of: Callable[[str], str]
) -> None:
    """Make `gather_params` return at once, and each unit's forward wait for its parameters.

    The first module outside of all units waits for all parameters without a unit, as such modules
    read each other's parameters (a tied head). `state_dict` waits for everything.
    """
    buckets: dict[str, list[Bucket]] = {ROOT: []}
    for bucket in buffer.buckets:
        for unit in {unit_of(slot.name) for slot in bucket.slots}:
            buckets.setdefault(unit, []).append(bucket)
    for bucket in buckets[ROOT]:
        bucket.is_needed_first = True
    inside: set[nn.Module] = set()
    for number, part in enumerate(parts):
        wait = partial(_arrive, buckets.get(str(number), []))
        for module in part.modules():  # schedules may call the modules of a layer one by one
            inside.add(module)
            buffer.on_close(module.register_forward_pre_hook(wait).remove)
    for module in model.modules():
        if module not in inside:
            wait = partial(_arrive, buckets[ROOT])
            buffer.on_close(module.register_forward_pre_hook(wait).remove)
        hook = module.register_state_dict_pre_hook(lambda *_: buffer.wait_params())
        buffer.on_close(hook.remove)
    buffer.gather_behind()
    buffer.on_close(buckets.clear)


def _arrive(buckets: list[Bucket], *_: Any) -> None:
    if torch.compiler.is_compiling():
        return  # the hook of the compiled module has waited for all its parameters
    for bucket in buckets:
        if bucket.is_coming:
            bucket.arrive()


class UnshardHooks:
    """Hooks that fetch the parameters of each unit before use and release them afterwards."""

    def __init__(
        self, buffer: GradBuffer, model: nn.Module, parts: Sequence[nn.Module], *, prefetch: int
    ) -> None:
        self._prefetch = prefetch
        self._units = [buffer.unit_buckets(str(number)) for number in range(len(parts))]
        self._root = buffer.unit_buckets(ROOT)
        hooks = [
            root.register_forward_pre_hook(self._enter)
            for root in (model.children() if isinstance(model, nn.ModuleList) else [model])
        ]
        for number, part in enumerate(parts):
            hooks.append(part.register_forward_pre_hook(partial(self._before, number)))
            hooks.append(part.register_forward_hook(partial(self._after, number)))
        buffer.on_close(*(hook.remove for hook in hooks), self._forget)

    def _forget(self) -> None:
        self._units.clear()
        self._root.clear()

    def _enter(self, *_: Any) -> None:
        for bucket in self._root:
            if not bucket.is_here:
                bucket.fetch()
        for bucket in self._root:
            bucket.arrive()

    def _before(self, number: int, *_: Any) -> None:
        # Recomputation runs forwards inside of a backward, which goes from last to first unit.
        in_backward = torch._C._current_graph_task_id() != -1
        self._bring(number, -1 if in_backward else 1)

    def _after(self, number: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for bucket in self._units[number]:
            bucket.is_idle = True
        # The gradient of an output is the first sign that the unit's backward begins.
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._backward, number))

    def _backward(self, number: int, _: Tensor) -> None:
        self._bring(number, -1)

    def _bring(self, number: int, direction: int) -> None:
        """Fetch a unit, prefetch the next ones, and release all others."""
        ahead = (number + direction * (step + 1) for step in range(self._prefetch))
        following = [other for other in ahead if 0 <= other < len(self._units)]
        for other, buckets in enumerate(self._units):
            for bucket in buckets:
                if bucket.is_idle and other != number and other not in following:
                    bucket.drop()
        # All gathers start before the first is awaited.
        for bucket in self._units[number]:
            if not bucket.is_here:
                bucket.fetch()
            bucket.is_idle = False
        for bucket in self._units[number]:
            bucket.arrive()
        for other in following:
            for bucket in self._units[other]:
                if not bucket.is_here:
                    bucket.fetch()
