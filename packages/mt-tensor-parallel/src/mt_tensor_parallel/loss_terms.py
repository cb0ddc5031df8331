"""What a token's loss is made of, and its gradient, whichever way the logits are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from mt_files import check_type
from mt_parallel_state import Group, group_rank, group_size
from torch import Tensor

from mt_tensor_parallel.arguments import check_number, positive_int

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What a token's loss is made of, wherever its logits come from.

    `loss = lse - (1 - s) x_label - s mean_k x_k + z lse^2` with `lse` the log-sum-exp over
    the K real tokens and `s = alpha K / (K - 1)`: label smoothing moves `alpha` of the target
    to the other K - 1 tokens (torch's `label_smoothing` is `s`). The z-loss keeps `lse` near
    zero (Chowdhery et al. 2022, PaLM). K and the mean are of the whole vocabulary, not of a shard.

    Attributes:
        ignore_index: Tokens with this label have neither loss nor gradient.
        label_smoothing: alpha, from 0 to (K - 1) / K.
        z_loss: z, 0 or more.
        vocab_size: K; global ids from there on are padding and get no probability. None means all.
        softcap: Logits become `softcap * tanh(logit / softcap)`, in fp32; None caps nothing.
        kernel: What computes softmax and gradient: `torch` (its softmax, in place), `fused`
            (mt-fusions: blocks in cache on a CPU, Triton on CUDA), the plain `reference`, or `auto`
            for the first of them.
        block_size: Tokens that are computed at a time, at least 1. None takes as many as fit the
            cache, or a few million logits.

    Raises:
        TypeError: Something is no number.
        ValueError: A number is out of range.

    Example:
        >>> LossOptions(label_smoothing=0.1).z_loss
        0.0
    """

    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    vocab_size: int | None = None
    softcap: float | None = None
    block_size: int | None = None
    kernel: Literal["auto", "fused", "torch", "reference"] = "auto"

    def __post_init__(self) -> None:
        check_number(self.label_smoothing, "label_smoothing")
        check_number(self.z_loss, "z_loss")
        if self.z_loss < 0:
            raise ValueError(f"z_loss={self.z_loss} must be 0 or more")
        if self.vocab_size is not None:
            check_type("vocab_size", self.vocab_size, int)
        if self.softcap is not None:
            check_number(self.softcap, "softcap")
            if self.softcap <= 0:
                raise ValueError(f"softcap={self.softcap} must be above 0; None caps nothing")
        if self.block_size is not None:
            positive_int(self.block_size, "block_size")


PLAIN_LOSS = LossOptions()


class LossTerms:
    """The terms of a token's loss on this rank's columns of the vocabulary.

    Args:
        width: This rank's columns.
        group: Ranks that share the vocabulary.
        options: What the loss is made of; it has the formula.

    Attributes:
        group: Ranks that share the vocabulary, or None for one.
        vocab_size: K.
        smoothing: s.
        first: Global id of this rank's first column.
        columns: This rank's columns that are no padding.

    Raises:
        TypeError: `options` are none.
        ValueError: A number is out of range.
    """

    def __init__(self, width: int, group: Group, options: LossOptions) -> None:
        check_type("options", options, LossOptions)
        vocab_size, label_smoothing = options.vocab_size, options.label_smoothing
        ranks = group_size(group)
        if ranks > 1 and width == vocab_size:
            raise ValueError(
                f"every rank has all {vocab_size} columns of the vocabulary, and would count them "
                f"{ranks} times; give each rank its part of the logits, or group=None"
            )
        padded = width * ranks
        size = padded if vocab_size is None else vocab_size
        if not 1 <= size <= padded:
            raise ValueError(
                f"vocab_size={size} must be from 1 to the {padded} columns of the logits"
            )
        largest = (size - 1) / size
        if not 0 <= label_smoothing <= largest:
            raise ValueError(f"label_smoothing={label_smoothing} must be from 0 to {largest:.6g}")
        self.group, self.vocab_size = group if ranks > 1 else None, size
        self.ignore_index, self.z_loss = options.ignore_index, options.z_loss
        self.softcap = options.softcap
        self.smoothing = label_smoothing * size / (size - 1) if size > 1 else 0.0
        self.first = group_rank(group) * width
        self.columns = min(max(size - self.first, 0), width)

    def over_ranks(
        self, lse: Tensor, target: Tensor, sums: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Join what each rank knows of the tokens: an all-reduce MAX, and one SUM of all the rest.

        Args:
            lse: Log-sum-exp over this rank's logits.
            target: The label's logit, 0 where it is not here.
            sums: Sum of this rank's logits, or None.

        Returns:
            The three of the whole vocabulary.

        Shape:
            All [N].
        """
        largest = lse.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        parts = [(lse - largest).exp_(), target, *([] if sums is None else [sums])]
        shared = torch.stack(parts)
        dist.all_reduce(shared, group=self.group)
        return shared[0].log_().add_(largest), shared[1], None if sums is None else shared[2]

    def capped(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Cap logits, in place outside of compiled graphs, and return the derivative of that.

        Shape:
            logits: any. Returns the same twice.
        """
        if self.softcap is None:
            return logits, None
        turned = torch.tanh(logits / self.softcap)
        slope = 1 - turned.square()
        if torch.compiler.is_compiling():
            return turned * self.softcap, slope
        return torch.mul(turned, self.softcap, out=logits), slope

    def loss(self, lse: Tensor, target: Tensor, total: Tensor | None) -> Tensor:
        """The loss of each token.

        Args:
            lse: Log-sum-exp over the vocabulary.
            target: The label's logit.
            total: Sum of all logits, needed with smoothing.

        Shape:
            All [N]. Returns [N].
        """
        if self.smoothing == 0 and self.z_loss == 0:
            return lse - target
        loss = lse - (1 - self.smoothing) * target + self.z_loss * lse.square()
        return loss if total is None else loss - self.smoothing / self.vocab_size * total

    def grad_(self, probs: Tensor, lse: Tensor, column: Tensor, hit: Tensor) -> Tensor:
        """Turn probabilities into the gradient of the logits, in place.

        Shape:
            probs: [N, columns]. lse, column, hit: [N]; `column` is the label's own column,
            `hit` whether it has one here.
        """
        if self.z_loss:
            probs.mul_((1 + 2 * self.z_loss * lse).unsqueeze(1))
        if self.smoothing:
            probs.sub_(self.smoothing / self.vocab_size)
        share = hit.to(probs.dtype).mul_(self.smoothing - 1)
        return probs.scatter_add_(1, column.unsqueeze(1), share.unsqueeze(1))
