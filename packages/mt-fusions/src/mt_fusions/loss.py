"""What a token's loss is made of, once its row of logits is three numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from mt_files import check_type
from torch import Tensor

from mt_fusions.arguments import check_range

Terms = tuple[Tensor, Tensor, Tensor]  # log-sum-exp, target and sum, a number for each row


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What a loss is made of: `lse - (1 - s) x_label - s mean(x) + z lse^2` of each token.

    lse is the log-sum-exp of the logits x of the real tokens of the vocabulary.

    Attributes:
        reduction: "mean" over the tokens that count, as torch's default; "sum", or "none".
        ignore_index: Tokens with this label have loss 0 and no gradient.
        label_smoothing: s, spread over all tokens of the vocabulary, not of a shard, as torch's.
        z_loss: z, the weight of the z-loss (Chowdhery et al., 2022).
        vocab_size: Real tokens; columns from there on are padding. None for all.

    Raises:
        TypeError: Something is no number.
        ValueError: Something is out of range.

    Example:
        >>> LossOptions(z_loss=1e-4).reduction
        'mean'
    """

    reduction: Literal["mean", "sum", "none"] = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {self.reduction!r}")
        check_type("ignore_index", self.ignore_index, int)
        if self.vocab_size is not None:
            check_type("vocab_size", self.vocab_size, int)
        for name in ("label_smoothing", "z_loss"):
            value = getattr(self, name)
            check_type(name, value, float, int)
            if not 0 <= value < math.inf or (name == "label_smoothing" and value > 1):
                limit = "from 0 to 1" if name == "label_smoothing" else "0 or more, and finite"
                raise ValueError(f"{name} must be {limit}, got {value}")


PLAIN_LOSS = LossOptions()


class Labels(NamedTuple):
    """The labels of some rows of this rank's logits.

    Attributes:
        local: Of this rank's columns; -1 where the label is ignored or elsewhere.
        counts: Whether a token counts.
        columns: This rank's columns that are no padding.
        size: Real tokens of the whole vocabulary.
    """

    local: Tensor
    counts: Tensor
    columns: int
    size: int


def check_labels(labels: Tensor, name: str, logits: Tensor) -> None:
    """Raise where there is not an integer for every row of `logits`, or of what they come from."""
    check_type("labels", labels, Tensor)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be a tensor of integers, such as int64, got {labels.dtype}")
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
    """Number the labels by this rank's columns, of which it has `width`.

    Shape:
        labels: any. The results have one dim.

    Raises:
        ValueError: The vocabulary is larger than all columns, or a label is outside of it.
    """
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    size = width * ranks if options.vocab_size is None else options.vocab_size
    if not 1 <= size <= width * ranks:
        raise ValueError(f"vocab_size={size} must be from 1 to the {width * ranks} columns")
    labels = labels.reshape(-1).long()  # torch's gather takes no shorter ones
    counts = labels != options.ignore_index
    check_range(labels.masked_fill(~counts, 0), size, "label", "the vocabulary")
    columns = min(max(size - rank * width, 0), width)
    local = labels - rank * width
    local = torch.where(counts & (local >= 0) & (local < columns), local, -1)
    return Labels(local, counts, columns, size)


def loss_of(
    found: Terms, labels: Labels, group: dist.ProcessGroup | None, options: LossOptions
) -> Tensor:
    """Make the loss of what is known of each row; with a group, of what each rank knows.

    Shape:
        found: three of [N]; the last may be empty without smoothing. Returns a scalar, or [N]
        unreduced.
    """
    if group is not None and group.size() > 1:
        found = _over_ranks(found, group)
    loss = token_losses(found, labels, options)
    if options.reduction == "none":
        return loss
    return loss.sum() if options.reduction == "sum" else loss.sum() / labels.counts.sum()


def token_losses(found: Terms, labels: Labels, options: LossOptions) -> Tensor:
    """Make the loss of each token, of what all ranks know of its row.

    Shape:
        found: three of [N]; the last may be empty without smoothing. Returns [N].
    """
    lse, target, total = found
    loss = lse - (1 - options.label_smoothing) * target
    if options.label_smoothing:
        loss = loss - options.label_smoothing / labels.size * total
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    return torch.where(labels.counts, loss, 0)


def token_slopes(own: Tensor, whole: Terms, labels: Labels, options: LossOptions) -> Terms:
    """Return the gradients of the sum of `token_losses` for what this rank knows of each row.

    Shape:
        own: this rank's log-sum-exp, [N]; whole: of all ranks, as in `token_losses`, and so is what
        is returned.
    """
    lse, target, total = whole
    of_lse = (1 + 2 * options.z_loss * lse) * (own - lse).exp()
    of_target = torch.full_like(target, options.label_smoothing - 1)
    of_total = torch.full_like(total, -options.label_smoothing / labels.size)
    slopes = of_lse, of_target, of_total
    return tuple(torch.where(labels.counts, g, 0) if len(g) else g for g in slopes)  # pyright: ignore[reportReturnType]


class _SumOverRanks(torch.autograd.Function):
    """All-reduce SUM forward; nothing backward, since every rank has the same loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None


def _over_ranks(found: Terms, group: dist.ProcessGroup) -> Terms:
    largest = found[0].detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shared = _SumOverRanks.apply(_summands(found, largest), group)
    return _joined(shared, largest)  # pyright: ignore[reportArgumentType]


def joined(found: Terms, group: str) -> Terms:
    """Join what the ranks know of each row, without gradients: an all-reduce MAX and a SUM.

    Args:
        found: this rank's.
        group: its name, by which an operator of torch can be given it.
    """
    largest = _reduced(found[0], "max", group)
    return _joined(_reduced(_summands(found, largest), "sum", group), largest)


def _reduced(x: Tensor, how: str, group: str) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, how, group))


def _summands(found: Terms, largest: Tensor) -> Tensor:
    lse, target, total = found
    return torch.stack([(lse - largest).exp(), target, *([total] if total.numel() else [])])


def _joined(summed: Tensor, largest: Tensor) -> Terms:
    parts = list[Tensor](summed.unbind(0))
    total = parts[2] if len(parts) > 2 else largest.new_empty(0)
    return parts[0].log() + largest, parts[1], total
