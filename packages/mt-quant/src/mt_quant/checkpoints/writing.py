"""Writing of quantised checkpoints, by layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from mt_files import did_you_mean, shorten
from torch import Tensor

from mt_quant.checkpoints import compressed, modelopt
from mt_quant.checkpoints.stored import StoredLinear
from mt_quant.error import QuantizationError


@dataclass(frozen=True, kw_only=True)
class LayoutWriter:
    """Layout in which a folder of Hugging Face stores quantised layers.

    Attributes:
        describe: Function of layers by name (pairs of a `WeightFormat` and an `InputFormat` or
            None), the `KVFormat` of keys and values or None, and the names of unquantised matrices;
            it returns the `quantization_config`.
        write: Function that returns the tensors of a layer, by the last part of their names.
        kv_names: The layout's own names for the scales of keys and values.
        files: Function that returns the files beside config.json, by name, from the
            `quantization_config`.
    """

    describe: Callable[..., dict[str, Any]]
    write: Callable[[StoredLinear, torch.dtype], dict[str, Tensor]]
    kv_names: Mapping[str, str] = field(default_factory=dict)
    files: Callable[[Mapping[str, Any]], dict[str, bytes]] = lambda described: {}

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
    compressed.METHOD: LayoutWriter(
        describe=compressed.describe_compressed, write=compressed.write_compressed
    ),
    modelopt.METHOD: LayoutWriter(
        describe=modelopt.describe_modelopt,
        write=modelopt.write_modelopt,
        kv_names=modelopt.KV_NAMES,
        files=modelopt.files_of,
    ),
}
