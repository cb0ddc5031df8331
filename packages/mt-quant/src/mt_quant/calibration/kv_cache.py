"""Static scales of an attention cache, for each head of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from mt_files import check_type
from mt_parallel_state import Group
from torch import Tensor

from mt_quant.calibration.magnitudes import Magnitudes, find_range
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
        >>> calibrator.scales(limit=127)["layers.0"].key.shape
        torch.Size([2])
    """

    _seen: dict[str, tuple[Magnitudes, Magnitudes]] = field(default_factory=dict)

    def update(self, layer: str, key: Tensor, value: Tensor) -> None:
        """Add the keys and values that a layer's cache would hold.

        Shape:
            key: [B, S, heads, D]. value: [B, S, heads, D of values].

        Raises:
            QuantizationError: A tensor has a wrong shape or number of heads.
            CalibrationError: A value is not finite.
        """
        for name, tensor in (("key", key), ("value", value)):
            check_type(name, tensor, Tensor)
            if tensor.dim() != 4 or tensor.shape[2] != key.shape[2]:
                raise QuantizationError(
                    f"{layer}: {name} has shape {tuple(tensor.shape)}, expected [batch, tokens, "
                    "heads, head_dim], with as many heads as the keys"
                )
        if layer not in self._seen:
            heads = key.shape[2]
            self._seen[layer] = (
                Magnitudes(heads, device=key.device),
                Magnitudes(heads, device=key.device),
            )
        for magnitudes, tensor in zip(self._seen[layer], (key, value), strict=True):
            try:
                magnitudes.update(tensor.transpose(0, 2).flatten(1))
            except QuantizationError as error:
                raise type(error)(f"{layer}: {error}") from error

    def scales(
        self,
        *,
        limit: float = 448.0,
        by: str = "max",
        percentile: float = 99.99,
        each: Literal["head", "layer"] = "head",
        group: Group = None,
    ) -> Mapping[str, KVScales]:
        """Return each layer's scales: the range from `find_range` divided by the largest code.

        Args:
            limit: Largest code: 448 for e4m3, 127 for int8.
            by: See `find_range`.
            percentile: See `find_range`.
            each: Whether each head has a scale, or all heads use the layer's largest one.
            group: Ranks with other heads of the same layers, in the same order. With
                `each="layer"`, an all-reduce (MAX) runs for each layer.

        Raises:
            CalibrationError: There was no batch.
            QuantizationError: An argument is out of range.
        """
        if not 0 < limit < float("inf"):
            raise QuantizationError(f"limit must be above 0 and finite, got {limit}")
        if each not in ("head", "layer"):
            raise QuantizationError(f"each must be 'head' or 'layer', got {each!r}")
        if not self._seen:
            raise CalibrationError("no keys and values were seen; run at least one batch")

        def scale(magnitudes: Magnitudes) -> Tensor:
            found = find_range(magnitudes, by, percentile=percentile) / limit
            if each == "layer":
                largest = found.amax()
                if group is not None:
                    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
                found = largest.repeat(len(found))
            return torch.where(found > 0, found, 1.0)

        return {
            layer: KVScales(key=scale(key), value=scale(value))
            for layer, (key, value) in self._seen.items()
        }
