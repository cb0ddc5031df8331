"""Sizes of a model's tensors before and after it is quantised."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from torch import Tensor, nn

from mt_quant.layers.linear import QuantizedLinear
from mt_quant.rules.config import QuantizationConfig
from mt_quant.rules.rule import Decision
from mt_quant.rules.table import table


@dataclass
class _Size:
    """Number of layers, their weights, and bytes before and after."""

    layers: int = 0
    weights: int = 0
    before: int = 0
    after: int = 0

    def __add__(self, other: _Size) -> _Size:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return _Size(*(own + more for own, more in pairs))

    def cells(self, rule: str) -> tuple[str, ...]:
        bits = (8 * size / max(self.weights, 1) for size in (self.before, self.after))
        return rule, str(self.layers), str(self.weights), *(f"{each:.2f}" for each in bits)


class ModelSizes:
    """Sizes of a model's weights by rule, recorded before it is quantised.

    Args:
        model: In full precision.
        config: The rules.

    Example:
        >>> from mt_quant import QuantizationConfig, quantize
        >>> model, config = nn.Sequential(nn.Linear(64, 8)), QuantizationConfig.named("int8")
        >>> sizes = ModelSizes(model, config)
        >>> print(sizes.report(quantize(model, config)))
        rule                                     layers  weights  bits before  bits after
        1: name='*', rtn, weight int8-channel         1      512        32.00        8.25
        everything but weights of linear layers       0        8        32.00       32.00
        all                                           1      520        32.00        8.62
    """

    def __init__(self, model: nn.Module, config: QuantizationConfig) -> None:
        self._config, self._before = config, dict[str, tuple[Decision, _Size]]()
        for name, decision in config.decide(model).items():
            weight = getattr(model.get_submodule(name), "weight", None)
            if isinstance(weight, Tensor):
                size = _Size(layers=1, weights=weight.numel(), before=weight.nbytes)
                self._before[name] = decision, size

    def report(self, model: nn.Module) -> str:
        """Return a table of sizes and bits for each weight.

        Args:
            model: The same model, quantised.
        """
        shares: dict[str, _Size] = {}
        for name, (decision, before) in self._before.items():
            layer = model.get_submodule(name)
            low = isinstance(layer, QuantizedLinear)
            before.after = layer.quantized_weight.nbytes if low else before.before
            rule = self._rule(decision)
            shares[rule] = shares.get(rule, _Size()) + before
        shares["everything but weights of linear layers"] = self._others(model)
        total = sum(shares.values(), _Size())
        rows = [("rule", "layers", "weights", "bits before", "bits after")]
        rows += [size.cells(rule) for rule, size in (shares | {"all": total}).items()]
        return table(rows, right=1)

    def _others(self, model: nn.Module) -> _Size:
        inside = tuple(f"{name}." for name in self._before)
        others = [p for n, p in model.named_parameters() if not n.startswith(inside)]
        # Biases are inside their layers; they are stored as they were.
        biases = [model.get_submodule(name).bias for name in self._before]
        others += [bias for bias in biases if isinstance(bias, Tensor)]
        size = sum(param.nbytes for param in others)
        return _Size(weights=sum(param.numel() for param in others), before=size, after=size)

    def _rule(self, decision: Decision) -> str:
        if decision.rule is None:
            return "no rule"
        rule = f"{decision.rule}: {self._config.rules[decision.rule]}"
        if decision.weight is None:
            return f"{rule}, as it is"
        inputs = "" if decision.input is None else f", input {decision.input}"
        return f"{rule}, {decision.method}, weight {decision.weight}{inputs}"
