"""Static scales of an attention cache, for each head of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from mt_parallel_state import Group
from torch import Tensor

from mt_quant.error import CalibrationError, QuantizationError
from mt_quant.formats.kv_format import KVFormat


@dataclass(frozen=True, kw_only=True, eq=False)
class KVScales:
    """Static scales of a layer's keys and values.

    Attributes:
        key: Scale of each key head.
        value: Scale of each value head.

    Shape:
        key, value: fp32 [heads].
    """

    key: Tensor
    value: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class KVScheme:
    """Format and scales of one layer's keys and values.

    Attributes:
        format: Number format.
        scales: Static scales of all heads of the layer; None for a format without static scales.

    Raises:
        CalibrationError: The format needs static scales, and there are none.
    """

    format: KVFormat
    scales: KVScales | None = None

    def __post_init__(self) -> None:
        if self.format.is_static and self.scales is None:
            raise CalibrationError(
                f"{self.format} has scales from calibration, and there are none; calibrate the "
                f"model, or use {self.format.type}, which makes a scale for each head of each token"
            )


@dataclass(kw_only=True)
class KVCalibrator:
    """Collects keys and values, batch by batch, and computes their static scales.

    Example:
        >>> calibrator = KVCalibrator()
        >>> calibrator.update("layers.0", torch.ones(1, 5, 2, 8), torch.ones(1, 5, 2, 8))
        >>> calibrator.scales(KVFormat.named("int8-head"))["layers.0"].key.shape
        torch.Size([2])
    """

    _largest: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def update(self, layer: str, key: Tensor, value: Tensor) -> None:
        """Add the keys and values that a layer's cache would hold.

        Shape:
            key: [B, S, heads, D]. value: [B, S, heads, D of values].

        Raises:
            QuantizationError: A tensor has a wrong shape or number of heads.
            CalibrationError: A value is not finite.
        """
        known = self._largest.get(layer)
        heads = key.shape[2] if known is None else len(known[0])
        for name, tensor in (("key", key), ("value", value)):
            if tensor.dim() != 4 or tensor.shape[2] != heads:
                raise QuantizationError(
                    f"{layer}: {name} has shape {tuple(tensor.shape)}, expected [batch, tokens, "
                    f"heads, head_dim], with {heads} heads"
                )
        found = key.abs().amax((0, 1, 3)).float(), value.abs().amax((0, 1, 3)).float()
        if not bool(torch.stack(found).isfinite().all()):
            raise CalibrationError(
                f"{layer}: keys or values are not finite; the model or its calibration data gives "
                "NaN or infinity here"
            )
        if known is not None:
            found = torch.maximum(known[0], found[0]), torch.maximum(known[1], found[1])
        self._largest[layer] = found

    def scales(self, format: KVFormat, *, group: Group = None) -> Mapping[str, KVScales]:
        """Return each layer's scales: the largest magnitude divided by the largest code.

        Args:
            format: Static format: its group is a head, or all heads of the layer.
            group: Ranks with other heads of the same layers, in the same order. Where all heads of
                a layer share a scale, an all-reduce (MAX) runs for its keys and for its values.

        Raises:
            CalibrationError: There was no batch.
        """
        if not self._largest:
            raise CalibrationError("no keys and values were seen; run at least one batch")

        def scale(largest: Tensor) -> Tensor:
            found = largest / format.limit
            if format.group == "tensor":
                most = found.amax()
                if group is not None:
                    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
                found = most.repeat(len(found))
            return torch.where(found > 0, found, 1.0)

        return {
            layer: KVScales(key=scale(key), value=scale(value))
            for layer, (key, value) in self._largest.items()
        }
