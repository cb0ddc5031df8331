"""The experts of a layer: up and down projections with an activation between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mt_moe.experts.activation import activate, gated
from mt_moe.experts.grouped_linear import GroupedLinear
from mt_moe.experts.grouped_products import as_autocast
from mt_moe.experts.options import ExpertOptions
from mt_moe.experts.stream import StreamContext, stream
from mt_moe.groups import ExpertGroups
from mt_moe.padding import pad_rows, padded_counts, padded_places, padded_size, unpad_rows


class Experts(nn.Module):
    """The experts of this rank.

    Args:
        hidden_size: Size of the tokens.
        ffn_size: Width of each expert, sharded over etp.
        num_experts: Number of experts on all ranks together, sharded over ep.
        options: See `ExpertOptions`.
        groups: The ranks that share the experts.
        dtype: Dtype of the parameters.
        device: Device of the parameters.

    Attributes:
        up: weight [E, 2, ffn, hidden], gate first; [E, ffn, hidden] without a gate.
        down: weight [E, hidden, ffn].

    Raises:
        ValueError: ep does not divide the experts, or etp does not divide their width.
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
        self, rows: Tensor, counts: Tensor, *, exact: bool = True, capacity: int | None = None
    ) -> Tensor:
        """Apply the experts to their rows.

        Args:
            rows: Rows, sorted by expert.
            counts: Number of rows of each expert.
            exact: Whether the counts add up to N; if not, the results of the other rows are zeros.
            capacity: Number of rows to which each expert's are padded with zeros; None pads to the
                multiple in the options only.

        Shape:
            rows: [N, hidden]; counts: [local experts]. Returns [N, hidden], a partial sum over etp.
        """
        multiple = self.options.multiple
        if capacity is None and multiple == 1:
            return self._apply_to(rows, counts, exact=exact)
        size = padded_size(len(rows), len(counts), multiple=multiple, capacity=capacity)
        padded = padded_counts(counts, multiple=multiple, capacity=capacity)
        places = padded_places(counts, padded, len(rows), size)
        y = self._apply_to(pad_rows(rows, places, size), padded, exact=capacity is not None)
        return unpad_rows(y, places)

    def _apply_to(self, rows: Tensor, counts: Tensor, *, exact: bool) -> Tensor:
        if self._streams(rows):
            context = StreamContext(
                hidden=self._hidden,
                sinks=(self.up.grad_sink, self.down.grad_sink),
                needs_backward=torch.is_grad_enabled(),
            )
            weights = as_autocast(self.up.weight.flatten(1, -2)), as_autocast(self.down.weight)
            return stream(as_autocast(rows), *weights, counts, context)
        up = self.up(rows, counts, exact=exact)
        return self.down(self._hidden(up), counts, exact=exact)

    def _streams(self, rows: Tensor) -> bool:
        """Whether to take one expert after the other through both products, as on a CPU."""
        if rows.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        return self.up.is_plain and self.down.is_plain

    def _hidden(self, up: Tensor) -> Tensor:
        if self.options.gated:
            gate, value = up.chunk(2, -1)
            return gated(gate, value, self.options)
        return activate(up, self.options)
