"""Losses by name: what is trained on, and what is reported of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mt_train.reporting.metrics import Record


def weighed(
    losses: Mapping[str, Tensor],
    weights: Mapping[str, float],
    counts: Mapping[str, str],
    divisors: Mapping[str, float],
) -> Tensor:
    """Return the weighed sum of the means that one stage has, which its backward begins with.

    Args:
        losses: Sums by name.
        weights: Of all losses of the model.
        counts: The name of each loss's count.
        divisors: By what sums are divided, by the name of the count.
    """
    sums: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name in losses:
            own, count = weight * losses[name], counts[name]
            sums[count] = sums[count] + own if count in sums else own
    means = [value / divisors[count] for count, value in sums.items()]
    return sum(means[1:], start=means[0])


def totals(
    outputs: Iterable[Mapping[str, Tensor]], names: Iterable[str], device: torch.device
) -> Tensor:
    """Sum the values of each name in fp64 over what stages returned, on the device.

    A name that none of them has sums to 0.
    """
    found: dict[str, list[Tensor]] = {}
    for output in outputs:
        for name, value in output.items():
            found.setdefault(name, []).append(value.double())
    none = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([torch.stack(found.get(name, [none])).sum() for name in names])


def loss_record(means: Mapping[str, float], weights: Mapping[str, float], prefix: str) -> Record:
    """Name losses as metrics do: `loss` is the language model's, another `<name>_loss`.

    Where there are others, `total_loss` is the weighed sum of all.
    """
    record = {prefix + ("loss" if n == "lm" else f"{n}_loss"): mean for n, mean in means.items()}
    if len(means) > 1:
        total = sum(weights[name] * mean for name, mean in means.items())
        record[f"{prefix}total_loss"] = total
    return record
