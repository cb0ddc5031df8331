"""Rules that give layers their formats and methods."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any, TypeVar

from mt_files import Checks
from torch import nn

from mt_quant.error import QuantizationError
from mt_quant.formats.format import BLOCKS, InputFormat, WeightFormat
from mt_quant.formats.kv_format import KVFormat
from mt_quant.layers.shape import LinearShape
from mt_quant.methods.registry import check_method
from mt_quant.pattern import pattern_of

F = TypeVar("F")
_REGEX = "re:"


@dataclass(frozen=True, kw_only=True)
class ShapeCondition:
    """Condition on the sizes of a whole weight, over all ranks.

    Attributes:
        min_inputs: Smallest number of inputs.
        min_outputs: Smallest number of outputs.
        inputs_multiple_of: Number that must divide the inputs.
        outputs_multiple_of: Number that must divide the outputs.

    Raises:
        FieldError: A number is below 1.
    """

    min_inputs: int = 1
    min_outputs: int = 1
    inputs_multiple_of: int = 1
    outputs_multiple_of: int = 1

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "min_inputs", "min_outputs", "inputs_multiple_of")
        checks.at_least(1, "outputs_multiple_of")
        checks.done()

    def holds(self, rows: int, columns: int) -> bool:
        """Return whether a weight with these outputs (rows) and inputs meets the condition."""
        return (
            columns >= self.min_inputs
            and rows >= self.min_outputs
            and columns % self.inputs_multiple_of == 0
            and rows % self.outputs_multiple_of == 0
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Formats and method of one module.

    Attributes:
        rule: Index of the rule that decided; None if no rule matched.
        weight: Format of the weight; None leaves the weight as it is.
        input: Format of the input.
        kv_cache: Format of the cached keys and values; the engine with the cache applies it.
        method: Name of the method that rounds the weight.
        options: Options of the method.
    """

    rule: int | None = None
    weight: WeightFormat | None = None
    input: InputFormat | None = None
    kv_cache: KVFormat | None = None
    method: str = "rtn"
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    def cut_group(self, run: int) -> int | None:
        """Return the size of a group of inputs that runs of neighbouring inputs cut, if any.

        Args:
            run: Number of neighbouring inputs that one rank has, where ranks split the inputs.
        """
        group = None if self.weight is None else self.weight.group
        sizes = [group if isinstance(group, int) else 1]
        sizes += [BLOCKS.get(self.input.type, 1)] if self.input is not None else []
        return next((size for size in sizes if run % size), None)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Conditions on a module, all of which must hold, and the formats and method it gets.

    Attributes:
        name: Pattern of the module's dotted name: a glob whose `*` crosses dots, or `re:` and a
            regular expression for the whole name, of a form that matches in linear time.
        type: Name of the module's class; None for any.
        shape: Condition on the sizes of the weight; None for any.
        weight: Format of the weight, or its name; None keeps the layer as it is.
        input: Format of the input.
        kv_cache: Format of keys and values; also for modules that aren't linear layers.
        method: Method that rounds the weight: rtn, gptq, awq, smoothquant or svdquant.
        options: Options of the method.
        optional: Whether the rule may match nothing.

    Raises:
        FieldError: A format, method or option is unknown, or the pattern is invalid.
    """

    name: str = "*"
    type: str | None = None
    shape: ShapeCondition | None = None
    weight: WeightFormat | str | None = None
    input: InputFormat | str | None = None
    kv_cache: KVFormat | str | None = None
    method: str = "rtn"
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    optional: bool = False

    def __post_init__(self) -> None:
        checks = Checks(self)
        readers: dict[str, Callable[[Any], Any]] = {"name": _matcher}
        readers |= {"weight": WeightFormat.named} if isinstance(self.weight, str) else {}
        readers |= {"input": InputFormat.named} if isinstance(self.input, str) else {}
        readers |= {"kv_cache": KVFormat.named} if isinstance(self.kv_cache, str) else {}
        for name, read in readers.items():
            try:
                read(getattr(self, name))
            except ValueError as error:
                checks.add(name, str(error))
        try:
            check_method(self.method, self.options)
        except QuantizationError as error:
            checks.add("method", str(error))
        if self.weight is None and self.input is not None:
            checks.add("weight", "an input is rounded only with a weight: name a format")
        checks.done()

    def decision(self, index: int) -> Decision:
        """Return the decision for a module that this rule, at this index, matches."""
        return Decision(
            rule=index,
            weight=_format(self.weight, WeightFormat.named),
            input=_format(self.input, InputFormat.named),
            kv_cache=_format(self.kv_cache, KVFormat.named),
            method=self.method,
            options=self.options,
        )

    def matches(self, name: str, module: nn.Module, shape: LinearShape | None) -> bool:
        """Return whether the rule matches a module; `shape` is None if it is no linear layer."""
        if shape is None and self.kv_cache is None:
            return False
        if self.type is not None and type(module).__name__ != self.type:
            return False
        if self.shape is not None and (
            shape is None or not self.shape.holds(shape.whole_rows, shape.whole_columns)
        ):
            return False
        return _matcher(self.name)(name)

    def __str__(self) -> str:
        parts = [f"name={self.name!r}"]
        parts += [f"type={self.type!r}"] if self.type is not None else []
        parts += [f"shape={self.shape}"] if self.shape is not None else []
        return ", ".join(parts)


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that says whether a name matches."""
    if pattern.startswith(_REGEX):
        found = pattern_of(pattern.removeprefix(_REGEX))
        return lambda name: found.matches(name, whole=True)
    glob = re.compile(translate(pattern))  # `re` caches recent patterns
    return lambda name: glob.fullmatch(name) is not None


def _format(value: F | str | None, named: Callable[[str], F]) -> F | None:
    return named(value) if isinstance(value, str) else value
