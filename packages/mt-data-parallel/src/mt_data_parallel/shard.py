"""One call for every sharding strategy of data parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from mt_parallel_state import shardings
from torch import Tensor, nn

from mt_data_parallel.buffer import GradBuffer
from mt_data_parallel.encoding import Encoding
from mt_data_parallel.policy import Release, ShardingPolicy
from mt_data_parallel.reduction import GroupChoice, Reduction, reduction_of
from mt_data_parallel.unshard import ROOT, UnshardHooks, arrive_in_forwards

Strategy = Literal["none", "optimizer", "optimizer_gradients", "full"]
_RELEASE: dict[str, Release] = {"optimizer_gradients": "gradients", "full": "all"}


def shard(  # noqa: PLR0913 - what users choose, all but two by keyword
    model: nn.Module,
    strategy: Strategy,
    *,
    group: GroupChoice,
    named_params: Iterable[tuple[str, Tensor]] | None = None,
    units: Sequence[nn.Module] | None = None,
    init: Callable[[str, Tensor], None] | None = None,
    device: torch.device | str | None = None,
    prefetch: int = 1,
    param_dtype: torch.dtype | None = None,
    shard_dtype: torch.dtype | None = None,
    offload: bool = False,
    encoding: Encoding | None = None,
    **options: Any,
) -> GradBuffer:
    """Shard a model over data-parallel ranks, and return the buffer that trains it.

    | strategy | sharded | traffic per step with `n` backwards, in parameters |
    |---|---|---|
    | `none` | nothing (DDP) | 2: an all-reduce |
    | `optimizer` | masters and moments (ZeRO-1) | 2: a reduce-scatter and an all-gather |
    | `optimizer_gradients` | gradients too (ZeRO-2) | n + 1 |
    | `full` | parameters too (ZeRO-3) | 3 n |

    Under `full` a unit's parameters are whole during its forward, and again during its backward;
    the next unit's are fetched meanwhile. Parameters outside of all units (embedding, head) are
    fetched by the first forward of a step and released after the step. At other times parameters
    have shapes but no memory: read them inside of `GradBuffer.gathered()`, and step
    `GradBuffer.shards()`. The parameters remain the same objects, with their sharding records.

    Args:
        model: The model. It must call its units as modules, for the hooks to run.
        strategy: One of the table.
        group: As for `GradBuffer`, but a plain group has shards unless `strategy` is `none`. A
            `Reduction` with shards and replicas is hybrid sharding.
        named_params: Names and parameters; `model.named_parameters()` by default.
        units: Modules whose parameters are reduced, fetched and released together under `full`, and
            awaited together under the other sharded strategies; by default the members of every
            outermost ModuleList and ModuleDict.
        init: Function that fills a parameter, given its name, once it has memory. A model on the
            meta device needs it, and never has more than one unit whole during construction.
        device: Device of parameters from the meta device.
        prefetch: Number of units to fetch ahead under `full`. Under `optimizer` and
            `optimizer_gradients`, `gather_params` waits if it is 0; otherwise it returns at once,
            and each forward waits for its own parameters.
        param_dtype: Dtype in which parameters are gathered and computed; by default their own.
        shard_dtype: Dtype of the shards that the optimizer steps: fp32 for a bf16 model whose
            shards are its masters. By default the parameters' own.
        offload: Keep shards and their gradients in the host's memory. They are copied when
            parameters are gathered and gradients reduced.
        encoding: Format of parameters that are held and gathered as one-byte codes, such as
            `mt_fp8.PrimaryWeights`. Their shards are fp32 (fp64 for fp64 parameters), and reading
            the parameters gives NaN. Call `GradBuffer.gather_params()`, which makes the codes,
            before the first forward.
        **options: Further arguments of `GradBuffer`. Under `full` a unit is one bucket, whatever
            `bucket_size` says; under `optimizer_gradients` two buckets of it are whole at a time.

    Raises:
        ValueError: The strategy is unknown, or does not go with another argument; or parameters on
            the meta device have no `init`.
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
    _check(strategy, prefetch, param_dtype=param_dtype, shard_dtype=shard_dtype, offload=offload)
    parts = list(_members(model) if units is None else units)
    named = list(model.named_parameters() if named_params is None else named_params)
    named = _with_device(model, named, device, init)
    release = _RELEASE.get(strategy, "nothing")
    unit_of = _units(model, parts, named).__getitem__
    buffer = GradBuffer(
        named,
        group=group if strategy == "none" else partial(_sharded, group),
        policy=ShardingPolicy(
            unit_of=unit_of if release == "all" else None,
            release=release,
            init=init,
            param_dtype=param_dtype,
            shard_dtype=shard_dtype,
            offload=offload,
            encoding=encoding,
        ),
        **options,
    )
    if release == "all":
        UnshardHooks(buffer, model, parts, prefetch=prefetch)
    elif buffer.is_sharded and prefetch:
        arrive_in_forwards(buffer, model, parts, unit_of)
    return buffer


def _check(strategy: str, prefetch: int, **kept: Any) -> None:
    """Refuse arguments that contradict each other."""
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise TypeError(f"prefetch must be an int, got {prefetch!r:.60}")
    if prefetch < 0:
        raise ValueError(f"prefetch must be 0 or more, got {prefetch}")
    for name in ("param_dtype", "shard_dtype"):
        if kept[name] is not None and not isinstance(kept[name], torch.dtype):
            raise TypeError(f"{name} must be a torch.dtype or None, got {kept[name]!r:.60}")
    if strategy == "none":
        for name, value in kept.items():
            if value:
                raise ValueError(
                    f"{name}={value} needs something that is shared out, and strategy='none' "
                    "shares nothing; use 'optimizer', 'optimizer_gradients' or 'full'"
                )


def _sharded(choice: GroupChoice, name: str, param: Tensor) -> Reduction:
    found = reduction_of(choice, name, param)
    if found.shards is not None:
        return found
    return replace(found, replicas=None, shards=found.replicas)


def _members(module: nn.Module) -> Iterable[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from _members(child)


def _units(
    model: nn.Module, parts: Sequence[nn.Module], named: Sequence[tuple[str, Tensor]]
) -> dict[str, str]:
    """Return each parameter's unit by name; a parameter that units share belongs to the root."""
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


def _with_device(
    model: nn.Module,
    named: Sequence[tuple[str, Tensor]],
    device: torch.device | str | None,
    init: Callable[[str, Tensor], None] | None,
) -> list[tuple[str, Tensor]]:
    """Give parameters on the meta device a device, but no memory; return all with names."""
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
                hollow = torch.empty_like(param, device=device or "cpu")
                if param.requires_grad:
                    hollow.untyped_storage().resize_(0)
                made[id(param)] = nn.Parameter(hollow, requires_grad=param.requires_grad)
            setattr(module, name, made[id(param)])
    shardings(model)
    for name, old in named:
        if init is not None and id(old) in made and not old.requires_grad:
            init(name, made[id(old)])  # the buffer does not hold what is frozen
    return [(name, made.get(id(param), param)) for name, param in named]
