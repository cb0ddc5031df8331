"""Checks that ranks can share a model."""

from __future__ import annotations

from collections.abc import Sequence

from mt_files import check_type

from mt_model.stack.config import StackConfig


def validate_split(config: StackConfig, tp: int) -> None:
    """Check that `tp` ranks can share every split dim of the model.

    Raises:
        TypeError: `config` is no StackConfig.
        ValueError: Heads, FFN width or vocabulary do not divide by `tp`, or key/value heads
            neither divide by it nor divide it; the message gives both and the nearest that do.
    """
    check_type("config", config, StackConfig)
    if not isinstance(tp, int) or tp < 1:
        raise ValueError(f"tp must be a whole number of ranks, 1 or more; got {tp!r:.80}")
    config.check_split(tp)


def validate_context(
    config: StackConfig, algorithms: Sequence[str], *, cp: int, inner: int = 1, tp: int = 1
) -> None:
    """Check that `cp` ranks can share the sequences of every layer.

    Args:
        config: Configuration of the model.
        algorithms: Algorithm of each layer; modules after the last layer use the last one.
        cp: Number of ranks that share a sequence.
        inner: Number of ranks that swap tokens for heads in the hierarchical algorithm.
        tp: Number of ranks that share the weights.

    Raises:
        ValueError: A layer can't be shared this way; the message says why.
    """
    behind = len(config.all_layers) - config.num_layers
    each = (*algorithms, *tuple(algorithms[-1:]) * behind)
    for index, (layer, algorithm) in enumerate(zip(config.all_layers, each, strict=True)):
        if layer.mixer is None:
            continue
        why = layer.mixer.context_obstacle(algorithm, cp=cp, inner=inner, tp=tp)
        if why is not None:
            raise ValueError(f"{why} (layer {index})")
