"""One call for every sharding strategy: what of a model is whole on each rank, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from mt_parallel_state import shardings
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mt_data_parallel.bucket import Release, Units
from mt_data_parallel.buffer import GradBuffer
from mt_data_parallel.reduction import GroupChoice, Reduction, reduction_of

Strategy = Literal["none", "optimizer", "optimizer_gradients", "full"]
ROOT = "root"
_RELEASE: dict[str, Release] = {"optimizer_gradients": "gradients", "full": "all"}


def shard(
    model: nn.Module,
    strategy: Strategy,
    *,
    group: GroupChoice,
    named_params: Iterable[tuple[str, Tensor]] | None = None,
    units: Sequence[nn.Module] | None = None,
    init: Callable[[str, Tensor], None] | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> GradBuffer:
    """Share a model out over data-parallel ranks, and return the buffer that trains it.

    | strategy | shared out | traffic per step with `n` backwards, in parameters |
    |---|---|---|
    | `none` | nothing (DDP) | 2: an all-reduce |
    | `optimizer` | masters and moments (ZeRO-1) | 2: a reduce-scatter and an all-gather |
    | `optimizer_gradients` | gradients too (ZeRO-2) | n + 1 |
    | `full` | parameters too (ZeRO-3) | 3 n |

    Under `full` a unit's parameters are whole from before its forward to after it, and again in its
    backward; the next unit's are fetched meanwhile. What is in no unit (embedding, head) is fetched
    by the first forward of a step and released after the step. Outside of that, parameters have
    shapes but no memory: read them inside of `GradBuffer.gathered()`, and step
    `GradBuffer.pieces()`. The parameters stay the objects they are, with their sharding records.

    Args:
        model: The model. What it calls itself must be called as modules, for the hooks to run.
        strategy: What is shared out.
        group: As of `GradBuffer`: a plain group is one of shards here, unless `strategy` is `none`.
            A `Reduction` with both is hybrid sharding.
        named_params: Names and parameters; by default those of `model`.
        units: Modules whose parameters are reduced, fetched and released together; by default the
            members of every outermost ModuleList and ModuleDict. Used by the last two strategies.
        init: Fills a parameter, given its name, once it has memory. A model on the meta device
            needs it, and never has more than one unit whole while it is made.
        device: Where parameters on the meta device get their memory.
        **options: Further arguments of `GradBuffer`.

    Raises:
        ValueError: The strategy is unknown, or parameters on the meta device have no `init`.
        TypeError: An argument is of another type.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> buffer = shard(model, "full", group=None)  # one rank: nothing to share out
        >>> buffer.is_sharded
        False
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a Module, got {model!r:.60}")
    if strategy not in get_args(Strategy):
        known = ", ".join(get_args(Strategy))
        raise ValueError(f"strategy must be one of {known}; got {strategy!r:.60}")
    parts = list(_members(model) if units is None else units)
    _materialize(model, device, init)
    named = list(model.named_parameters() if named_params is None else named_params)
    release = _RELEASE.get(strategy, "nothing")
    unit_of = _units(model, parts, named)
    buffer = GradBuffer(
        named,
        group=group if strategy == "none" else partial(_sharded, group),
        units=Units(
            of=None if release == "nothing" else unit_of.__getitem__, release=release, init=init
        ),
        **options,
    )
    if release == "all":
        _Residence(buffer, model, parts)
    return buffer


def _sharded(choice: GroupChoice, name: str, param: Tensor) -> Reduction:
    found = reduction_of(choice, name, param)
    both_or_neither = found.shards is not None or found.replicas is None
    return found if both_or_neither else Reduction(shards=found.replicas)


def _members(module: nn.Module) -> Iterable[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from _members(child)


def _units(
    model: nn.Module, parts: Sequence[nn.Module], named: Sequence[tuple[str, Tensor]]
) -> dict[str, str]:
    """Return each parameter's unit by name; what several share belongs to the root."""
    inside = {id(module) for part in parts for module in part.modules()}
    rest = [module for module in model.modules() if id(module) not in inside]
    found: dict[int, str] = {}
    times: Counter[int] = Counter()
    for number, part in enumerate(parts):
        for param in part.parameters():
            found[id(param)] = str(number)
            times[id(param)] += 1
    for module in rest:
        times.update(id(param) for param in module.parameters(recurse=False))
    own = {key: unit for key, unit in found.items() if times[key] == 1}
    return {name: own.get(id(param), ROOT) for name, param in named}


def _materialize(
    model: nn.Module,
    device: torch.device | str | None,
    init: Callable[[str, Tensor], None] | None,
) -> None:
    """Give parameters on the meta device a device, and no memory yet."""
    shardings(model)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not param.is_meta:
                continue
            if init is None:
                raise ValueError(
                    f"parameter {name!r} is on the meta device; give shard() an init that fills a "
                    "parameter by its name"
                )
            if id(param) not in made:
                hollow = torch.empty(param.shape, dtype=param.dtype, device=device or "cpu")
                if param.requires_grad:
                    hollow.untyped_storage().resize_(0)
                made[id(param)] = nn.Parameter(hollow, requires_grad=param.requires_grad)
            setattr(module, name, made[id(param)])
    shardings(model)
    new = {id(param) for param in made.values() if not param.requires_grad}
    for name, param in model.named_parameters():
        if init is not None and id(param) in new:  # frozen: the buffer does not hold it
            init(name, param)


class _Residence:
    """Fetches the parameters of units when they are needed, and releases them afterwards."""

    def __init__(self, buffer: GradBuffer, model: nn.Module, parts: Sequence[nn.Module]) -> None:
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
        in_backward = torch._C._current_graph_task_id() != -1  # recomputation
        self._bring(number, number - 1 if in_backward else number + 1)

    def _after(self, number: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for bucket in self._units[number]:
            bucket.is_idle = True
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._backward, number))

    def _backward(self, number: int, _: Tensor) -> None:
        self._bring(number, number - 1)

    def _bring(self, number: int, following: int) -> None:
        """Have a unit whole, another on its way, and nothing that is no longer needed."""
        for other, buckets in enumerate(self._units):
            for bucket in buckets:
                if bucket.is_idle and other != number:
                    bucket.drop()
        for bucket in self._units[number]:
            if not bucket.is_here:
                bucket.fetch()
            bucket.is_idle = False
        for bucket in self._units[number]:
            bucket.arrive()
        if 0 <= following < len(self._units):
            for bucket in self._units[following]:
                if not bucket.is_here:
                    bucket.fetch()
