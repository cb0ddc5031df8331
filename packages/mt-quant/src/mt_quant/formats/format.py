"""Number formats of weights and activations, as values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from mt_files import Checks, did_you_mean

from mt_quant.error import QuantizationError

if TYPE_CHECKING:
    from mt_fp8 import Scaling

WeightType = Literal["int8", "int4", "fp8", "mxfp8", "mxfp4", "nvfp4"]
InputType = Literal["int8", "fp8", "mxfp8", "mxfp4", "nvfp4"]
WEIGHT_TYPES: tuple[WeightType, ...] = get_args(WeightType)
INPUT_TYPES: tuple[InputType, ...] = get_args(InputType)
BLOCKS: Mapping[str, int] = MappingProxyType({"mxfp8": 32, "mxfp4": 32, "nvfp4": 16})
"""Number of neighbouring inputs that share a scale, for formats that fix it."""
_INTEGERS = ("int8", "int4")
_FP4 = ("mxfp4", "nvfp4")
_GROUP = re.compile(r"g(\d{1,6})")


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """Number format of a weight.

    Attributes:
        type: Element type: an integer, or a float of mt-fp8. `fp8` is e4m3 with fp32 scales; the
            others are blocks of e4m3 (`mxfp8`) or e2m1 (`mxfp4`, `nvfp4`).
        group: Elements that share a scale: the whole `tensor`, one output `channel`, or a number
            of neighbouring inputs of one output (32 for mxfp8 and mxfp4, 16 for nvfp4).
        symmetric: Whether the middle code stands for zero; otherwise each group has a zero point.

    Example:
        >>> str(WeightFormat.named("int4-g64-asym"))
        'int4-g64-asym'

    Raises:
        FieldError: A value is out of range, or not available for this type.
    """

    type: WeightType
    group: int | Literal["tensor", "channel"] = "channel"
    symmetric: bool = True

    def __post_init__(self) -> None:
        checks = Checks(self)
        block = BLOCKS.get(self.type)
        if isinstance(self.group, int) and self.group < 2:
            checks.add("group", f"must be 2 or more inputs, got {self.group}")
        elif block is not None and self.group != block:
            checks.add("group", f"{self.type} has blocks of {block}, got {self.group!r}")
        if not self.symmetric and not self.is_integer:
            checks.add("symmetric", f"{self.type} has signs, no zero points; use true")
        checks.done()

    @classmethod
    def named(cls, name: str) -> Self:
        """Return a format by name, such as `int8`, `int8-tensor`, `int4-g128-asym` or `mxfp4`.

        `int4` without a group has groups of 128.

        Raises:
            QuantizationError: The name is unknown.
        """
        kind, *words = name.split("-")
        if kind not in WEIGHT_TYPES:
            raise QuantizationError(_unknown("weight format", name, WEIGHT_TYPES))
        group: int | Literal["tensor", "channel"] = BLOCKS.get(kind, "channel")
        group = 128 if kind == "int4" else group
        symmetric = True
        for word in words:
            size = _GROUP.fullmatch(word)
            if size is not None:
                group = int(size[1])
            elif word == "tensor" or word == "channel":
                group = word
            elif word == "asym":
                symmetric = False
            else:
                allowed = "tensor, channel, gN (inputs that share a scale) and asym"
                raise QuantizationError(f"weight format {name!r}: {word!r} is none of {allowed}")
        return cls(type=kind, group=group, symmetric=symmetric)

    def __str__(self) -> str:
        if self.type in BLOCKS:
            return self.type
        group = f"g{self.group}" if isinstance(self.group, int) else self.group
        return f"{self.type}-{group}{'' if self.symmetric else '-asym'}"

    @property
    def is_integer(self) -> bool:
        """Whether the codes are integers."""
        return self.type in _INTEGERS

    @property
    def bits(self) -> int:
        """Number of bits of one element."""
        return 4 if self.type == "int4" or self.type in _FP4 else 8

    @property
    def codes(self) -> tuple[int, int]:
        """Smallest and largest integer code."""
        if not self.symmetric:
            return 0, (1 << self.bits) - 1
        return (-8, 7) if self.type == "int4" else (-127, 127)

    @property
    def scaling(self) -> Scaling:
        """Scaling by which mt-fp8 quantises a matrix to this float format."""
        group = self.group
        block = (1, group) if isinstance(group, int) else {"channel": "row"}.get(group, "tensor")
        return _scaling(self.type, block)

    @property
    def scale_dims(self) -> str:
        """Letters of the dims of scales: `o` for outputs, `i` for groups of inputs, `1` for one."""
        return "oi" if isinstance(self.group, int) else {"channel": "o1"}.get(self.group, "11")

    def group_size(self, columns: int) -> int:
        """Return the number of inputs of one output that share a scale.

        Raises:
            QuantizationError: The group does not divide the inputs.
        """
        if not isinstance(self.group, int):
            return columns
        if columns % self.group:
            raise QuantizationError(
                f"groups of {self.group} inputs ({self}) do not divide {columns} inputs; use a "
                f"divisor of {columns} (--group-size), or a rule that leaves this layer out"
            )
        return self.group


@dataclass(frozen=True, kw_only=True)
class InputFormat:
    """Number format of an activation.

    Attributes:
        type: Element type.
        group: Elements that share a scale: the whole `tensor`, one `token`, or one `block` of
            mxfp8, mxfp4 or nvfp4.
        dynamic: Whether each input gets a scale of its own; otherwise calibration gives one scale,
            and the group is the tensor.

    Raises:
        FieldError: A value is out of range, or not available for this type.
    """

    type: InputType
    group: Literal["tensor", "token", "block"] = "token"
    dynamic: bool = True

    def __post_init__(self) -> None:
        checks = Checks(self)
        if (self.type in BLOCKS) != (self.group == "block"):
            allowed = "block" if self.type in BLOCKS else "tensor or token"
            checks.add("group", f"{self.type} has scales by {allowed}, got {self.group!r}")
        elif not self.dynamic and self.group != "tensor":
            checks.add("group", "a static scale is one number: use `group: tensor`")
        checks.done()

    @classmethod
    def named(cls, name: str) -> Self:
        """Return a format by name: `int8` (a scale for each token), `fp8-tensor`, `int8-static`.

        Raises:
            QuantizationError: The name is unknown.
        """
        kind, _, word = name.partition("-")
        ends = ("",) if kind in BLOCKS else ("", "token", "tensor", "static")
        if kind not in INPUT_TYPES or word not in ends:
            known = [
                *BLOCKS,
                *(f"{k}{e}" for k in ("int8", "fp8") for e in ("", "-tensor", "-static")),
            ]
            raise QuantizationError(_unknown("format of activations", name, known))
        if kind in BLOCKS:
            return cls(type=kind, group="block")
        group = "token" if word in ("", "token") else "tensor"
        return cls(type=kind, group=group, dynamic=word != "static")

    def __str__(self) -> str:
        if self.type in BLOCKS:
            return self.type
        return f"{self.type}-{self.group if self.dynamic else 'static'}"

    @property
    def limit(self) -> float:
        """Largest value of an element."""
        return 127.0 if self.type == "int8" else self.scaling.elements.max

    @property
    def scaling(self) -> Scaling:
        """Scaling by which mt-fp8 quantises rows to this float format."""
        named = {"token": "row", "tensor": "tensor"}
        return _scaling(self.type, named.get(self.group) or (1, BLOCKS[self.type]))


def _scaling(kind: str, block: Any) -> Scaling:
    from mt_fp8 import Scaling  # only floats need it

    if kind == "fp8":
        return Scaling(block=block)
    element = "e2m1" if kind in _FP4 else "e4m3"
    return Scaling(format=element, block=block, scale="nvfp4" if kind == "nvfp4" else "e8m0")


def _unknown(what: str, name: str, known: tuple[str, ...] | list[str]) -> str:
    return f"unknown {what} {name!r}. {did_you_mean(name, known)}"
