"""The residual stream of a model, as its blocks know it."""

from __future__ import annotations

from dataclasses import dataclass

from mt_model.block.norm_config import NormConfig


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """The residual stream that mixers and feed-forwards read and write.

    A block needs to know nothing else of the model around it.

    Attributes:
        hidden_size: Width of the residual stream.
        max_sequence_length: Longest sequence; also the rows of a learned position table.
        norm: Form of every norm.
        dropout: Probability of dropping an element of the embedding, mixer or feed-forward output
            in training.
    """

    hidden_size: int
    max_sequence_length: int
    norm: NormConfig = NormConfig()  # noqa: RUF009 - it is frozen
    dropout: float = 0.0
