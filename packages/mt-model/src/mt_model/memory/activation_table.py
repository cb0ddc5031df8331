"""The activations of a stage by module, counted without memory or time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from mt_model.block.losses import add_losses
from mt_model.language.decoder import GPT
from mt_model.recompute.saved_activations import KeptBytes


@contextmanager
def without_data() -> Iterator[None]:
    """Make tensors inside without memory, with the kernels of a CPU (torch's fake tensors).

    Stages built inside compute only shapes, so that a model of any size is built at once. With a
    process group of torch's `fake` backend a stage is one rank's part of any layout.

    Raises:
        ValueError: Code inside reads a number from a tensor. A truth value (`if tensor:`, such as a
            check for values that are not finite) reads as False.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Usual():
            yield
    except DataDependentOutputException as error:
        raise ValueError(
            f"the model asks for values that tensors without data don't have ({error}); such are "
            "the numbers of rows that ranks with experts exchange. Count with ep=1"
        ) from error


class _Usual(TorchDispatchMode):
    """Says no where Python asks for a truth value, as of the exceptions that code looks for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; the answer is not one."""
        asks = func is torch.ops.aten._local_scalar_dense.default
        if asks and args[0].dtype == torch.bool:
            return False
        return func(*args, **dict(kwargs or {}))


def kept_by_module(
    stage: GPT, batch: Mapping[str, Any], x: Tensor | None = None
) -> dict[str, KeptBytes]:
    """Run a stage forward, and count what each of its modules keeps for the backward of it.

    Memory belongs to the first module that saves it, the innermost that runs then: what a norm
    hands to a linear layer is the linear layer's, and what belongs to no module inside of a layer
    the layer's. Parameters, buffers, the batch and what all layers share, such as tables of angles,
    are not counted. An offloaded layer is one entry.

    Args:
        stage: Stage of real tensors, or built under `without_data`.
        batch: Batch of the stage.
        x: Activation of the stage before; None on the first stage.

    Returns:
        By the name of the module in the stage, in the order in which they save.
    """
    away: Mapping[int, KeptBytes] = {}
    if stage.plan.offload is not None:  # whose layers say themselves what they keep
        with stage.watch_activations() as away:
            stage(x, batch)
    found: dict[str, KeptBytes] = {}
    for name, storage in _saved(stage, batch, x):
        found.setdefault(name, KeptBytes()).device += storage.nbytes()
    for index, kept in away.items():
        if stage.plan.offloads(index):
            name = stage.layer_name(index)
            found = {n: k for n, k in found.items() if n != name and not n.startswith(f"{name}.")}
            found[name] = kept
    return found


def _saved(
    stage: GPT, batch: Mapping[str, Any], x: Tensor | None
) -> list[tuple[str, torch.UntypedStorage]]:
    """Each piece of memory that a forward saves, and who does."""
    running = [""]
    given = [y for y in batch.values() if isinstance(y, Tensor)]
    others = {y.untyped_storage()._cdata for y in (*stage.parameters(), *stage.buffers(), *given)}
    here: dict[int, tuple[str, Tensor]] = {}  # by address, which no other memory gets meanwhile

    def pack(y: Tensor) -> Tensor:
        if y.layout == torch.strided:
            address = y.untyped_storage()._cdata
            if address not in others:
                here.setdefault(address, (running[-1], y.detach()))
        return y

    with _names(stage, running), saved_tensors_hooks(pack, lambda y: y):
        x, shared = stage.begin(x, batch)
        others |= {y.untyped_storage()._cdata for y in shared.constants()}
        x, losses = stage.run_layers(x, shared)
        losses = add_losses(losses, stage.mtp_losses(x, shared, batch))
        output = stage.finish(x, losses, batch)
    found = [(name, y.untyped_storage()) for name, y in here.values()]  # some is freed by now
    del output
    return found


@contextmanager
def _names(stage: nn.Module, running: list[str]) -> Iterator[None]:
    """Keep the name of the module that runs at the end of a list."""
    handles = []
    for name, module in stage.named_modules():
        if name:
            enter = module.register_forward_pre_hook(
                lambda *_, name=name: running.append(name), prepend=True
            )
            leave = module.register_forward_hook(lambda *_: _drop(running), always_call=True)
            handles += [enter, leave]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _drop(running: list[str]) -> None:
    running.pop()
