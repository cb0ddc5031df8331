"""Classes of whole sequences, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks

from mt_model.block.sizes import MAX_WIDTH


@dataclass(frozen=True, kw_only=True)
class PooledHeadConfig:
    """Scores of classes from the first token's features, through a layer `tanh(W x + b)` (BERT).

    Its loss is `nsp`, next sentence prediction (Devlin et al., 2019): the sum of the cross
    entropies with `batch["sequence_labels"]`, divided by the number of sequences.

    Attributes:
        num_classes: Number of classes of a sequence; BERT has 0, the second text follows the
            first, and 1, it does not.
        loss_weight: Weight of `nsp` in the objective.
    """

    num_classes: int = 2
    loss_weight: float = 1.0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "num_classes")
        checks.at_most(MAX_WIDTH, "num_classes")
        checks.above(0, "loss_weight")
        checks.done()

    def num_parameters(self, hidden_size: int) -> int:
        """Count the parameters of the layer and of the classes."""
        return (hidden_size + self.num_classes) * (hidden_size + 1)

    def flops(self, hidden_size: int) -> int:
        """Count the operations of forward and backward for a sequence; a multiply-add is two."""
        return 6 * hidden_size * (hidden_size + self.num_classes)
