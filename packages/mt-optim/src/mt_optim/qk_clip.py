"""QK-clip: the factors of query and key weights after a step."""

from __future__ import annotations

from mt_files import check_type
from torch import Tensor

from mt_optim.checks import check_number


def qk_clip_scales(
    max_logits: Tensor, *, threshold: float = 100.0, alpha: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Return the factors of the query and of the key weights (Kimi K2, arXiv 2507.20534).

    If the largest score m of a step exceeds the threshold t, both together bring it back to t: with
    `g = min(t / m, 1)` queries get `g ** alpha` and keys `g ** (1 - alpha)`. Scores are the scaled
    inputs of the softmax, over the whole batch, without masked pairs.

    Args:
        max_logits: The largest score of each head, or of the heads that share a key.
        threshold: The largest score without clipping.
        alpha: Share of the scaling for the queries, 0 to 1.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting is not a number.

    Shape:
        max_logits: any. Both results have the same.

    Example:
        >>> query, key = qk_clip_scales(torch.tensor([50.0, 400.0]), threshold=100.0)
        >>> query.tolist(), key.tolist()
        ([1.0, 0.5], [1.0, 0.5])
    """
    check_type("max_logits", max_logits, Tensor)
    check_qk_clip(threshold, alpha)
    scale = (threshold / max_logits.clamp(min=threshold)).clamp(max=1.0)
    return scale**alpha, scale ** (1 - alpha)


def check_qk_clip(threshold: float, alpha: float) -> None:
    """Check the settings of `qk_clip_scales`; raises as that does."""
    if not 0 < check_number("threshold", threshold) < float("inf"):
        raise ValueError(f"threshold must be positive and finite, got {threshold}")
    if not 0 <= check_number("alpha", alpha) <= 1:
        raise ValueError(f"alpha must be a number from 0 to 1, got {alpha}")
