"""A linear layer for each expert, whose weights are one array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any, Literal

import torch
from mt_kernels import AUTO, Selector
from mt_parallel_state import PartitionSpec, shard_param
from mt_tensor_parallel import Gemm, GemmLayer, TorchGemm
from torch import Tensor, nn

from mt_moe.experts.grouped_products import GroupedContext, as_autocast, grouped_linear
from mt_moe.experts.kernels import GROUPED_KERNELS
from mt_moe.groups import ExpertGroups
from mt_moe.initial import filled
from mt_moe.padding import only_first


class ExpertGemms(nn.Module):
    """The strategies of this rank's experts; a strategy with state is a submodule.

    Args:
        first: Index of this rank's first expert among all experts; submodules are named by index.
        gemms: The strategy of each expert.

    Attributes:
        first: Index of this rank's first expert.
        all: The strategies.
    """

    def __init__(self, first: int, gemms: Sequence[Gemm]) -> None:
        super().__init__()
        self.first, self.all = first, tuple(gemms)
        for expert, gemm in enumerate(gemms, first):
            if isinstance(gemm, nn.Module):
                self.add_module(str(expert), gemm)

    def extra_repr(self) -> str:
        """Return the strategies, for `repr`."""
        return ", ".join(sorted({repr(gemm) for gemm in self.all}))


class GroupedLinear(GemmLayer):
    """A linear layer for each expert, with one weight [E, *out, in] sharded over ep and etp.

    The layer multiplies the rows of this rank's experts and does not communicate. The weight's
    gradient is the sum over the rows that the experts' group sent here. Summing it over the other
    expert groups (edp) is left to the data-parallel reduction.

    Args:
        num_experts: Number of experts on all ranks together.
        in_features: Input size.
        out_features: Output sizes.
        groups: The ranks that share the experts.
        split: Which features etp shards: the last output dim, or the input.
        bias: Give each expert a bias.
        kernel: See `ExpertOptions`.
        dtype: Dtype of the parameters.
        device: Device of the parameters; `"meta"` draws no values.

    Attributes:
        num_experts: Number of experts on all ranks together.
        gemms: The strategies of this rank's experts.
        split: Which features etp shards.

    Raises:
        ValueError: ep does not divide the experts, or etp does not divide the split features.

    Shape:
        forward: x [N, in], counts [local experts] -> [N, prod(out)], with local sizes.
    """

    bias: nn.Parameter | None
    lead_dims = 1
    axis = "etp"

    def __init__(  # noqa: PLR0913 - a layer's own settings, most by keyword
        self,
        num_experts: int,
        in_features: int,
        out_features: tuple[int, ...],
        *,
        groups: ExpertGroups,
        split: Literal["in", "out"],
        bias: bool = False,
        kernel: str = AUTO,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        shape = (num_experts, *out_features, in_features)
        dim = len(shape) - (1 if split == "in" else 2)
        cut = {0: ("ep", groups.ep, groups.place[0]), dim: ("etp", groups.etp, groups.place[1])}
        names = {0: "num_experts", dim: f"the {split}put size"}
        local, offsets = list(shape), [0] * len(shape)
        for at, (axis, parts, index) in cut.items():
            if shape[at] < 1 or shape[at] % parts:
                raise ValueError(
                    f"{names[at]} is {shape[at]}, which {axis}={parts} does not divide; use a "
                    f"multiple of {parts}"
                )
            local[at] = shape[at] // parts
            offsets[at] = index * local[at]
        init = {"std": 1 / sqrt(3 * in_features), "dtype": dtype, "device": device}
        axes = [cut[at][0] if at in cut else None for at in range(len(shape))]
        weight = filled(shape, local=local, offsets=offsets, **init)
        self.weight = shard_param(weight, PartitionSpec(*axes))
        self.num_experts, self._cut = num_experts, cut
        self.gemms = ExpertGemms(offsets[0], [TorchGemm()] * local[0])
        self.selector = Selector(GROUPED_KERNELS, kernel)
        self._thin_selector = Selector(GROUPED_KERNELS, AUTO)  # of adapters
        # Where etp shards the input, results are partial sums, of which one includes the bias.
        self.split, self._adds_bias = split, split == "out" or groups.place[1] == 0
        self.bias = None
        if bias:
            own = filled(shape[:-1], local=local[:-1], offsets=offsets[:-1], **init)
            partial = ("etp",) if split == "in" and groups.etp > 1 else ()
            self.bias = shard_param(own, PartitionSpec(*axes[:-1]), partial_grad=partial)

    @property
    def has_partial_sums(self) -> bool:
        """See `GemmLayer`: what etp shards beside whole matrices, the caller sums."""
        return any(axis == "etp" and parts > 1 for axis, parts, _ in self._cut.values())

    def ranks_of(self, dim: int) -> tuple[int, int]:
        """See `GemmLayer`."""
        _, parts, index = self._cut.get(dim, ("", 1, 0))
        return parts, index

    def low_rank(self, given: tuple[Any, ...], a: Tensor, bs: Sequence[Tensor]) -> list[Tensor]:
        """See `GemmLayer`; nothing is sent, as in `forward`.

        Shape:
            a: [E, rank, in]; bs: one of [E, out, rank]. Returns one of [N, out].
        """
        x, counts, *more = given
        thin = self._multiplied(as_autocast(x), a, counts)
        found = self._multiplied(thin, bs[0], counts)
        return [found if not more or more[0] else only_first(found, counts.sum())]

    def _multiplied(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Multiply rows by a weight of each expert whose gradient autograd takes."""
        matrix, gemms = as_autocast(weight), (TorchGemm(),) * len(weight)
        kernel = self._thin_selector.find(x, matrix, gemms, key=matrix.dtype).function
        context = GroupedContext(gemms=gemms, kernel=kernel, weight=weight, store=None, sink=None)
        return grouped_linear(x, matrix, counts, context)

    def choose_gemm(self, name: str, gemm_for: Callable[[str], Gemm]) -> None:
        """Choose the strategy of each expert on this rank.

        Args:
            name: Name of the layer.
            gemm_for: Returns the strategy for the name of an expert, `<name>.<expert>`.
        """
        first, number = self.gemms.first, len(self.gemms.all)
        names = [f"{name}.{expert}" for expert in range(first, first + number)]
        self.gemms = ExpertGemms(first, [gemm_for(each) for each in names])
        self.selector = Selector(GROUPED_KERNELS, self.selector.name)  # to choose again

    def forward(self, x: Tensor, counts: Tensor, *, exact: bool = True) -> Tensor:
        """Multiply each row by the weight of its expert; see the class for shapes.

        Args:
            x: Rows, sorted by expert.
            counts: Number of rows of each expert.
            exact: Whether the counts add up to N; if not, the results of the other rows are zeros.

        Raises:
            KernelError: The named kernel does not serve.
        """
        weight, gemms = self.weight.flatten(1, -2), self.gemms.all
        x, matrix = as_autocast(x), as_autocast(weight)
        context = GroupedContext(
            gemms=gemms,
            kernel=self.selector.find(x, matrix, gemms, key=matrix.dtype).function,
            weight=weight,
            store=self.wgrad_store,
            sink=self.grad_sink,
        )
        y = grouped_linear(x, matrix, counts, context)
        if self.bias is not None:
            bias = self.bias.flatten(1) * self._adds_bias
            y = y + _bias_rows(bias, counts, len(y)).to(y.dtype)
        return y if exact else only_first(y, counts.sum())

    @property
    def is_plain(self) -> bool:
        """Whether `auto` multiplies by torch's own products, without bias, hooks or deferral."""
        hooks = (self._forward_pre_hooks, self._forward_hooks, self._backward_hooks)
        return (
            type(self) is GroupedLinear
            and self.selector.name == AUTO
            and self.bias is None
            and self.wgrad_store is None
            and all(gemm.is_autograd for gemm in self.gemms.all)
            and not any((*hooks, self._backward_pre_hooks))
        )

    def extra_repr(self) -> str:
        """Return the shape and the kernel, for `repr`."""
        return f"weight={list(self.weight.shape)}, kernel={self.selector.name!r}"


def _bias_rows(bias: Tensor, counts: Tensor, rows: int) -> Tensor:
    row = torch.arange(rows, device=bias.device)
    expert = torch.searchsorted(counts.cumsum(0), row, right=True)
    return bias.index_select(0, expert.clamp(max=len(counts) - 1))
