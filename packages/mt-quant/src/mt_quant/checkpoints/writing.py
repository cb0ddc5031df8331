"""Writing of quantised checkpoints, by layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from mt_files import did_you_mean, shorten
from torch import Tensor

from mt_quant.checkpoints import compressed, modelopt
from mt_quant.checkpoints.stored import StoredLinear
from mt_quant.error import QuantizationError
from mt_quant.formats.format import InputFormat, WeightFormat
from mt_quant.formats.kv_format import KVFormat


class Describe(Protocol):
    """Function that returns a `quantization_config`; see `describe_compressed`."""

    def __call__(
        self,
        layers: Mapping[str, tuple[WeightFormat, InputFormat | None]],
        kv_cache: KVFormat | None = None,
        kept: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return the description, or raise QuantizationError for a format the layout lacks."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayoutWriter:
    """Layout in which a folder of Hugging Face stores quantised layers.

    Attributes:
        name: Value of `quant_method`.
        describe: Returns the `quantization_config`.
        write: Returns the tensors of a layer, by the last part of their names.
        kv_names: Maps the names of the scales of keys and values to the layout's own names.
        files: Returns the files beside config.json, by name, from the `quantization_config`.
    """

    name: str
    describe: Describe
    write: Callable[[StoredLinear, torch.dtype], dict[str, Tensor]]
    kv_names: Callable[[Sequence[str]], dict[str, str]]
    files: Callable[[Mapping[str, Any]], dict[str, bytes]]

    @classmethod
    def of(cls, name: str) -> LayoutWriter:
        """Return a layout by name.

        Raises:
            QuantizationError: The name is unknown.
        """
        if name not in WRITERS:
            raise QuantizationError(
                f"unknown layout {shorten(name)}. {did_you_mean(str(name), WRITERS)}"
            )
        return WRITERS[name]


WRITERS: Mapping[str, LayoutWriter] = {
    writer.name: writer
    for writer in (
        LayoutWriter(
            name=compressed.METHOD,
            describe=compressed.describe_compressed,
            write=compressed.write_compressed,
            kv_names=lambda names: {name: name for name in names},
            files=lambda described: {},
        ),
        LayoutWriter(
            name=modelopt.METHOD,
            describe=modelopt.describe_modelopt,
            write=modelopt.write_modelopt,
            kv_names=modelopt.kv_names,
            files=modelopt.files_of,
        ),
    )
}
