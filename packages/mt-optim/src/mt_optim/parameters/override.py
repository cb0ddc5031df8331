"""The groups that follow from overrides, and the scales of muP."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mt_data_parallel import ParamShard, param_shards
from torch import Tensor, nn

from mt_optim.checks import check_function, check_number
from mt_optim.parameters.matching import GroupOverride


def override_groups(
    named_params: Iterable[tuple[str, nn.Parameter] | ParamShard],
    overrides: Sequence[GroupOverride],
) -> list[dict[str, Any]]:
    """Return the parameter groups that follow from overrides, for any optimizer.

    Args:
        named_params: Names and parameters, or shards.
        overrides: Several may match a parameter, if they do not set the same to different values.

    Returns:
        Groups with `params` and their settings. The parameters keep their order within a group.

    Raises:
        ValueError: Two overrides contradict each other.
    """
    wrong = isinstance(overrides, str) or not isinstance(overrides, Sequence)
    if wrong or not all(isinstance(override, GroupOverride) for override in overrides):
        raise TypeError(f"overrides must be a list of GroupOverrides, got {overrides!r:.60}")
    groups: dict[tuple[tuple[str, Any], ...], list[ParamShard]] = {(): []}
    for shard in param_shards(named_params):
        settings: dict[str, Any] = {}
        setters: dict[str, GroupOverride] = {}
        for override in overrides:
            if not override.matches(shard.name, shard.source):
                continue
            for key, value in override.settings.items():
                if settings.setdefault(key, value) != value:
                    raise ValueError(
                        f"parameter {shard.name!r} has {key} {settings[key]} from override "
                        f"'{setters[key]}' and {value} from '{override}'; let one of them match it"
                    )
                setters[key] = override
        groups.setdefault(tuple(sorted(settings.items())), []).append(shard)
    return [{"params": shards, **dict(key)} for key, shards in groups.items() if shards]


def mup_overrides(
    width_multiplier: float, is_hidden: Callable[[str, Tensor], bool], *, name: str = "adamw"
) -> list[GroupOverride]:
    """Return the overrides of muP (Yang et al., arXiv 2203.03466, table 8).

    For adamw, adam and lion, hidden matrices have the rate over the width, and adamw and adam also
    their eps, as gradients shrink with the width. For sgd all other parameters have the rate times
    the width.

    Args:
        width_multiplier: The model's width divided by the width of the tuned model.
        is_hidden: Predicate of the parameters that grow in both dims with the width, such as
            `is_hidden_matrix`.
        name: Name of the optimizer.

    Raises:
        ValueError: The multiplier is not positive, or muP has no scales for the optimizer.
    """
    if not 0 < check_number("width_multiplier", width_multiplier) < math.inf:
        raise ValueError(f"width_multiplier must be positive, got {width_multiplier}")
    check_function("is_hidden", is_hidden)
    slower = 1 / width_multiplier
    if name in ("adamw", "adam"):
        return [GroupOverride(where=is_hidden, lr_scale=slower, eps_scale=slower)]
    if name == "lion":
        return [GroupOverride(where=is_hidden, lr_scale=slower)]
    if name == "sgd":

        def is_vector_like(name: str, param: Tensor) -> bool:
            return not is_hidden(name, param)

        return [GroupOverride(where=is_vector_like, lr_scale=width_multiplier)]
    raise ValueError(
        f"muP's scales are those of adamw, adam, lion and sgd, not of {name!r:.60}; Muon with "
        "scale 'unit_rms_norm' keeps its rate over widths without any"
    )
