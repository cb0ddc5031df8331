"""The experts of mixtures that multiply in 8 or 4 bits, and the state of their scales."""

from __future__ import annotations

import zlib
from typing import cast

from mt_fp8 import DelayedScales, Recipe, Split
from mt_parallel_state import ParallelState, PartitionSpec, shard_param, sharding_of
from mt_tensor_parallel import Gemm, QuantizedGemm, Role, TorchGemm
from torch import Tensor, nn

from mt_moe.experts.grouped_linear import GroupedLinear


class LowPrecisionExperts:
    """The quantised experts on this rank of one grouped layer.

    An expert's scales come from the rows that its rank multiplies at once, wherever they were sent
    from. Where etp cuts an expert, a scale that spans the cut is made of all parts.

    Args:
        name: Name of the grouped layer.
        layer: Layer whose experts get the strategies.
        chosen: Names of the quantised experts, `NAME.0` and so on.
        recipe: Recipe of the quantisation.
        state: This rank's place.
        keeps_weight: As in `mt_fp8.Products`.
        seed: Seed of stochastic rounding, which each expert's name changes.

    Attributes:
        gemms: The strategies by the names of their experts.
    """

    def __init__(
        self,
        name: str,
        layer: GroupedLinear,
        chosen: set[str],
        recipe: Recipe,
        *,
        state: ParallelState,
        keeps_weight: bool,
        seed: int,
    ) -> None:
        self._name, self._layer, self._state = name, layer, state
        self.gemms: dict[str, QuantizedGemm] = {}
        splits = _splits(layer, state)

        def gemm_for(expert: str) -> Gemm:
            if expert not in chosen:
                return TorchGemm()
            gemm = QuantizedGemm(
                recipe,
                splits=splits,
                keeps_weight=keeps_weight,
                seed=seed ^ zlib.crc32(expert.encode()),
                device=layer.weight.device,
            )
            self.gemms[expert] = gemm.train(layer.training)
            return gemm

        layer.choose_gemm(name, gemm_for)
        self._rows = self._joined(recipe) if recipe.history else {}

    def begin_step(self, step: int) -> None:
        """Say which step is trained, on which random rounding depends."""
        part, parts = self._state.index("edp"), self._state.size("edp")
        for gemm in self.gemms.values():
            gemm.begin_step(step, part=part, parts=parts)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state of delayed scaling by global names, with records of its dealing.

        Shape:
            `NAME.history`: [local experts, history, 3]. `NAME.factor`: [local experts, 3].
        """
        is_copy = sharding_of(self._layer.weight).is_copy
        for tensor in self._rows.values():
            spec = PartitionSpec("ep", *[None] * (tensor.dim() - 1))
            shard_param(cast("nn.Parameter", tensor), spec, is_copy=is_copy)
        return {f"{self._name}.{kind}": tensor for kind, tensor in self._rows.items()}

    def _joined(self, recipe: Recipe) -> dict[str, Tensor]:
        """Store the experts' states as rows of one tensor, with a row for each local expert."""
        new, gemms = DelayedScales(recipe, device=self._layer.weight.device), self._layer.gemms
        rows = {
            "history": new.history.repeat(len(gemms.all), 1, 1),
            "factor": new.factor.repeat(len(gemms.all), 1),
        }
        for gemm, history, factor in zip(gemms.all, *rows.values(), strict=True):
            if isinstance(gemm, QuantizedGemm) and gemm.delayed is not None:
                gemm.delayed.history, gemm.delayed.factor = history, factor
        return rows


def _splits(layer: GroupedLinear, state: ParallelState) -> dict[Role, Split]:
    """Say which ranks hold the rest of what an expert multiplies, where etp cuts it."""
    group = state.group("etp")
    if state.size("etp") == 1:
        return {}
    columns = Split(columns=group, both=group)
    if layer.split == "out":
        return {"weight": Split(rows=group, both=group), "grad": columns}
    return {"input": columns, "weight": columns}
