"""The head of a language model: scores of the next token, or their losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from mt_fusions import IGNORE_INDEX, LOSS, LossOptions
from mt_kernels import Choice, Selector
from mt_parallel_state import (
    PartitionSpec,
    all_gather,
    copy_to_group,
    gather_from_group,
    shard_param,
)
from mt_tensor_parallel import linear_cross_entropy_and_z, parallel_linear
from torch import Tensor, nn

from mt_model.block.initial import start_from
from mt_model.block.losses import Losses
from mt_model.block.norm import stream_norm
from mt_model.block.shard_context import ShardContext
from mt_model.kernels.activation import PlainActivation
from mt_model.language.divergence import Scoring, Teaching, divergence

if TYPE_CHECKING:
    from mt_model.language.config import ModelConfig


class LanguageHead(nn.Module):
    """An optional transform, a scale, and the product with a row for each token.

    Parameters: `weight` [vocab_rows, hidden] and `bias` [vocab_rows], split over "tp" in their
    first dim, and `transform.*` (`HeadTransform`). The weight of a tied head is the embedding's.

    Args:
        config: Configuration of the model.
        shard: This rank's share of the model.
    """

    def __init__(self, config: ModelConfig, *, shard: ShardContext) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.loss = Selector(LOSS, shard.kernels.loss)
        rows, hidden = config.vocab_rows // shard.tp, config.hidden_size
        kind, transform = config.head_transform, None
        if kind is not None:
            transform = HeadTransform(config, kind, shard=shard)
        self.transform = transform
        self.weight = self.bias = None
        if not config.tied:
            self.weight = self._vocabulary(rows, hidden)
            start_from(self.weight, "embedding")
        if config.head_bias:
            self.bias = self._vocabulary(rows)

    def _vocabulary(self, *shape: int) -> nn.Parameter:
        values = torch.empty(*shape, dtype=self.shard.dtype, device="meta")
        spec = PartitionSpec() if self.shard.group is None else PartitionSpec("tp")
        return shard_param(nn.Parameter(values), spec)

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        tied: Tensor | None = None,
        with_z: bool = True,
        teaching: Teaching | None = None,
    ) -> Tensor | Losses:
        """Score the next token, or sum the cross entropies of the scores with labels.

        Args:
            x: The last layer's output, normed.
            labels: Labels of this rank's tokens; -100 does not count.
            weights: Weight of the loss of each label; None is 1 for all. Then the logits are made
                again in backward.
            tied: The embedding's matrix, for a tied head.
            with_z: Include the loss `z` if the model has one.
            teaching: A teacher's side, for the loss `distillation` in place of the others.

        Returns:
            Scores of the whole vocabulary, gathered over the tensor-parallel group; with labels
            the losses: `lm`, the sum; `tokens`, the number of labels; and for a model with a
            `z_loss` the sum `z`, whose gradient is computed together with the gradient of `lm`.

        Shape:
            x: [B, S, hidden] (S / tp tokens under sequence parallelism); labels, weights: [B, S];
            scores: [B, S, vocab_size].
        """
        x, weight = self._product(x, tied)
        if labels is None:
            return self._scores(x, weight)
        if teaching is not None:
            return {"distillation": self._divergence(x, weight, labels, teaching)}
        z_loss = self.config.z_loss if with_z else 0.0
        return self._losses((x, weight), labels, weights, z_loss)

    @torch.no_grad()
    def teach(self, x: Tensor, temperature: float, *, tied: Tensor | None = None) -> Teaching:
        """Return the operands by which a student learns this head's scores.

        Args:
            x: The last layer's output, normed.
            temperature: Divisor of the scores.
            tied: The embedding's matrix, for a tied head.
        """
        return Teaching(self._scoring(*self._product(x, tied)), temperature)

    def _product(self, x: Tensor, tied: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the operands of the head's product."""
        weight = self.weight if tied is None else tied
        if weight is None:
            raise ValueError("the head of a tied model needs the embedding's matrix as `tied`")
        x = x if self.transform is None else self.transform(x)
        return x if self.config.logit_scale == 1 else x * self.config.logit_scale, weight

    def kernel_choices(self, like: Tensor) -> Iterator[Choice[Any]]:
        """Yield the kernel of the losses."""
        yield self.loss.choose(like)

    def _scores(self, x: Tensor, weight: Tensor) -> Tensor:
        group = self.shard.group
        scores = parallel_linear(
            x,
            weight,
            self.bias,
            mode="column",
            group=group,
            gemm=self.shard.gemm,
            sequence_parallel=self.shard.sequence_parallel,
        )
        if (softcap := self.config.logit_softcap) is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return gather_from_group(scores, group, dim=-1)[..., : self.config.vocab_size]

    def _losses(
        self,
        product: tuple[Tensor, Tensor],
        labels: Tensor,
        weights: Tensor | None,
        z_loss: float,
    ) -> Losses:
        x, weight = product
        lm, z = linear_cross_entropy_and_z(
            self._everywhere(x),
            weight,
            labels,
            bias=self.bias,
            options=LossOptions(
                reduction="sum" if weights is None else "none",
                z_loss=z_loss,
                vocab_size=self.config.vocab_size,
                softcap=self.config.logit_softcap,
                kernel=self.loss.find(x).function,
            ),
            group=self.shard.group,
            gemm=self.shard.gemm,
        )
        if weights is not None:
            lm, z = (torch.where(labels != IGNORE_INDEX, weights * each, 0) for each in (lm, z))
            lm, z = lm.sum(), z.sum()
        found = {"lm": lm, "z": z} if z_loss else {"lm": lm}
        return {**found, "tokens": (labels != IGNORE_INDEX).sum()}

    def _divergence(self, x: Tensor, weight: Tensor, labels: Tensor, teaching: Teaching) -> Tensor:
        return divergence(
            self._scoring(x, weight),
            teaching,
            labels != IGNORE_INDEX,
            vocab_size=self.config.vocab_size,
            group=self.shard.group,
        )

    def _scoring(self, x: Tensor, weight: Tensor) -> Scoring:
        return Scoring(self._everywhere(x), weight, self.bias, self.config.logit_softcap)

    def _everywhere(self, x: Tensor) -> Tensor:
        """Gather the tokens of all ranks that share the vocabulary; backward sums gradients."""
        if self.shard.sequence_parallel:
            return all_gather(x, self.shard.group, dim=1)
        return copy_to_group(x, self.shard.group)


class HeadTransform(nn.Module):
    """`norm(act(W x + b))`, as in the head of BERT's masked language model.

    Parameters: `weight` [hidden, hidden], `bias` [hidden] and `norm.*`. Every tensor-parallel rank
    holds them whole; under sequence parallelism each rank transforms its own tokens, and gradients
    are partial.

    Args:
        config: Configuration of the model.
        kind: Name of the activation.
        shard: This rank's share of the model.

    Shape:
        forward(x): [..., hidden] -> the same.
    """

    def __init__(self, config: ModelConfig, kind: str, *, shard: ShardContext) -> None:
        super().__init__()
        self.gemm, size = shard.gemm, config.hidden_size
        self.activation = PlainActivation(kind, shard.kernels.activations)
        like = {"dtype": shard.dtype, "device": torch.device("meta")}
        self.weight = nn.Parameter(torch.empty(size, size, **like))
        self.bias = nn.Parameter(torch.empty(size, **like))
        shard.mark_replicated(self, partial=shard.sequence_parallel)
        self.norm = stream_norm(config, shard)

    def forward(self, x: Tensor) -> Tensor:
        """Transform the head's input."""
        y = parallel_linear(x, self.weight, self.bias, mode="column", gemm=self.gemm)
        return self.norm(self.activation(y))
