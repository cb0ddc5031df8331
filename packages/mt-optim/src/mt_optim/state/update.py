"""The update of all shards in a step: on the device, and on the host for offloaded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mt_data_parallel import ParamShard
from torch import Tensor

from mt_optim.parameters.group import MASTER_DTYPES
from mt_optim.rules.rule import Batch, Rule
from mt_optim.state.host import Traffic
from mt_optim.state.storage import StateStorage

_CHUNK = 1 << 25  # elements of which a step on a GPU has copies in full precision at a time
_PORTION = 1 << 20  # the same on a CPU; and elements that go to the host and back together
States = Mapping[Tensor, dict[str, Tensor]]
Gradient = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Portion:
    """A portion of the shards, for a joint update.

    Attributes:
        shards: The shards.
        rule: Their rule.
        group: The options of their group.
        skip: As in `Batch`.
    """

    shards: list[ParamShard]
    rule: Rule
    group: Mapping[str, Any]
    skip: Tensor | None = None


def portions(
    shards: Sequence[ParamShard],
    rule: Rule,
    group: Mapping[str, Any],
    storage: StateStorage,
    *,
    skip: Tensor | None = None,
) -> Iterator[Portion]:
    """Cut the shards of a group into portions, each on the device or on the host.

    Steps that make copies are cut into small portions to save memory.
    """
    here, there = list(shards), []
    if not storage.is_plain:
        here = [shard for shard in shards if not storage.is_offloaded(shard)]
        there = [shard for shard in shards if storage.is_offloaded(shard)]
    for chosen, size in ((here, _room(here, storage)), (there, _PORTION)):
        for chunk in _chunks(chosen, size):
            yield Portion(shards=chunk, rule=rule, group=group, skip=skip)


def _room(shards: Sequence[ParamShard], storage: StateStorage) -> int | None:
    """Return the number of elements in a portion on the device; None if a step makes no copies.

    Full-precision copies of a portion fit into a processor's cache, or keep a whole GPU busy.
    """
    params = [shard.param for shard in shards]
    narrow = any(param.dtype != MASTER_DTYPES[param.dtype] for param in params)
    is_plain = storage.is_plain or not any(map(storage.is_converted, shards))
    if is_plain and not narrow:
        return None
    return _PORTION if params[0].device.type == "cpu" else _CHUNK


def update(
    work: Sequence[Portion], states: States, storage: StateStorage, gradient: Gradient
) -> Traffic:
    """Update everything, the host and the device at the same time.

    Parameters of offloaded shards are set to their masters; the caller does this for the others.

    Args:
        work: The portions to update.
        states: The states of the shards' parameters.
        storage: The storage of the states.
        gradient: Function that returns the gradient of a parameter, called once for each.

    Returns:
        The bytes copied.

    Raises:
        ValueError: A rate is a tensor, and some states are on the host; nothing has changed.
    """
    here = [portion for portion in work if not storage.is_offloaded(portion.shards[0])]
    there = [portion for portion in work if storage.is_offloaded(portion.shards[0])]
    if not there:
        for portion in here:
            _update(portion, _grads(portion, gradient), states, storage)
        return Traffic()
    if any(isinstance(portion.group["lr"], Tensor) for portion in there):
        raise ValueError(
            "lr is a tensor, for a step in a CUDA graph, and offload has the host step a share, "
            "which is in no graph; make lr a number, or offload 0"
        )
    mover = storage.mover(there[0].shards[0].param.device)
    # The first gradients travel to the host while the device steps its own shards.
    mover.begin()
    mover.fetch(0, _grads(there[0], gradient))
    for portion in here:
        _update(portion, _grads(portion, gradient), states, storage)
    for turn, portion in enumerate(there):
        # The next portion arrives while the CPU steps this one.
        if turn + 1 < len(there):
            mover.fetch(turn + 1, _grads(there[turn + 1], gradient))
        _update(portion, mover.fetched(turn), states, storage)
        params = [shard.param for shard in portion.shards]
        mover.send(turn, params, [states[param]["master"] for param in params])
    mover.end()
    return mover.traffic


def _update(
    portion: Portion, grads: Sequence[Tensor | None], states: States, storage: StateStorage
) -> None:
    own = [states[shard.param] for shard in portion.shards]
    if storage.is_plain:
        plain = zip(portion.shards, own, strict=True)
        masters = [state.get("master", shard.param) for shard, state in plain]
        full = [_gradient(*pair) for pair in zip(grads, masters, strict=True)]
        batch = Batch(portion.shards, masters, full, own, portion.skip)
        portion.rule.update(batch, portion.group)
        return
    opened = [
        storage.opened(shard, state, portion.rule)
        for shard, state in zip(portion.shards, own, strict=True)
    ]
    masters = [master for master, _ in opened]
    full = [_gradient(*pair) for pair in zip(grads, masters, strict=True)]
    batch = Batch(portion.shards, masters, full, [state for _, state in opened], portion.skip)
    portion.rule.update(batch, portion.group)
    for shard, state, new in zip(portion.shards, own, opened, strict=True):
        storage.close(shard, state, portion.rule, new)


def _grads(portion: Portion, gradient: Gradient) -> list[Tensor | None]:
    return [gradient(shard.param) for shard in portion.shards]


def _gradient(grad: Tensor | None, master: Tensor) -> Tensor:
    """Return the gradient in the master's dtype, in memory order as the fused kernel reads it."""
    if grad is None:
        return torch.zeros_like(master)
    if grad.dtype == master.dtype and grad.is_contiguous():
        return grad
    return grad.to(master.dtype).contiguous()


def _chunks(shards: Sequence[ParamShard], size: int | None) -> list[list[ParamShard]]:
    """Cut shards into lists of at most `size` elements each."""
    if size is None:
        return [list(shards)] if shards else []
    chunks: list[list[ParamShard]] = []
    room = 0
    for shard in shards:
        if not chunks or room < shard.param.numel():
            chunks.append([])
            room = size
        chunks[-1].append(shard)
        room -= shard.param.numel()
    return chunks
