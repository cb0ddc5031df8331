"""The terms of a token's loss, given three numbers about its row of logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from mt_files import check_type
from torch import Tensor

from mt_fusions.arguments import check_range
from mt_fusions.losses.kernel import LogitKernel

IGNORE_INDEX = -100
Terms = tuple[Tensor, Tensor, Tensor]  # log-sum-exp, label's logit and sum, a number for each row
Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The terms of a token's loss, wherever its logits come from.

    `loss = lse - (1 - s) x_label - s mean(x) + z lse^2`, where lse is the log-sum-exp of the logits
    x of the real tokens. Mean and log-sum-exp are over the whole vocabulary, not over a shard.

    Attributes:
        reduction: "sum" over the tokens that count, "mean" over them, or "none".
        ignore_index: Tokens with this label have loss 0 and no gradient.
        label_smoothing: s, from 0 to 1, as in torch.
        z_loss: z, the weight of the z-loss (Chowdhery et al., 2022), which keeps lse near zero.
        vocab_size: Number of real tokens; columns from there on are padding. None means all.
        softcap: Logits become `softcap * tanh(logit / softcap)`, in fp32. None leaves them.
        block_size: Number of tokens whose logits are made at a time, where they are made in
            blocks. None takes a few million logits.
        kernel: "auto", the name of a candidate of `LOSS`, or its function, once chosen.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: A number is out of range.

    Example:
        >>> LossOptions(z_loss=1e-4).label_smoothing
        0.0
    """

    reduction: Reduction = "sum"
    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    vocab_size: int | None = None
    softcap: float | None = None
    block_size: int | None = None
    kernel: str | LogitKernel = "auto"

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {self.reduction!r}")
        check_type("ignore_index", self.ignore_index, int)
        for name in ("label_smoothing", "z_loss", "softcap"):
            _check_number(name, getattr(self, name))
        if self.label_smoothing > 1:
            raise ValueError(f"label_smoothing must be from 0 to 1, got {self.label_smoothing}")
        if self.softcap == 0:
            raise ValueError("softcap must be above 0, got 0; None leaves logits as they are")
        for name in ("vocab_size", "block_size"):
            value = getattr(self, name)
            if value is None:
                continue
            check_type(name, value, int)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def _check_number(name: str, value: float | None) -> None:
    if value is None and name == "softcap":
        return
    check_type(name, value, float, int)
    if value is None or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be 0 or more, and finite, got {value}")


PLAIN_LOSS = LossOptions()


class Labels(NamedTuple):
    """The labels of some tokens, as column numbers of this rank's logits.

    Attributes:
        local: Column of each label; -1 where the label is ignored or another rank's.
        counts: Whether a token counts.
        columns: Number of this rank's columns without padding.
        vocab_size: Number of real tokens of the whole vocabulary.
    """

    local: Tensor
    counts: Tensor
    columns: int
    vocab_size: int

    def rows(self, rows: slice) -> Labels:
        """Return the labels of a range of tokens."""
        return self._replace(local=self.local[rows], counts=self.counts[rows])


def check_labels(labels: Tensor, name: str, logits: Tensor) -> None:
    """Raise unless there is a label for every row of `logits`."""
    check_type("labels", labels, Tensor)
    if not logits.dim() or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of {name} {tuple(logits.shape)} "
            "without the last dim"
        )
    if labels.device != logits.device:
        raise ValueError(f"labels are on {labels.device}, but {name} on {logits.device}")


def local_labels(
    labels: Tensor, width: int, group: dist.ProcessGroup | None, options: LossOptions
) -> Labels:
    """Turn global labels into column numbers of this rank's logits.

    Args:
        labels: Labels of the whole vocabulary, or the index to ignore.
        width: Number of this rank's columns, the same on every rank.
        group: The ranks that share the vocabulary; None for one that is not split.
        options: The terms of the loss.

    Shape:
        labels: any. The results have one dim.

    Raises:
        TypeError: The labels are no integers, or the group is no group.
        ValueError: The vocabulary is larger than all columns, or a label is outside of it.
    """
    check_type("labels", labels, Tensor)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be a tensor of integers, such as int64, got {labels.dtype}")
    if group is not None:
        check_type("group", group, dist.ProcessGroup)
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    size = width * ranks if options.vocab_size is None else options.vocab_size
    if ranks > 1 and width == options.vocab_size:
        raise ValueError(
            f"every rank has all {width} columns of the vocabulary, and would count them {ranks} "
            "times; give each rank its part of the logits, or group=None"
        )
    if not 1 <= size <= width * ranks:
        raise ValueError(f"vocab_size={size} must be from 1 to the {width * ranks} columns")
    labels = labels.reshape(-1).long()  # torch's gather takes no shorter ones
    counts = labels != options.ignore_index
    check_range(labels.masked_fill(~counts, 0), size, "label", "the vocabulary")
    columns = min(max(size - rank * width, 0), width)
    local = labels - rank * width
    local = torch.where(counts & (local >= 0) & (local < columns), local, -1)
    return Labels(local, counts, columns, size)


def token_losses(found: Terms, labels: Labels, options: LossOptions) -> Tensor:
    """Return the loss of each token, from the terms of its row over the whole vocabulary.

    Shape:
        found: three of [N]; the last may be empty without smoothing. Returns [N].
    """
    lse, target, total = found
    loss = lse - (1 - options.label_smoothing) * target
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    if options.label_smoothing:
        loss = loss - options.label_smoothing / labels.vocab_size * total
    return torch.where(labels.counts, loss, 0)


def reduced(losses: Tensor, counts: Tensor, options: LossOptions) -> Tensor:
    """Return the sum or the mean over the tokens that count, or the losses themselves."""
    if options.reduction == "none":
        return losses
    return losses.sum() if options.reduction == "sum" else losses.sum() / counts.sum()


class _SumOverRanks(torch.autograd.Function):
    """All-reduce SUM in forward; nothing in backward, since every rank has the same loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None


def over_ranks(found: Terms, group: dist.ProcessGroup | None) -> Terms:
    """Join the terms of each rank's columns: an all-reduce MAX, and one SUM of all the rest.

    Shape:
        found: three of [N]; the last may be empty. Returns the same of the whole vocabulary.
    """
    if group is None or group.size() == 1:
        return found
    lse, target, total = found
    largest = lse.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    parts = [(lse - largest).exp(), target, *([total] if total.numel() else [])]
    summed, target, *rest = _SumOverRanks.apply(torch.stack(parts), group).unbind(0)  # pyright: ignore[reportAttributeAccessIssue]
    return summed.log() + largest, target, rest[0] if rest else total
