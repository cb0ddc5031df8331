"""The contents of a state dict, read and checked before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mt_optim.checks import check_number

# Options of torch's AdamW: those fixed here, and those without an effect on the numbers.
_ALWAYS = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
_LEFT_OUT = ("params", "param_names", *_ALWAYS, "foreach", "fused", "capturable", "differentiable")


def read_options(groups: Any, own: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of a state dict's groups.

    Args:
        groups: The groups of the state dict.
        own: The groups of the optimizer.

    Raises:
        ValueError: The groups differ, or have an option that AdamW here lacks.
        TypeError: An option is not a number.
    """
    if not isinstance(groups, list) or len(groups) != len(own):
        got = len(groups) if isinstance(groups, list) else f"{groups!r:.60} as"
        raise ValueError(
            f"the state has {got} groups and this optimizer {len(own)}: make it with the same ones"
        )
    return [_options(index, *pair) for index, pair in enumerate(zip(groups, own, strict=True))]


def _options(index: int, group: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "params" not in group:
        raise ValueError(
            f"group {index} of the state is {group!r:.60}: expected a dict with params"
        )
    if len(group["params"]) != len(own["params"]):
        raise ValueError(
            f"group {index} of the state has {len(group['params'])} parameters and that of this "
            f"optimizer {len(own['params'])}: make it with the same groups"
        )
    names = own.get("param_names") or ()
    for name, other in zip(names, group.get("param_names") or names, strict=False):
        if name != other:
            raise ValueError(
                f"group {index} of the state has {other!r} where this optimizer has {name!r}: give "
                "the parameters in the same order"
            )
    for key, value in _ALWAYS.items():
        if key not in own and bool(group.get(key, value)) != value:
            raise ValueError(f"the state is of an optimizer with {key}={group[key]}, unlike this")
    kept = {key: value for key, value in group.items() if key not in _LEFT_OUT}
    return copy.deepcopy(kept)


def read_state(
    name: str,
    given: Any,
    own: Mapping[str, Tensor],
    *,
    makes_more: bool = False,
    optional: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the values of one parameter's state.

    Args:
        name: The parameter's name.
        given: Its entry in the state dict, None where there is none.
        own: The tensors to fill.
        makes_more: Whether the rule makes tensors while it runs; these are returned as they
            are.
        optional: Names in `own` that may be missing.

    Raises:
        ValueError: A value is missing or has another shape.
        TypeError: A value is neither tensor nor number.
    """
    values: dict[str, Tensor] = {}
    for key, tensor in own.items():
        if key in optional and isinstance(given, Mapping) and key not in given:
            continue
        if not isinstance(given, Mapping) or key not in given:
            raise ValueError(f"the state of parameter {name!r} has no {key}")
        value = given[key]
        if not isinstance(value, Tensor):
            value = torch.tensor(check_number(key, value))
        if value.shape != tensor.shape:
            raise ValueError(
                f"{key} of parameter {name!r} has shape {tuple(value.shape)} in the state and "
                f"{tuple(tensor.shape)} here"
            )
        values[key] = value
    if makes_more:
        values |= {k: v for k, v in given.items() if k not in own and isinstance(v, Tensor)}
    return values
