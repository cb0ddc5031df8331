"""The expert bias, which balances load without a loss; it is set once per optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from mt_files import check_type
from mt_parallel_state import Group
from torch import Tensor, nn

Kind = Literal["sign", "quantile"]


@dataclass(frozen=True, kw_only=True)
class BiasOptions:
    """The options of an expert bias.

    Attributes:
        kind: `sign` adds `rate` to the bias of each expert with less than the mean load and
            subtracts it from the others (Wang et al., 2024; DeepSeek-V3). `quantile` moves the bias
            towards the value with which each expert passes a common threshold for its fair share of
            the tokens.
        rate: Step of `sign`; weight of the new value in the running mean of `quantile`.
        bins: Number of bins of the histogram of scores, for `quantile`.

    Raises:
        ValueError: A field is out of range.
    """

    kind: Kind = "sign"
    rate: float = 1e-3
    bins: int = 1024

    def __post_init__(self) -> None:
        check_type("bins", self.bins, int)
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {get_args(Kind)}, got {self.kind!r}")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be above 0 and at most 1, got {self.rate}")
        if self.bins < 2:
            raise ValueError(f"bins must be at least 2, got {self.bins}")


class ExpertBias(nn.Module):
    """The bias of each expert, and the load since it was last set.

    The bias stays fp32 when the model is converted to another dtype.

    Args:
        num_experts: Number of experts.
        top_k: Number of experts per token.
        options: See `BiasOptions`.
        bounded: Whether scores are below 1, as with softmax and sigmoid.
        device: Device of the buffers.

    Attributes:
        value: The bias, a buffer of the state dict.
        seen: Number of choices of each expert, or for `quantile` a histogram of each expert's
            scores. Integers, so that their sum is the same for every layout.

    Shape:
        value: [E]; seen: [E] or [E, bins].
    """

    value: Tensor
    seen: Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        options: BiasOptions,
        *,
        bounded: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.options, self.share, self.bounded = options, top_k / num_experts, bounded
        shape = (num_experts, options.bins) if options.kind == "quantile" else (num_experts,)
        self.register_buffer("value", torch.zeros(num_experts, device=device))
        seen = torch.zeros(shape, dtype=torch.int64, device=device)
        self.register_buffer("seen", seen, persistent=False)

    @torch.no_grad()
    def observe(self, counts: Tensor, scores: Tensor, valid: Tensor | None) -> None:
        """Count a micro-batch.

        Shape:
            counts: [E], the choices of this rank; scores: [T, E]; valid: [T], True for real tokens.
        """
        if self.options.kind == "sign":
            self.seen += counts
            return
        bins = self.options.bins
        # Scores of sqrtsoftplus, which are not bounded, are mapped to [0, 1).
        place = scores if self.bounded else scores / (1 + scores)
        place = place.float().mul(bins).long().clamp_(0, bins - 1)
        place += torch.arange(len(counts), device=place.device) * bins
        one = (
            torch.ones_like(place) if valid is None else valid.long().unsqueeze(1).expand_as(place)
        )
        self.seen.view(-1).scatter_add_(0, place.flatten(), one.flatten())

    @torch.no_grad()
    def apply_(self, seen: Tensor) -> None:
        """Set the bias from the load on all ranks, and start counting again."""
        if self.options.kind == "sign":
            load = seen.double()
            self.value += self.options.rate * torch.sign(load.mean() - load).to(self.value)
        else:
            target = -self._quantiles(seen)
            moved = torch.lerp(self.value, target.to(self.value), self.options.rate)
            any_seen = seen.sum() > 0
            self.value.copy_(torch.where(any_seen, moved - moved.mean(), self.value))
        self.seen.zero_()

    def _quantiles(self, seen: Tensor) -> Tensor:
        """Return the score of each expert that only its fair share of tokens exceeds."""
        ends = seen.double().cumsum(1)
        wanted = (1 - self.share) * ends[:, -1:]
        index = torch.searchsorted(ends, wanted).clamp_(max=seen.shape[1] - 1)
        inside = seen.gather(1, index).clamp(min=1)
        part = (wanted - (ends.gather(1, index) - inside)) / inside
        place = (index + part.clamp(0, 1)).squeeze(1) / seen.shape[1]
        return place if self.bounded else place / (1 - place).clamp(min=1e-6)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertBias:  # noqa: FBT001, FBT002 - torch's signature
        value = self.value
        super()._apply(fn, recurse)
        if self.value.dtype != torch.float32:
            empty = value.is_meta and not self.value.is_meta
            wide = torch.zeros_like(self.value, dtype=torch.float32) if empty else value
            self.value = wide.to(self.value.device)
        return self


def update_expert_biases(modules: nn.Module | Iterable[nn.Module], *groups: Group) -> None:
    """Set the expert biases of all routers in modules; call it once per optimizer step.

    The loads of all routers are summed over each group in one all-reduce of integers. The host does
    not wait.

    Args:
        modules: The model or this rank's stage; or several, in the same order on all ranks.
        *groups: Groups that together are all ranks with tokens of these layers: `tp-cp-dp`, and for
            pipelines in both directions the ranks with the same stages. None is one rank.

    Raises:
        TypeError: An argument is not a module.
    """
    if isinstance(modules, nn.Module):
        modules = [modules]
    biases: list[ExpertBias] = []
    for module in modules:
        check_type("modules", module, nn.Module)
        biases += [each for each in module.modules() if isinstance(each, ExpertBias)]
    if not biases:
        return
    seen = torch.cat([bias.seen.flatten() for bias in biases])
    for group in groups:
        if group is not None:
            dist.all_reduce(seen, group=group)
    parts = seen.split([bias.seen.numel() for bias in biases])
    for bias, part in zip(biases, parts, strict=True):
        bias.apply_(part.view_as(bias.seen))
