"""Rounding of a linear layer's weight and input in training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mt_quant.error import QuantizationError
from mt_quant.formats.activation import round_activation
from mt_quant.formats.weight import quantize_weight
from mt_quant.layers.part import spans_ranks
from mt_quant.layers.shape import LinearShape
from mt_quant.rules.rule import Decision


class FakeQuantizer:
    """Round a layer's weight and input as `quantize` will, with the layer in full precision.

    Gradients pass the rounding unchanged (straight-through estimator, Bengio et al. 2013,
    https://arxiv.org/abs/1308.3432): the input's gradient is computed with the rounded weight, and
    the weight's gradient, computed with the rounded input, updates the weight before rounding.

    Args:
        shape: Shape of the layer's weight on this rank.
        decision: Formats of weight and input.
        keeps_weight: Whether to keep the rounded weight until `forget_weight`.

    Raises:
        QuantizationError: The decision has no format for the weight.

    Example:
        >>> from mt_quant import QuantizationConfig
        >>> layer = torch.nn.Linear(4, 2)
        >>> int8 = QuantizationConfig.named("int8").decide(layer)[""]
        >>> quantizer = FakeQuantizer(LinearShape.of(layer), int8)
        >>> quantizer.linear(torch.ones(3, 4), layer.weight, layer.bias).shape
        torch.Size([3, 2])
    """

    def __init__(
        self, shape: LinearShape, decision: Decision, *, keeps_weight: bool = False
    ) -> None:
        if decision.weight is None:
            raise QuantizationError(
                "the decision has no format for the weight; leave the layer as it is"
            )
        self.shape, self.decision = shape, decision
        self._format, self._keeps_weight = decision.weight, keeps_weight
        self._weight: Tensor | None = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `F.linear` of the rounded input and weight; gradients pass the rounding."""
        x = _StraightThrough.apply(x, self.round_input(x))
        return F.linear(x, _StraightThrough.apply(weight, self.round_weight(weight)), bias)

    def round_weight(self, weight: Tensor) -> Tensor:
        """Return the rounded weight.

        An all-gather of the weight where ranks split what shares a scale.

        Shape:
            weight: [*outputs, *inputs] or [out, in]. Returns [out, in].
        """
        if self._weight is not None:
            return self._weight
        rounded = self._rounded(weight)
        self._weight = rounded if self._keeps_weight else None
        return rounded

    def round_input(self, x: Tensor) -> Tensor:
        """Return the rounded input; without a format for it, the input itself.

        An all-reduce (MAX) of the magnitudes where ranks split the features.

        Shape:
            x: [..., in]. Returns the same.
        """
        if self.decision.input is None:
            return x
        group = self.shape.group if self.shape.split == "inputs" else None
        return round_activation(x.flatten(0, -2), self.decision.input, group=group).view_as(x)

    def forget_weight(self) -> None:
        """Round the weight again at its next use, because it has changed."""
        self._weight = None

    @torch.no_grad()
    def _rounded(self, weight: Tensor) -> Tensor:
        # Where no scale spans ranks, each rank rounds its part without communication.
        shape, spans = self.shape, spans_ranks(self._format, self.shape)
        whole = shape.gathered(weight.view(*shape.outputs, *shape.inputs)) if spans else weight
        if not bool(whole.isfinite().all()):
            return weight  # the loss becomes non-finite on all ranks, and training reports that
        rounded = quantize_weight(whole, self._format).dequantize(weight.dtype)
        rows, columns = shape.own(weight.device) if spans else (None, None)
        rounded = rounded if rows is None else rounded[rows]
        return (rounded if columns is None else rounded[:, columns]).contiguous()


class _StraightThrough(torch.autograd.Function):
    """Rounded values whose gradient goes to the values before rounding."""

    @staticmethod
    def forward(ctx: object, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def training_obstacle(decision: Decision) -> str | None:
    """Return why training can't round as a decision says; None where it can.

    Training rounds weights to the nearest value, and inputs with scales of each token.
    """
    if decision.method != "rtn":
        return f"has the method {decision.method}, which reads data; training rounds by rtn"
    form = decision.input
    if form is not None and (not form.dynamic or form.group == "tensor" or form.type == "nvfp4"):
        return (
            f"has inputs in {form}, with one scale for all tokens; training rounds with a scale "
            "for each token: use int8, fp8 or mxfp8"
        )
    return None
