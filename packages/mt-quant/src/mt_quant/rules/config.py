"""The configuration of a quantised model: an ordered list of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mt_files import Checks, SchemaError, bind, check_type, to_plain
from mt_parallel_state import shardings
from torch import nn

from mt_quant.error import QuantizationError
from mt_quant.layers.shape import LinearShape
from mt_quant.rules.recipes import recipe
from mt_quant.rules.rule import Decision, Rule
from mt_quant.rules.table import table


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Rules in order; the first rule that matches a module decides.

    Attributes:
        rules: At least one.

    Example:
        >>> config = QuantizationConfig.named("int8")
        >>> print(config.explain(nn.Sequential(nn.Linear(4, 2))))
        module  weight        input  kv cache  method  rule
        0       int8-channel  -      -         rtn     1: name='*'

    Raises:
        FieldError: The list is empty.
    """

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        checks = Checks(self)
        if not self.rules:
            checks.add("rules", "there is no rule; write at least one")
        checks.done()

    @classmethod
    def named(cls, name: str, *, group_size: int | None = None) -> Self:
        """Return the rules of a recipe by name.

        Args:
            name: One of `RECIPES`.
            group_size: Number of neighbouring inputs that share a scale, for a recipe of int4; None
                is the largest of 128, 64 and 32 that divides a layer's inputs.

        Raises:
            QuantizationError: The name is unknown, or the recipe has no groups of this size.
        """
        return cls(rules=recipe(name, group_size))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Return the rules in plain values, as `to_dict` returns them.

        Raises:
            QuantizationError: A value is wrong; the message lists all problems by path.
        """
        return cls._bound(value, "")

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Return the rules of a YAML file.

        Raises:
            FileError: The file can't be read.
            QuantizationError: A value is wrong; the message lists all problems by path.
        """
        from mt_files import read_yaml  # only rules in files need it

        try:
            return cls._bound(read_yaml(path).root, f"{path}: ")
        except SchemaError as error:
            raise QuantizationError(str(error)) from error

    @classmethod
    def _bound(cls, value: object, where: str) -> Self:
        if not isinstance(value, Mapping):
            raise QuantizationError(f"{where}expected a mapping with `rules:`")
        bound = bind(cls, value)
        if bound.value is None:
            raise QuantizationError(f"{where}{SchemaError(bound.problems, bound.hidden)}")
        return bound.value

    def to_dict(self) -> dict[str, Any]:
        """Return the rules as plain values for JSON or YAML."""
        return to_plain(self)

    def decide(self, model: nn.Module) -> dict[str, Decision]:
        """Return the decision for each linear layer, and for each module with a `kv_cache` rule.

        All problems that show without reading a weight are reported together.

        Raises:
            QuantizationError: A rule that is not optional matches nothing, or a format does not
                fit a layer; the message lists all problems.
        """
        check_type("model", model, nn.Module)
        shardings(model)  # restores the records of copied parameters
        decisions: dict[str, Decision] = {}
        unused, problems = dict(enumerate(self.rules)), []
        for name, module in model.named_modules():
            shape = LinearShape.of(module)
            matching = [i for i, rule in enumerate(self.rules) if rule.matches(name, module, shape)]
            for index in matching:
                unused.pop(index, None)
            if shape is not None or matching:
                first = self.rules[matching[0]].decision(matching[0]) if matching else Decision()
                if shape is None:  # other modules get a format of keys and values at most
                    first = Decision(rule=first.rule, kv_cache=first.kv_cache)
                decisions[name] = first
                problems += _misfits(name, first, shape)
        problems += [
            f"rules[{index}] ({rule}) matches nothing; correct it, or say `optional: true`"
            for index, rule in unused.items()
            if not rule.optional
        ]
        if problems:
            raise QuantizationError("\n".join(problems))
        return decisions

    def explain(self, model: nn.Module) -> str:
        """Return a table of each module's decision and the rule that made it."""
        rows = [["module", "weight", "input", "kv cache", "method", "rule"]]
        for name, decision in self.decide(model).items():
            formats = (decision.weight, decision.input, decision.kv_cache)
            cells = ["-" if value is None else str(value) for value in formats]
            method = decision.method if decision.weight is not None else "-"
            index = decision.rule
            rule = "none matches" if index is None else f"{index}: {self.rules[index]}"
            rows.append([name, *cells, method, rule])
        return table(rows)


def _misfits(name: str, decision: Decision, shape: LinearShape | None) -> list[str]:
    """Return the reasons why a decision can't be carried out."""
    if shape is None or decision.weight is None:
        return []
    format, columns = decision.weight, shape.whole_columns
    try:
        format.group_size(columns)
    except QuantizationError as error:
        return [f"{name}: {error}"]
    if format.bits == 4 and shape.columns % 2:
        return [f"{name}: {shape.columns} inputs can't be stored two to a byte; use int8"]
    if shape.split != "inputs":
        return []
    cut = decision.cut_group(shape.run)
    if cut is None:
        return []
    return [
        f"{name}: groups of {cut} inputs are cut where the ranks split {columns} inputs, "
        f"{shape.run} next to each other on each; use a divisor of {shape.run}"
    ]
