"""The objective of a run: the weights and divisors of a micro-batch's losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mt_train.reporting.metrics import Record


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The losses that training minimises: sums by name, each with a weight and a count.

    Attributes:
        weights: Weight of each loss of the model, by its name.
        count_of: Name of the count that each loss is divided by, such as `tokens`.
    """

    weights: Mapping[str, float]
    count_of: Mapping[str, str]

    @property
    def counts(self) -> tuple[str, ...]:
        """Names of the counts, each once."""
        return tuple(dict.fromkeys(self.count_of.values()))

    def __call__(self, losses: Mapping[str, Tensor], divisors: Mapping[str, float]) -> Tensor:
        """Return the weighted sum of one stage's mean losses, where its backward begins.

        Args:
            losses: Sums by name.
            divisors: Divisor of each count.
        """
        sums: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            if name in losses:
                own, count = weight * losses[name], self.count_of[name]
                sums[count] = sums[count] + own if count in sums else own
        means = [value / divisors[count] for count, value in sums.items()]
        return sum(means[1:], start=means[0])

    def record(
        self, sums: Iterable[float], divisors: Mapping[str, float], prefix: str = ""
    ) -> Record:
        """Return the mean losses under their names in metrics.

        `loss` is the language model's, `<name>_loss` another one. If there are others, `total_loss`
        is the weighted sum of all.

        Args:
            sums: Sum of each loss over all ranks, in the order of `weights`.
            divisors: Divisor of each count.
            prefix: Put in front of each name.
        """
        pairs = zip(self.weights, sums, strict=True)
        means = {name: value / divisors[self.count_of[name]] for name, value in pairs}
        names = {name: "loss" if name == "lm" else f"{name}_loss" for name in means}
        record = {prefix + names[name]: mean for name, mean in means.items()}
        if len(means) > 1:
            total = sum(self.weights[name] * mean for name, mean in means.items())
            record[f"{prefix}total_loss"] = total
        return record


def totals(
    outputs: Iterable[Mapping[str, Tensor]], names: Iterable[str], device: torch.device
) -> Tensor:
    """Sum the values of each name over the outputs of stages, in fp64 on the device.

    A name that no output has sums to 0.
    """
    found: dict[str, list[Tensor]] = {}
    for output in outputs:
        for name, value in output.items():
            found.setdefault(name, []).append(value.double())
    none = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([torch.stack(found.get(name, [none])).sum() for name in names])
