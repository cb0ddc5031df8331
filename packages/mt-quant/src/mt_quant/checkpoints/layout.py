"""Reading of quantised checkpoints, by the `quantization_config` of their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from mt_files import did_you_mean, shorten
from torch import Tensor

from mt_quant.checkpoints import modelopt
from mt_quant.checkpoints.compressed import (
    LEAVES,
    METHOD,
    block_weight,
    by_groups,
    read_compressed,
    scaled_weight,
)
from mt_quant.checkpoints.stored import StoredLinear, check_e4m3, check_shape, needed
from mt_quant.error import QuantizationError
from mt_quant.formats.packing import unpack_words

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the output of each code in a word of AWQ, from the lowest bits."""

_Read = Callable[[Mapping[str, Any], str, Mapping[str, Tensor]], StoredLinear]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of the quantised linear layers in a checkpoint.

    Attributes:
        name: Value of `quant_method`.
        leaves: Last parts of the names of a layer's tensors, besides `weight` and `bias`.
        reader: Function that makes a layer from its tensors.
        config: The `quantization_config`.
    """

    name: str
    leaves: tuple[str, ...]
    reader: _Read
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Layout:
        """Return the layout of a `quantization_config`.

        Raises:
            QuantizationError: The layout is unknown.
        """
        name = config.get("quant_method")
        if not isinstance(name, str) or name not in LAYOUTS:
            raise QuantizationError(
                f"quant_method {shorten(name)} of quantization_config is unknown. "
                f"{did_you_mean(str(name), LAYOUTS)}"
            )
        return replace(LAYOUTS[str(name)], config=config)

    def shape(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return the number of outputs and inputs of a layer.

        Raises:
            QuantizationError: The layer has no codes.
        """
        if "weight" in tensors:
            rows, columns = tensors["weight"].shape
            return rows, columns * (2 if tensors["weight"].dtype == torch.uint8 else 1)
        if "weight_packed" in tensors and tensors["weight_packed"].dtype == torch.uint8:
            rows, columns = tensors["weight_packed"].shape
            return rows, 2 * columns
        if "weight_packed" in tensors:
            sizes = needed(tensors, "weight_shape")[0]
            check_shape("weight_shape", sizes, (2,))
            return int(sizes[0]), int(sizes[1])
        words, scale = needed(tensors, "qweight", "scales")
        each = 1 if self.name == "awq" else 32 // _bits(self.config)
        return scale.shape[1], words.shape[0] * each

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> StoredLinear:
        """Return a layer from its name and its tensors, by the last part of their names.

        Raises:
            QuantizationError: A tensor is missing or has a wrong shape or dtype, or a setting of
                the configuration is unknown.
        """
        return self.reader(self.config, name, tensors)


def _gptq(config: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> StoredLinear:
    del name
    bits = _bits(config)
    words, zeros, scale = needed(tensors, "qweight", "qzeros", "scales")
    groups, outputs = scale.shape
    columns = words.shape[0] * 32 // bits
    _check_groups(config, groups, columns)
    check_shape("qweight", words, (columns * bits // 32, outputs))
    check_shape("qzeros", zeros, (groups, outputs * bits // 32))
    codes = unpack_words(words.t().contiguous(), bits, columns)
    zero = unpack_words(zeros, bits, outputs)
    if config.get("checkpoint_format", "gptq") != "gptq_v2":
        zero = (zero + 1) & ((1 << bits) - 1)  # version 1 stores zero points minus one
    made = by_groups(codes, scale.t(), zero.t().contiguous(), bits, tensors.get("g_idx"))
    return StoredLinear(weight=made[0], order=made[1])


def _awq(config: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> StoredLinear:
    del name
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm" or _bits(config) != 4:
        raise QuantizationError(
            f"AWQ version {version!r} with {_bits(config)} bits is not supported; use 'gemm' with 4"
        )
    words, scale = needed(tensors, "qweight", "scales")
    groups, outputs = scale.shape
    _check_groups(config, groups, words.shape[0])
    check_shape("qweight", words, (words.shape[0], outputs // 8))
    codes, zero = _awq_codes(words, outputs), None
    if config.get("zero_point", True):
        zeros = needed(tensors, "qzeros")[0]
        check_shape("qzeros", zeros, (groups, outputs // 8))
        zero = _awq_codes(zeros, outputs).t().contiguous()
    made = by_groups(codes.t().contiguous(), scale.t(), zero, 4, None)
    return StoredLinear(weight=made[0])


def _awq_codes(words: Tensor, count: int) -> Tensor:
    codes = unpack_words(words, 4, count).unflatten(1, (-1, 8))
    return codes[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1)


def _check_groups(config: Mapping[str, Any], groups: int, columns: int) -> None:
    """Refuse scales of another number of groups than `group_size` makes of a layer's inputs."""
    size = config.get("group_size", config.get("q_group_size"))
    if size is None or config.get("dynamic"):  # layers may have sizes of their own
        return
    if type(size) is not int or (size < 2 and size != -1):
        raise QuantizationError(
            f"group_size of quantization_config is {shorten(size)}; use 2 or more, or -1 for one "
            "group"
        )
    expected = 1 if size == -1 else -(-columns // size)
    if groups != expected:
        raise QuantizationError(
            f"scales has {groups} groups of {columns} inputs, and group_size {size} of "
            f"quantization_config makes {expected}; restore the file or config.json"
        )


def _bits(config: Mapping[str, Any]) -> int:
    bits = config.get("bits", config.get("w_bit"))
    if bits not in (4, 8):
        raise QuantizationError(f"bits of quantization_config is {shorten(bits)}; use 4 or 8")
    return int(bits)


def _fp8(config: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> StoredLinear:
    del name
    data, scale = needed(tensors, "weight", "weight_scale_inv")
    check_e4m3("weight", data)
    block = config.get("weight_block_size")
    if block is None:
        return StoredLinear(weight=scaled_weight(data, scale))
    if not isinstance(block, list) or len(block) != 2:
        raise QuantizationError(f"weight_block_size is {shorten(block)}, and two are needed")
    return StoredLinear(weight=block_weight(data, scale, (int(block[0]), int(block[1]))))


LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(name=METHOD, leaves=LEAVES, reader=read_compressed),
        Layout(name="gptq", leaves=("qweight", "qzeros", "scales", "g_idx"), reader=_gptq),
        Layout(name="awq", leaves=("qweight", "qzeros", "scales"), reader=_awq),
        Layout(name="fp8", leaves=("weight_scale_inv",), reader=_fp8),
        Layout(name=modelopt.METHOD, leaves=modelopt.LEAVES, reader=modelopt.read_modelopt),
    )
}
