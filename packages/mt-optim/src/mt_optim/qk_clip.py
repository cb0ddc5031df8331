"""QK-clip: the factors of query and key weights after a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mt_files import Checks

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 3.4e38  # of fp32


@dataclass(frozen=True, kw_only=True)
class QKClip:
    """The settings of QK-clip (Kimi K2, arXiv 2507.20534).

    Attributes:
        threshold: Largest attention score without clipping.
        alpha: Share of the scaling that the queries take, 0 to 1; the keys take the rest.

    Raises:
        FieldError: A setting is out of range, or not a number.

    Example:
        >>> query, key = QKClip(threshold=100.0).scales(torch.tensor([50.0, 400.0]))
        >>> query.tolist(), key.tolist()
        ([1.0, 0.5], [1.0, 0.5])
    """

    threshold: float = 100.0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "threshold")
        checks.at_most(_LARGEST, "threshold")
        checks.at_least(0, "alpha")
        checks.at_most(1, "alpha")
        checks.done()

    def scales(self, max_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the query and of the key weights.

        If the largest score m of a step exceeds the threshold t, both together bring it back to t:
        with `g = min(t / m, 1)` queries get `g ** alpha` and keys `g ** (1 - alpha)`. Scores are
        the scaled inputs of the softmax, over the whole batch, without masked pairs.

        Args:
            max_logits: The largest score of each head, or of the heads that share a key.

        Shape:
            max_logits: any. Both results have the same.
        """
        scale = (self.threshold / max_logits.clamp(min=self.threshold)).clamp(max=1.0)
        return scale**self.alpha, scale ** (1 - self.alpha)
