"""A model's tensors by their names in a folder of Hugging Face, for other formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from mt_model import ModelConfig, Sizes
from torch import Tensor

from mt_hf.family.error import ExchangeError
from mt_hf.reading.finite import check_finite
from mt_hf.reading.pretrained import Pretrained
from mt_hf.writing.checkpoint import open_checkpoint
from mt_hf.writing.export import FILE_SIZE, Export, plan_export

Source: TypeAlias = str | Path | Pretrained
"""A run folder or its checkpoint, or a checked folder of Hugging Face."""


@dataclass(frozen=True, kw_only=True)
class NamedTensors:
    """The tensors of a model, each of which is read when it is asked for.

    Attributes:
        family: Name of the model's family.
        config: Config of the model.
        shapes: Shape of each tensor.
        fill: Function that fills a tensor by its name.
    """

    family: str
    config: ModelConfig
    shapes: Mapping[str, Sizes]
    fill: Callable[[str, Tensor], None]

    def read(self, name: str) -> Tensor:
        """Return a tensor in fp32.

        Raises:
            ExchangeError: A value is not finite.
        """
        values = torch.empty(self.shapes[name], dtype=torch.float32)
        self.fill(name, values)
        if values.numel() and not all(map(torch.isfinite, values.aminmax())):
            raise ExchangeError(f"{name} has values that are not finite in float32; restore it")
        return values


@contextmanager
def open_source(source: Source, *, ema: bool = False) -> Iterator[NamedTensors]:
    """Yield the tensors of a model that writes text.

    Args:
        source: A run folder or its checkpoint, or a checked folder of Hugging Face.
        ema: Whether to read the moving average of a run's weights.

    Raises:
        ExchangeError: The model is of no known family, or writes no text.
        CheckpointError: The checkpoint is damaged, or holds no model.
        FileError: A file can't be read.
    """
    if not isinstance(source, Pretrained):
        with open_checkpoint(source, ema=ema) as (export, fill):
            yield _named(export, fill)
        return
    if ema:
        raise ExchangeError(f"{source.folder} is a folder of Hugging Face and has no average")
    export = plan_export(
        source.config,
        like=source.folder,
        family=source.family.name,
        dtype=None,
        dtypes={name: tensor.dtype for name, tensor in source.tensors.items()},
        file_size=FILE_SIZE,
    )

    def copy(name: str, into: Tensor) -> None:
        stored = source.tensors[name]
        into.copy_(stored.map())
        check_finite(into, stored)

    yield _named(export, copy)


def _named(export: Export, fill: Callable[[str, Tensor], None]) -> NamedTensors:
    if not isinstance(export.config, ModelConfig):
        raise ExchangeError(f"a {export.family.name} model writes no text; export one that does")
    shapes = {tensor.name: tensor.shape for part in export.files.values() for tensor in part}
    return NamedTensors(family=export.family.name, config=export.config, shapes=shapes, fill=fill)
