"""What a rank adds to the sums over ranks, in one number per parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Addends:
    """How large each gradient of this rank was before it was summed with those of other ranks.

    A sum that is not finite tells where, and no longer whose gradient it was. So each addend's
    extremes are noted before its reduction: one more read of it, without waiting for the device.

    Attributes:
        factor: What the sums were multiplied with since.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._extremes: dict[str, list[Tensor]] = {}
        self._scales: dict[str, float] = {}

    def watch(self, name: str, scale: float) -> None:
        """Know of a parameter whose gradients are summed after they were multiplied by `scale`."""
        self._extremes[name], self._scales[name] = [], scale

    def sort(self, names: Sequence[str]) -> None:
        """Have them in the order of `names`, which may have more."""
        self._extremes = {name: self._extremes[name] for name in names if name in self._extremes}

    def forget(self) -> None:
        """Forget what was noted."""
        self.factor = 1.0
        for found in self._extremes.values():
            found.clear()

    def note(self, grads: Mapping[str, Tensor]) -> None:
        """Note flat gradients that are about to be summed, those that somebody watches."""
        named = {name: grad for name, grad in grads.items() if name in self._extremes}
        if not named:
            return
        flats = [grad.detach() for grad in named.values()]
        if flats[0].device.type == "cpu":  # norms read one element at a time there
            found = [torch.stack(torch.aminmax(flat)) for flat in flats]
        else:
            found = torch._foreach_norm(flats, math.inf)
        for name, extremes in zip(named, found, strict=True):
            self._extremes[name].append(extremes)

    def magnitudes(self) -> dict[str, float]:
        """Return by parameter the greatest magnitude noted, scaled like the sums.

        It waits for the device. A parameter whose gradient did not come has 0, and what has a NaN
        has NaN.
        """
        largest = {
            name: torch.stack([one.double().abs().amax() for one in found]).amax()
            for name, found in self._extremes.items()
            if found
        }
        values = torch.stack(list(largest.values())).tolist() if largest else []
        sizes = dict.fromkeys(self._extremes, 0.0) | dict(zip(largest, values, strict=True))
        return {name: size * self._scales[name] * self.factor for name, size in sizes.items()}
