"""Multi-token prediction, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks

from mt_model.stack.layer_config import LayerConfig

MAX_DEPTHS = 64


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Modules after the last layer that predict further tokens (DeepSeek-V3, section 2.2).

    The model predicts the next token, and module k the token k further on, from the output of the
    module before and the embedding of that token's predecessor. Modules share the model's embedding
    and head. Scores are the same without them; in generation they may guess tokens (`GPT.ahead`).

    Attributes:
        depths: Number of modules, one after the other.
        layer: Layer of each module; a copy of the model's last layer where None.
        weight: Weight in the objective of the mean cross entropy over the modules (Megatron-LM:
            0.1; DeepSeek-V3: 0.3, at the end 0.1).
    """

    depths: int = 1
    layer: LayerConfig | None = None
    weight: float = 0.1

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "depths")
        checks.at_most(MAX_DEPTHS, "depths")
        checks.above(0, "weight")
        checks.done()
        if self.layer is not None and self.layer.repeat > 1:
            text = f"has repeat={self.layer.repeat}; a module has one layer, so leave it out"
            checks.add("layer", text)
        checks.done()
