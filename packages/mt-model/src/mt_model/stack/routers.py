"""Mixtures of experts among the layers of stages: their load, and what follows each step."""

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
    """Have routers follow the load of the step's micro-batches; every rank calls it once a step.

    It forgets the load too. Where biases balance experts it is an all-reduce of integers over the
    ranks that have these layers; no host waits for it.

    Args:
        stages: All of this rank.
    """
    named = _named(stages, Router)
    routers = [named[name] for name in sorted(named)]  # ranks may have stages in another order
    if not routers:
        return
    state = stages[0].state
    is_mirrored = any("mirror" in sharding_of(each.weight).partial_grad for each in routers)
    groups = [state.group("tp-cp-dp")] + [state.group("mirror")] * is_mirrored
    update_expert_biases(routers, *groups)
    for router in routers:
        router.end_step()
    for layer in _named(stages, MoE).values():
        layer.load.zero_()


def expert_loads(stages: Sequence[Stack[Any]]) -> dict[str, Tensor]:
    """Return how often each expert was chosen in this step so far, by the layer's global name.

    They are of this rank's tokens, in training; their sum over all ranks is the step's.

    Shape:
        int64 [E + 1]; the last is the number of choices that no expert took.
    """
    return {name: layer.load for name, layer in _named(stages, MoE).items()}


def saved_buffers(stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return what a checkpoint keeps beside parameters: biases that balance experts, by name.

    Each rank has them whole; a record says so, as of a parameter.

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
    """Whether a name of a model's tensor is that of one of `saved_buffers`."""
    return name.endswith(f".{_BIAS}")


def saved_tensors(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all that a stage's numbers come from: its parameters, then `saved_buffers`."""
    yield from stage.named_parameters()
    yield from saved_buffers([stage]).items()


def _named(stages: Sequence[nn.Module], kind: type[_Module]) -> dict[str, _Module]:
    named = (each for stage in stages for each in stage.named_modules())
    return {name: module for name, module in named if isinstance(module, kind)}
