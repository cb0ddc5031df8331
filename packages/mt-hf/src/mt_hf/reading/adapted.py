"""Weights of a checkpoint that holds adapters alone: its base, with the adapters added.

It needs mt-ckpt, from the extra `mt-hf[cli]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mt_files import shorten
from mt_model import (
    LoraConfig,
    StackConfig,
    block_linears,
    grouped_layers,
    matrix_shape,
    saved_tensors,
)
from mt_tensor_parallel import GemmLayer, LoraAdapter, adapters, lora_delta
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.base import base_digest
from mt_hf.reading.pretrained import Pretrained, open_pretrained

if TYPE_CHECKING:
    from mt_ckpt import ArrayReader, SavedAdapters, SavedModel


@dataclass(frozen=True, kw_only=True)
class AdaptedWeights:
    """The merged weights of a run of adapters, each of which is read when it is asked for.

    Attributes:
        arrays: The checkpoint of the adapters.
        base: The weights that they adapt.
        adapters: The adapters by the names of their layers, without values.
        shapes: Shape of each parameter and buffer of the model.
        prefix: Prefix of the adapters' arrays.
        format: Format to which weights of linear layers are rounded before; None for none.
        linears: Linear layers whose weights are rounded, by name, without values.
    """

    arrays: ArrayReader
    base: ArrayReader | Pretrained
    adapters: Mapping[str, LoraAdapter]
    shapes: Mapping[str, tuple[int, ...]]
    prefix: str
    format: str | None
    linears: Mapping[str, GemmLayer]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of each weight of the base."""
        from mt_ckpt import RunFolder

        if isinstance(self.base, Pretrained):
            return dict.fromkeys(self.shapes, self.base.dtype)
        arrays = self.base.manifest.arrays
        own = {name: arrays.get(f"{RunFolder.WEIGHTS}/{name}") for name in self.shapes}
        return {name: getattr(torch, spec.dtype) for name, spec in own.items() if spec is not None}

    @torch.no_grad()
    def fill(self, name: str, into: Tensor, starts: Sequence[int] | None = None) -> None:
        """Fill a tensor with a box of a merged weight.

        Args:
            name: Name of the parameter in the whole model.
            into: Tensor of the box.
            starts: First index of the box in the whole parameter; None for the start.

        Raises:
            CheckpointError: The checkpoint or the base is damaged.
            ExchangeError: The base is damaged.
        """
        first = (0,) * into.dim() if starts is None else tuple(starts)
        adapter = self.adapters.get(name.removesuffix(".weight"))
        if adapter is None or not name.endswith(".weight"):
            self._fill_rounded(name, into, first)
            return
        a, b = self.matrices(name.removesuffix(".weight"))
        wide = torch.promote_types(a.dtype, torch.float32)
        values = torch.empty(into.shape, dtype=wide)
        self._fill_rounded(name, values, first)
        given = a.to(wide), b.to(wide), adapter.matrix, adapter.parts
        delta = lora_delta(*given, scale=adapter.scale, lead=adapter.layer.lead_dims)
        box = tuple(slice(at, at + n) for at, n in zip(first, into.shape, strict=True))
        into.copy_(values.add_(delta.view(self.shapes[name])[box]))

    def matrices(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a layer's adapter, as `LoraAdapter` has them."""
        a, b = (self._array(f"{self.prefix}/{layer}.lora.{side}") for side in ("a", "b"))
        return a, b

    def _array(self, name: str) -> Tensor:
        from mt_ckpt import CheckpointError, TensorShard

        spec = self.arrays.manifest.arrays.get(name)
        if spec is None:
            raise CheckpointError(f"{self.arrays.path}: has no {name}", tensor=name)
        values = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        self.arrays.fill(TensorShard(name, values))
        return values

    def _fill_rounded(self, name: str, into: Tensor, starts: tuple[int, ...]) -> None:
        """Fill a box of the base, with the values that the adapters were trained beside."""
        layer = self.linears.get(name.removesuffix(".weight"))
        if self.format is None or layer is None or not name.endswith(".weight"):
            self._fill_base(name, into, starts)
            return
        from mt_quant import quantize_weight  # only a rounded base needs it

        # Scales cover whole rows, or the whole matrix: each one that the box cuts is read.
        lead, shape = layer.lead_dims, self.shapes[name]
        box = tuple(slice(at, at + n) for at, n in zip(starts, into.shape, strict=True))
        for expert in range(into.shape[0]) if lead else (0,):
            whole = torch.empty(*(1,) * lead, *shape[lead:])
            self._fill_base(name, whole, (starts[0] + expert,) * lead + (0,) * len(shape[lead:]))
            codes = quantize_weight(whole.view(-1, matrix_shape(layer).columns), self.format)
            values = codes.dequantize(into.dtype).view(shape[lead:])
            (into[expert] if lead else into).copy_(values[box[lead:]])

    def _fill_base(self, name: str, into: Tensor, starts: tuple[int, ...]) -> None:
        from mt_ckpt import RunFolder, TensorShard

        if isinstance(self.base, Pretrained):
            self.base.fill(name, into, starts)
            return
        shape, stored = self.shapes[name], f"{RunFolder.WEIGHTS}/{name}"
        self.base.fill(TensorShard(stored, into, global_shape=shape, offsets=starts))


@contextmanager
def open_adapted(
    arrays: ArrayReader, saved: SavedModel, *, ema: bool = False
) -> Iterator[AdaptedWeights]:
    """Open the base of a checkpoint of adapters, and yield the merged weights.

    Args:
        arrays: The checkpoint.
        saved: Its metadata, with `adapters`.
        ema: Whether to add the moving average of the adapters.

    Raises:
        ExchangeError: The base is missing, has changed, or has other layers.
        CheckpointError: The base is a damaged step.
    """
    from mt_ckpt import RunFolder, open_arrays

    told = saved.adapters
    assert told is not None, "the caller asks"  # noqa: S101
    folder = Path(told.base)
    check_base(told, arrays.path)
    config = StackConfig.from_dict(saved.model)
    lora = LoraConfig(rank=told.rank, alpha=told.alpha, layers=told.layers)
    model = config.build(device="meta", lora=lora)
    found: dict[str, Any] = {
        "arrays": arrays,
        "adapters": dict(adapters(model)),
        "shapes": {n: tuple(x.shape) for n, x in saved_tensors(model) if ".lora." not in n},
        "prefix": RunFolder.EMA if ema else RunFolder.WEIGHTS,
        "format": told.base_format,
        "linears": {**block_linears(model), **grouped_layers(model)},
    }
    if not (folder / "zarr.json").is_file():
        pretrained = open_pretrained(folder).padded(getattr(config, "vocab_multiple", 1))
        yield AdaptedWeights(base=pretrained, **found)
        return
    with open_arrays(folder) as base:
        yield AdaptedWeights(base=base, **found)


def check_base(told: SavedAdapters, path: Path) -> None:
    """Check that the base of a checkpoint's adapters is there and is the one they adapt.

    Raises:
        ExchangeError: It is not.
    """
    digest = base_digest(Path(told.base))
    if digest != told.sha256:
        raise ExchangeError(
            f"{path} has adapters of {shorten(told.base, 200)}, whose weights have changed: their "
            f"sha256 is {digest[:12]}..., and was {told.sha256[:12]}...; restore them"
        )
