"""Linear layers of a stage's blocks, and their products with rounded operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from mt_moe import GroupedLinear
from mt_parallel_state import Group, group_size
from mt_quant import Decision, FakeQuantizer, LinearShape
from mt_tensor_parallel import (
    ColumnParallelLinear,
    Gemm,
    GemmLayer,
    Operand,
    Role,
    RowParallelLinear,
    TorchGemm,
)
from torch import Tensor, nn


def block_linears(stage: nn.Module) -> Mapping[str, ColumnParallelLinear | RowParallelLinear]:
    """Return the parallel linear layers of a stage's blocks by their global names."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    named = ((name, m) for name, m in stage.named_modules() if name.startswith("layers."))
    return {name: m for name, m in named if isinstance(m, kinds)}


def grouped_layers(stage: nn.Module) -> Mapping[str, GroupedLinear]:
    """Return the layers of a stage's blocks with a weight for each expert, by global names."""
    named = ((name, m) for name, m in stage.named_modules() if name.startswith("layers."))
    return {name: m for name, m in named if isinstance(m, GroupedLinear)}


class FakeQuantizedGemm(TorchGemm):
    """torch's products of a rounded weight and, where the rule has a format for it, input.

    The backward products use the rounded operands, and gradients pass the rounding unchanged.

    Args:
        quantizer: Rounds the layer's operands.
    """

    def __init__(self, quantizer: FakeQuantizer) -> None:
        self.quantizer = quantizer

    def operand(self, x: Tensor, role: Role) -> Operand:
        """Round a weight or an input; a gradient stays. See `Gemm.operand`."""
        if role == "weight":
            return self.quantizer.round_weight(x)
        return self.quantizer.round_input(x) if role == "input" else x

    def __repr__(self) -> str:
        decision = self.quantizer.decision
        return f"FakeQuantizedGemm(weight={decision.weight}, input={decision.input})"


def fake_quantize(
    stage: nn.Module,
    decisions: Mapping[str, Decision],
    *,
    group: Group = None,
    keeps_weight: bool = True,
) -> dict[str, FakeQuantizedGemm]:
    """Have the linear layers of a stage's blocks, and its experts, multiply rounded weights.

    Args:
        stage: Model, or stage of a model.
        decisions: Decision for each of the whole model's layers, by name, and for its experts by
            number.
        group: Group of the ranks that share an expert (etp).
        keeps_weight: Whether rounded weights are kept until the weights change.

    Returns:
        The strategies by the names of their layers.
    """
    made: dict[str, FakeQuantizedGemm] = {}
    dense = {n: layer for n, layer in block_linears(stage).items() if decisions[n].weight}
    for name, layer in (dense | dict(grouped_layers(stage))).items():
        shape = matrix_shape(layer, group)

        def gemm_for(own: str, shape: LinearShape = shape) -> Gemm:
            if decisions[own].weight is None:
                return TorchGemm()
            quantizer = FakeQuantizer(shape, decisions[own], keeps_weight=keeps_weight)
            return made.setdefault(own, FakeQuantizedGemm(quantizer))

        layer.choose_gemm(name, gemm_for)
    return made


def matrix_shape(layer: GemmLayer, group: Group = None) -> LinearShape:
    """Return the sizes and split of a block's linear layer; of one expert where it has several.

    Args:
        layer: The layer.
        group: Group of the ranks that share an expert (etp).
    """
    if not isinstance(layer, GroupedLinear):
        return cast("LinearShape", LinearShape.of(layer))
    _, *outputs, features = layer.weight.shape
    is_out = layer.split == "out"
    whole = group_size(group) == 1
    return LinearShape(
        outputs=tuple(outputs),
        inputs=(features,),
        split=None if whole else "outputs" if is_out else "inputs",
        dim=len(outputs) - 1 if is_out and not whole else 0,
        axis="etp",
        group=None if whole else group,
        communicate=False,
    )
