"""The size of the gradients that a rank adds to the sums over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Addends:
    """The largest magnitude of each gradient of this rank before the sum over ranks.

    A sum that is not finite no longer tells whose gradient was at fault. So the extremes of each
    addend are recorded before its reduction: one more read, without waiting for the device.

    Attributes:
        factor: A factor that the sums were multiplied by afterwards.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._extremes: dict[str, list[Tensor]] = {}
        self._scales: dict[str, float] = {}

    def watch(self, name: str, scale: float) -> None:
        """Record a parameter's gradients, which enter the sum multiplied by `scale`."""
        self._extremes[name], self._scales[name] = [], scale

    def sort(self, names: Sequence[str]) -> None:
        """Put the parameters in the order of `names`, which may list others too."""
        self._extremes = {name: self._extremes[name] for name in names if name in self._extremes}

    def forget(self) -> None:
        """Drop the records of the last step."""
        self.factor = 1.0
        for found in self._extremes.values():
            found.clear()

    def note(self, grads: Mapping[str, Tensor]) -> None:
        """Record flat gradients before they are summed, as far as `watch` was called for them."""
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
        """Return the largest recorded magnitude of each parameter, scaled like the sums.

        It waits for the device. A parameter without a gradient has 0, and one with a NaN has NaN.
        """
        largest = {
            name: torch.stack([one.double().abs().amax() for one in found]).amax()
            for name, found in self._extremes.items()
            if found
        }
        values = torch.stack(list(largest.values())).tolist() if largest else []
        sizes = dict.fromkeys(self._extremes, 0.0) | dict(zip(largest, values, strict=True))
        return {name: size * self._scales[name] * self.factor for name, size in sizes.items()}
