"""Dropout whose mask depends only on the sample, the position and the element."""

from __future__ import annotations

import torch
from mt_context_parallel import AttentionDropout
from mt_parallel_state import hash_key, random_uniform
from torch import Tensor


class DropoutSite:
    """One place in the model where elements are dropped.

    The mask is `random_uniform(key, index)` with the global index of the element: the same for
    every split of batch, sequence, heads or layers over ranks. Sample ids are unique per training
    sample, so a sample seen again under another id is dropped differently.

    Args:
        probability: Probability of dropping an element; kept ones are divided by 1 - probability.
        seed: Seed of the run.
        layer: Layer index in the whole model; -1 for the embedding.
        name: Name of the place in the layer.
    """

    def __init__(self, probability: float, *, seed: int, layer: int, name: str) -> None:
        self.probability, self.key = probability, hash_key("dropout", seed, layer, name)
        # A number would be built into a compiled graph, which then serves this site alone.
        self._key = torch.tensor(self.key, device="cpu")

    @property
    def draws(self) -> int | Tensor:
        """The key for `random_uniform`: in a compiled graph one that like sites may differ in."""
        return self._key if torch.compiler.is_compiling() else self.key

    def __call__(self, x: Tensor, index: Tensor | None) -> Tensor:
        """Drop elements of `x`; the identity when the probability or the index is absent.

        Shape:
            x, index: equal. Returns the same.
        """
        if index is None or not self.probability:
            return x
        keep = random_uniform(self.draws, index) >= self.probability
        return x * keep.to(x.dtype).div_(1 - self.probability)

    def of_weights(
        self, sample_ids: Tensor | None, *, first_head: int, num_heads: int
    ) -> AttentionDropout | None:
        """Return the dropout of attention weights; None where nothing is dropped.

        Args:
            sample_ids: Number of each sequence's sample; None without dropout.
            first_head: First query head of this rank.
            num_heads: Number of query heads of the whole model.
        """
        if sample_ids is None or not self.probability:
            return None
        return AttentionDropout(
            probability=self.probability,
            key=self.draws,
            sample_ids=sample_ids,
            first_head=first_head,
            num_heads=num_heads,
        )


def hidden_index(
    sample_ids: Tensor,
    positions: Tensor,
    length: int,
    hidden_size: int,
    *,
    own: range | None = None,
) -> Tensor:
    """Return the global index of every element of hidden states.

    Args:
        sample_ids: Number of each sequence's sample.
        positions: Positions of this rank's tokens in the sequence.
        length: Number of positions that each sequence takes in the numbering.
        hidden_size: Number of elements per position.
        own: Elements of each position that this rank has; all where None.

    Shape:
        sample_ids: [B]; positions: [S]. Returns [B, S, hidden_size or len(own)].
    """
    tokens = sample_ids[:, None] * length + positions[None, :]
    own = range(hidden_size) if own is None else own
    elements = torch.arange(own.start, own.stop, device=tokens.device)
    return tokens[..., None] * hidden_size + elements
