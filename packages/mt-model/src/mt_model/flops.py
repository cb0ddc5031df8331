"""Counts that follow from a config alone: parameters and floating point operations."""

from __future__ import annotations

from mt_model.config import ModelConfig


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Count floating point operations of forward plus backward for one token of a full sequence.

    A multiply-add counts as 2 and backward as twice forward. Projections of attention, MLP and
    head are counted, and the causal half of the score and value products:
    `6 h e ffn + 6 h (q + 2 kv) + 6 q h + 6 q s` per layer and `6 h V` for the head, with
    `e = 3` gated, else 2. Embedding look-up, norms and softmax are not counted, nor is
    recomputation, so that the number is the one MFU is defined on (Chowdhery et al., 2022).

    Args:
        config: the model.
        sequence_length: tokens per sequence (`s`).
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {type(config).__name__}")
    return config.flops_per_token(sequence_length)


def num_parameters(config: ModelConfig) -> int:
    """Count the parameters of the whole model; a tied head counts once."""
    return config.num_parameters
