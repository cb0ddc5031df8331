"""Experts: feed-forwards whose weights are one array, multiplied by groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Literal

import torch
from mt_files import AUTO
from mt_parallel_state import PartitionSpec, shard_param
from mt_tensor_parallel import Gemm, GemmLayer, TorchGemm
from torch import Tensor, nn

from mt_moe.activation import activate, gated
from mt_moe.dispatch import only_first
from mt_moe.expert_options import ExpertOptions
from mt_moe.grouped import How, as_autocast, grouped_linear
from mt_moe.groups import ExpertGroups
from mt_moe.initial import filled
from mt_moe.padding import pad_rows, padded_counts, padded_places, padded_size, unpad_rows
from mt_moe.stream import Feed, stream


class ExpertGemms(nn.Module):
    """The strategies of a layer's experts; those with state have it under the expert's number.

    Args:
        first: Number of this rank's first expert among all.
        gemms: One for each of its experts.

    Attributes:
        first: As given.
        all: The strategies.
    """

    def __init__(self, first: int, gemms: Sequence[Gemm]) -> None:
        super().__init__()
        self.first, self.all = first, tuple(gemms)
        for expert, gemm in enumerate(gemms, first):
            if isinstance(gemm, nn.Module):
                self.add_module(str(expert), gemm)

    def extra_repr(self) -> str:
        """The strategies that torch prints."""
        return ", ".join(sorted({repr(gemm) for gemm in self.all}))


class GroupedLinear(GemmLayer):
    """A linear layer for each expert, with one weight [E, *out, in] dealt over ep, cut over etp.

    It multiplies what is on this rank and sends nothing. The gradient is the sum over the tokens
    that the experts' group sent; what other groups have (edp) is the data-parallel reduction's.

    Args:
        num_experts: How many there are in all.
        in_features: Input size.
        out_features: Output sizes.
        groups: Who has which.
        split: Which features are cut over etp: the last of the output, or the input.
        bias: Whether each expert has one.
        kernel: See `ExpertOptions`.
        dtype: Of the parameters.
        device: Likewise; `"meta"` draws no values.

    Attributes:
        num_experts: How many there are in all.
        gemms: The strategies of those on this rank.
        split: Which features are cut over etp.

    Shape:
        forward: x [N, in], counts [local experts] -> [N, prod(out)], local sizes.
    """

    bias: nn.Parameter | None

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
        how = {"std": 1 / sqrt(3 * in_features), "dtype": dtype, "device": device}
        axes = [cut[at][0] if at in cut else None for at in range(len(shape))]
        weight = filled(shape, local=local, offsets=offsets, **how)
        self.weight = shard_param(weight, PartitionSpec(*axes))
        self.num_experts = num_experts
        self.gemms = ExpertGemms(offsets[0], [TorchGemm()] * local[0])
        self.kernel, self.split, self._first = kernel, split, groups.place[1] == 0
        self.bias = None
        if bias:
            own = filled(shape[:-1], local=local[:-1], offsets=offsets[:-1], **how)
            partial = ("etp",) if split == "in" and groups.etp > 1 else ()
            self.bias = shard_param(own, PartitionSpec(*axes[:-1]), partial_grad=partial)

    def choose_gemm(self, name: str, gemm_for: Callable[[str], Gemm]) -> None:
        """Take a strategy for each expert on this rank, by the layer's name and its number."""
        first, number = self.gemms.first, len(self.gemms.all)
        names = [f"{name}.{expert}" for expert in range(first, first + number)]
        self.gemms = ExpertGemms(first, [gemm_for(each) for each in names])

    def forward(self, x: Tensor, counts: Tensor, *, exact: bool = True) -> Tensor:
        """Multiply each row with its expert's weight; see the class for shapes.

        Args:
            x: Rows, sorted by expert.
            counts: Rows of each expert.
            exact: Whether that is all rows; if not, the others' results are zeros.
        """
        weight = self.weight.flatten(1, -2)
        how = How(
            gemms=self.gemms.all,
            kernel=self.kernel,
            weight=weight,
            store=self.wgrad_store,
            sink=self.grad_sink,
        )
        y = grouped_linear(x, weight, counts, how)
        if self.bias is not None:
            # With the input cut, results are parts of a sum: one of them has the bias.
            once = self.split == "out" or self._first
            y = y + _bias_rows(self.bias.flatten(1) * once, counts, len(y)).to(y.dtype)
        return y if exact else only_first(y, counts.sum())

    @property
    def is_plain(self) -> bool:
        """Whether it is torch's products by "auto" and nothing else: no bias, hook or deferral."""
        hooks = (self._forward_pre_hooks, self._forward_hooks, self._backward_hooks)
        return (
            type(self) is GroupedLinear
            and self.kernel == AUTO
            and self.bias is None
            and self.wgrad_store is None
            and all(gemm.is_autograd for gemm in self.gemms.all)
            and not any((*hooks, self._backward_pre_hooks))
        )

    def extra_repr(self) -> str:
        """The shapes and settings that torch prints."""
        return f"weight={list(self.weight.shape)}, kernel={self.kernel!r}"


def _bias_rows(bias: Tensor, counts: Tensor, rows: int) -> Tensor:
    row = torch.arange(rows, device=bias.device)
    expert = torch.searchsorted(counts.cumsum(0), row, right=True)
    return bias.index_select(0, expert.clamp(max=len(counts) - 1))


class Experts(nn.Module):
    """All experts of this rank.

    Args:
        hidden_size: Of tokens.
        ffn_size: Width of each expert, cut over etp.
        num_experts: How many there are in all, dealt over ep.
        options: See `ExpertOptions`.
        groups: Who has which.
        dtype: Of the parameters.
        device: Likewise.

    Attributes:
        up: weight [E, 2, ffn, hidden], gate first; [E, ffn, hidden] without a gate.
        down: weight [E, hidden, ffn].

    Raises:
        ValueError: The ranks can't share the experts, or their width, evenly.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        options: ExpertOptions,
        *,
        groups: ExpertGroups,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        wide = (2, ffn_size) if options.gated else (ffn_size,)
        common = {"groups": groups, "bias": options.bias, "kernel": options.kernel}
        common |= {"dtype": dtype, "device": device}
        self.up = GroupedLinear(num_experts, hidden_size, wide, split="out", **common)
        self.down = GroupedLinear(num_experts, ffn_size, (hidden_size,), split="in", **common)

    def forward(
        self, rows: Tensor, counts: Tensor, *, exact: bool = True, slots: int | None = None
    ) -> Tensor:
        """Apply the experts to their rows.

        Args:
            rows: Sorted by expert.
            counts: Rows of each expert.
            exact: Whether that is all rows; if not, the others' results are zeros.
            slots: Rows that each expert computes on, zeros included; None is as many as it has.

        Shape:
            rows: [N, hidden]; counts: [local experts]. Returns [N, hidden], with etp a part of it.
        """
        options, number = self.options, len(rows)
        if slots is None and options.multiple == 1:
            return self._apply_to(rows, counts, exact=exact)
        size = padded_size(number, len(counts), multiple=options.multiple, slots=slots)
        filled = padded_counts(counts, multiple=options.multiple, slots=slots)
        places = padded_places(counts, filled, number, size)
        y = self._apply_to(pad_rows(rows, places, size), filled, exact=slots is not None)
        return unpad_rows(y, places)

    def _apply_to(self, rows: Tensor, counts: Tensor, *, exact: bool) -> Tensor:
        if self._streams(rows):
            sinks = self.up.grad_sink, self.down.grad_sink
            feed = Feed(hidden=self._hidden, sinks=sinks, keeps=torch.is_grad_enabled())
            weights = as_autocast(self.up.weight.flatten(1, -2)), as_autocast(self.down.weight)
            return stream(as_autocast(rows), *weights, counts, feed)
        up = self.up(rows, counts, exact=exact)
        return self.down(self._hidden(up), counts, exact=exact)

    def _streams(self, rows: Tensor) -> bool:
        """Whether a CPU takes an expert after the other through both products."""
        if rows.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        return self.up.is_plain and self.down.is_plain

    def _hidden(self, up: Tensor) -> Tensor:
        if self.options.gated:
            gate, value = up.chunk(2, -1)
            return gated(gate, value, self.options)
        return activate(up, self.options.activation)
