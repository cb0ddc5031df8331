"""The parameters that users give to an optimizer: read, named and checked."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from mt_data_parallel import ParamShard, param_shards
from torch import Tensor

from mt_optim.checks import LARGEST_LR, check_number, check_size, kind_of
from mt_optim.parameters.matching import SCALES

DecayFilter = Callable[[str, Tensor], bool]
Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
MASTER_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
# torch's schedulers restart from `initial_lr`; `name` is for logs.
_KEYS = ("initial_lr", "name", "rule", *SCALES)


def default_decay_filter(name: str, param: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: not to biases, norms and other vectors.

    Args:
        name: The parameter's name.
        param: The parameter or its shard, which has the same number of dims.

    Returns:
        False for names ending in "bias" (whatever their shape) and for tensors of fewer than two
        dimensions, else True.
    """
    if not isinstance(name, str) or not isinstance(param, Tensor):
        raise TypeError(f"expected a name and a parameter, got {name!r:.60} and {kind_of(param)}")
    return param.ndim >= 2 and not name.endswith("bias")


def read_groups(params: Any) -> list[dict[str, Any]]:
    """Return the groups in an optimizer's first argument, unchecked.

    Raises:
        TypeError: It is not an iterable of parameters, of pairs or of groups.
        ValueError: It is empty.
    """
    if isinstance(params, torch.nn.Module):
        raise TypeError(f"got the module {type(params).__name__}; pass its parameters()")
    if isinstance(params, Tensor | Mapping | str) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is {kind_of(params)}; pass module.parameters(), module.named_parameters() or "
            "a list of groups such as [{'params': [...], 'lr': 1e-4}]"
        )
    items = list(params)
    if not items:
        raise ValueError("there is no parameter to train; pass at least one")
    return items if isinstance(items[0], Mapping) else [{"params": items}]


def read_group(
    group: Any, first: int, keys: tuple[str, ...]
) -> tuple[dict[str, Any], list[ParamShard], bool]:
    """Read one group.

    Args:
        group: A mapping with `params` and any of the options.
        first: Number of the group's first parameter, which names those that come without a name.
        keys: The options that it may have.

    Returns:
        The group without its parameters; these as shards; and whether they came with names.

    Raises:
        TypeError: The group or something in it is of the wrong type.
        ValueError: A key is unknown or an option out of range.
    """
    if not isinstance(group, Mapping):
        raise TypeError(f"expected a group as the ones before it, a dict; got {kind_of(group)}")
    known = ("params", "param_names", *keys, *_KEYS)
    for key in group:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"a group has no key {key!r}.{hint} Its keys: {', '.join(known)}")
    if "params" not in group:
        raise ValueError("a group needs 'params', the parameters that its options are for")
    given = group["params"]
    if isinstance(given, Tensor):
        given = [given]
    if isinstance(given, Mapping | set | str) or not isinstance(given, Iterable):
        raise TypeError(
            f"the params of a group are {kind_of(given)}; pass a list, which has an order"
        )
    items = list(given)
    is_named = bool(items) and not isinstance(items[0], Tensor)
    shards = [_shard(item, str(first + i), is_named=is_named) for i, item in enumerate(items)]
    names = group.get("param_names")
    if names is not None:
        if is_named or len(names) != len(shards):
            raise ValueError(
                f"a group has {len(shards)} params and {len(names)} param_names; give one each, "
                "and no pairs beside them"
            )
        shards = [
            _shard((name, shard.param), "", is_named=True)
            for name, shard in zip(names, shards, strict=True)
        ]
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return options, shards, is_named or names is not None


def check_options(group: Mapping[str, Any]) -> None:
    """Check learning rate and weight decay of a group.

    Raises:
        TypeError: One of them is not a number.
        ValueError: One of them is out of range.
    """
    if isinstance(group["lr"], Tensor) and not group["lr"].dim():
        lr = 0.0  # to look at it would wait for the device
    else:
        lr = check_number("lr", group["lr"])
    if not 0 <= lr < math.inf:
        raise ValueError(f"lr must be 0 or more and finite, got {lr}")
    if lr > LARGEST_LR:
        raise ValueError(f"lr is {lr}, which fp32 weights cannot hold; use a smaller one")
    check_size("weight_decay", group["weight_decay"])
    for key in SCALES:
        check_size(key, group.get(key, 1.0))


def apply_scales(group: dict[str, Any], *, given: Mapping[str, Any]) -> None:
    """Multiply a group's inherited options by its own scales.

    Raises:
        ValueError: An option with a scale is not a number.
    """
    for key, scale in zip(("lr", "weight_decay", "eps"), SCALES, strict=True):
        if key in group and key not in given and scale in group:
            if not isinstance(group[key], int | float | Tensor):
                raise ValueError(
                    f"{scale} multiplies {key}, and that is {group[key]}, which is no number; "
                    f"leave {scale} out for these parameters, or give them an {key} of their own"
                )
            group[key] = group[key] * group[scale]


def _shard(item: Any, name: str, *, is_named: bool) -> ParamShard:
    if isinstance(item, ParamShard):
        shard = item
    elif isinstance(item, Tensor) and not is_named:
        (shard,) = param_shards([(name, item)])
    elif (
        is_named
        and isinstance(item, tuple | list)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], Tensor)
    ):
        (shard,) = param_shards([(item[0], item[1])])
    else:
        wanted = "a pair of name and parameter" if is_named else "a parameter"
        raise TypeError(
            f"expected {wanted}, got {kind_of(item)}; pass module.parameters() or "
            "module.named_parameters(), with names for all or for none"
        )
    name, param = shard.name, shard.param
    if not param.is_leaf:
        raise ValueError(
            f"parameter {name!r} is the result of an operation, which gets no gradient of its own; "
            "pass the parameter that it was made of"
        )
    if param.dtype not in MASTER_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in MASTER_DTYPES)
        raise TypeError(f"parameter {name!r} is {param.dtype}; an optimizer takes {allowed}")
    return shard


def scaled_rates(
    groups: Sequence[Mapping[str, Any]], *, lr: float | None, weight_decay: float | None
) -> list[dict[str, float]]:
    """Return new rates for each group, multiplied by its `lr_scale` and `wd_scale`.

    Raises:
        ValueError: A rate is out of range.
        TypeError: A rate is not a number.
    """
    given: dict[str, tuple[str, float]] = {}
    if lr is not None:
        given["lr"] = ("lr_scale", check_size("lr", lr))
    if weight_decay is not None:
        given["weight_decay"] = ("wd_scale", check_size("weight_decay", weight_decay))
    return [
        {key: value * group.get(scale, 1.0) for key, (scale, value) in given.items()}
        for group in groups
    ]
