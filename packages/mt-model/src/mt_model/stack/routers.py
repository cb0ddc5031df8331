"""Mixtures of experts among the layers of stages: their load, and their update after each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

from mt_moe import Router, update_expert_biases
from mt_parallel_state import PartitionSpec, shard_param, sharding_of
from torch import Tensor, nn
from torch.nn import Parameter

from mt_model.feed_forward.moe import MoE
from mt_model.stack.stack import Stack

_Module = TypeVar("_Module", bound=nn.Module)
_BIAS = "expert_bias.value"


def balance_experts(stages: Sequence[Stack[Any]]) -> None:
    """Update the routers from the load of the step's micro-batches; every rank calls it each step.

    The load is reset. Where biases balance experts, integers are all-reduced over the ranks that
    have these layers; the host does not wait.

    Args:
        stages: All stages of this rank.
    """
    named = _named(stages, Router)
    routers = [named[name] for name in sorted(named)]  # ranks may have stages in another order
    if not routers:
        return
    state = stages[0].state
    is_mirrored = any("mirror" in sharding_of(each.weight).partial_grad for each in routers)
    groups = [state.group("tp-cp-dp")] + [state.group("mirror")] * is_mirrored
    trained = [router for router in routers if router.weight.requires_grad]
    if trained:
        update_expert_biases(trained, *groups)
    for router in routers:
        router.end_step()
    for layer in _named(stages, MoE).values():
        layer.load.zero_()


def expert_loads(stages: Sequence[Stack[Any]]) -> dict[str, Tensor]:
    """Return the number of choices of each expert in this step so far, by the layer's name.

    The counts are of this rank's tokens in training; their sum over all ranks is the step's count.

    Shape:
        int64 [E + 1]; the last is the number of choices that no expert took.
    """
    return {name: layer.load for name, layer in _named(stages, MoE).items()}


def saved_buffers(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint keeps: biases that balance experts, by name.

    Each rank holds them whole, and each has a sharding record as a parameter has.

    Shape:
        fp32 [E].
    """
    found: dict[str, Tensor] = {}
    for name, router in _named(stages, Router).items():
        if router.expert_bias is not None:
            is_copy = sharding_of(router.weight).is_copy
            value = cast("Parameter", router.expert_bias.value)
            found[f"{name}.{_BIAS}"] = shard_param(value, PartitionSpec(), is_copy=is_copy)
    return found


def is_buffer(name: str) -> bool:
    """Whether a tensor's name is the name of one of `saved_buffers`."""
    return name.endswith(f".{_BIAS}")


def saved_tensors(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a checkpoint of a stage keeps: parameters, then `saved_buffers`."""
    yield from stage.named_parameters()
    yield from saved_buffers([stage]).items()


def _named(stages: Sequence[nn.Module], kind: type[_Module]) -> dict[str, _Module]:
    named = (each for stage in stages for each in stage.named_modules())
    return {name: module for name, module in named if isinstance(module, kind)}
