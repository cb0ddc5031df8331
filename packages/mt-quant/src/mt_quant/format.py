"""Number formats of weights and activations, as values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from mt_files import Checks, did_you_mean

from mt_quant.error import QuantizationError

WeightType = Literal["int8", "int4"]
InputType = Literal["int8"]
WEIGHT_TYPES: tuple[WeightType, ...] = ("int8", "int4")
INPUT_TYPES: tuple[InputType, ...] = ("int8",)
_GROUP = re.compile(r"g(\d{1,6})")


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How the elements of a weight are stored.

    Attributes:
        type: Of an element.
        group: What shares a scale: the whole `tensor`, one output `channel`, or so many
            neighbouring inputs of one output.
        symmetric: Whether zero is the middle of the codes; else each group has a zero point.

    Example:
        >>> str(WeightFormat.named("int4-g64-asym"))
        'int4-g64-asym'

    Raises:
        FieldError: A value is out of range, or the type does not have it.
    """

    type: WeightType
    group: int | Literal["tensor", "channel"] = "channel"
    symmetric: bool = True

    def __post_init__(self) -> None:
        checks = Checks(self)
        if isinstance(self.group, int) and self.group < 2:
            checks.add("group", f"must be 2 or more inputs, got {self.group}")
        checks.done()

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the format of a name such as `int8`, `int8-tensor`, `int4-g128` or `int4-asym`.

        An int4 without a group has groups of 128.

        Raises:
            QuantizationError: There is none of this name.
        """
        kind, *words = name.split("-")
        if kind not in WEIGHT_TYPES:
            raise QuantizationError(_unknown("weight format", name, WEIGHT_TYPES))
        group: int | Literal["tensor", "channel"] = 128 if kind == "int4" else "channel"
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
        group = f"g{self.group}" if isinstance(self.group, int) else self.group
        return f"{self.type}-{group}{'' if self.symmetric else '-asym'}"

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return 4 if self.type == "int4" else 8

    @property
    def codes(self) -> tuple[int, int]:
        """The least and the greatest code."""
        if not self.symmetric:
            return 0, (1 << self.bits) - 1
        return (-8, 7) if self.type == "int4" else (-127, 127)

    def group_size(self, columns: int) -> int:
        """Return how many inputs of one output share a scale.

        Raises:
            QuantizationError: The group does not divide the inputs.
        """
        if not isinstance(self.group, int):
            return columns
        if columns % self.group:
            raise QuantizationError(
                f"groups of {self.group} inputs ({self}) do not divide {columns} inputs; use a "
                f"divisor of {columns}, or a rule that leaves this layer out"
            )
        return self.group


@dataclass(frozen=True, kw_only=True)
class InputFormat:
    """How the elements of an activation are rounded.

    Attributes:
        type: Of an element.
        group: What shares a scale: the whole `tensor`, or one `token`.
        dynamic: Whether the scale is made for each input; else it is one number, from calibration,
            and the group is the tensor.

    Raises:
        FieldError: A value is out of range, or the type does not have it.
    """

    type: InputType
    group: Literal["tensor", "token"] = "token"
    dynamic: bool = True

    limit: ClassVar[float] = 127.0

    def __post_init__(self) -> None:
        checks = Checks(self)
        if not self.dynamic and self.group != "tensor":
            checks.add("group", "a static scale is one number: use `group: tensor`")
        checks.done()

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the format of a name: `int8` (one scale a token), `int8-tensor`, `int8-static`.

        Raises:
            QuantizationError: There is none of this name.
        """
        kind, _, word = name.partition("-")
        if kind not in INPUT_TYPES or word not in ("", "token", "tensor", "static"):
            known = [f"{kind}{end}" for kind in INPUT_TYPES for end in ("", "-tensor", "-static")]
            raise QuantizationError(_unknown("format of activations", name, known))
        group = "token" if word in ("", "token") else "tensor"
        return cls(type=kind, group=group, dynamic=word != "static")

    def __str__(self) -> str:
        return f"{self.type}-{self.group if self.dynamic else 'static'}"


def _unknown(what: str, name: str, known: tuple[str, ...] | list[str]) -> str:
    return f"unknown {what} {name!r}. {did_you_mean(name, known)}"
